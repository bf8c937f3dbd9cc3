"""Distributions over the vocabulary that several losses read, and whose gradient is written once.

What a loss reads of a distribution is few numbers: log-probabilities of selected tokens, the L1 distance from another.
Their gradients are collected while a backward pass goes through the losses; then one pass over the logits writes the
sum of them all. No normalised V-sized tensor is kept, and none is made larger than a block of rows.

Shapes: n distributions (rows), V vocabulary, T tokens; index tensors are free in shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treespark.selection import at_least_float32, log_normalizer, row_blocks
from treespark.tree import Proposer
from treespark.workspace import Workspace, buffer, current

T = TypeVar("T")


def shared(compute: Callable[[Any], T]) -> cached_property[T]:
    """Makes a method a property that is computed once, with a gradient if its object was made where there is one.

    Several losses read it, and the first of them may do so under `torch.no_grad`; the others still need the gradient.
    The object says in `differentiable` whether gradients were enabled when it was made.
    """

    @wraps(compute)
    def once(owner: Any) -> T:
        with torch.set_grad_enabled(owner.differentiable):
            return compute(owner)

    return cached_property(once)


class _Ledger:
    """Gradients of what was read of the rows, between the readers' backward and the rows' own."""

    def __init__(self) -> None:
        self.normalizer: Tensor | None = None
        self.selected: list[tuple[Tensor, Tensor, Tensor]] = []
        self.distances: list[tuple[Tensor, Tensor, Tensor]] = []

    def drain(self) -> tuple[Tensor | None, list[tuple[Tensor, Tensor, Tensor]], list[tuple[Tensor, Tensor, Tensor]]]:
        """Returns what was collected, and starts anew: a graph that is kept may be used again."""
        found = self.normalizer, self.selected, self.distances
        self.normalizer, self.selected, self.distances = None, [], []
        return found


class _Rows(torch.autograd.Function):
    """The logits themselves; backward writes the gradient that the readers collected."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Distributions) -> Tensor:
        ctx.save_for_backward(logits)
        # Of the rows' object only what is small: it would be a cycle, and its logits would stay alive where a chunk is
        # recomputed in the backward pass.
        ctx.ledger, ctx.known, ctx.workspace = rows._ledger, rows._known, current()
        ctx.set_materialize_grads(False)
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dense: Tensor | None) -> tuple[Tensor | None, None]:
        # Detached: what may become the gradient must not carry the logits' own history.
        logits = ctx.saved_tensors[0].detach()
        normalizer, selected, distances = ctx.ledger.drain()
        if normalizer is None and not selected and not distances:
            return dense, None
        workspace: Workspace | None = ctx.workspace
        overwrite = workspace is not None and workspace.may_overwrite(logits)
        gradient = logits if overwrite else buffer(logits.shape, logits.dtype, logits.device, workspace)
        if normalizer is None and not distances:
            gradient.zero_()
        else:
            _write(gradient, logits, _normalizer(logits, ctx.known), normalizer, distances)
        for index, tokens, change in selected:
            places = index.unsqueeze(-1).expand_as(tokens)
            gradient.index_put_((places, tokens), change.to(gradient.dtype), accumulate=True)
        return gradient if dense is None else gradient.add_(dense), None


def _write(
    gradient: Tensor,
    logits: Tensor,
    values: Tensor,
    normalizer: Tensor | None,
    distances: list[tuple[Tensor, Tensor, Tensor]],
) -> None:
    """Writes p · (g + Σ c (s - Σ_v p s)) into `gradient`, which may be `logits` itself.

    p is the softmax, g the gradient of the normaliser, c that of a distance to q, and s the sign of p - q.
    """
    for rows in row_blocks(logits):
        block = gradient[rows]
        wide = block if block.dtype == values.dtype else torch.empty_like(block, dtype=values.dtype)
        torch.sub(logits[rows], values[rows, None], out=wide).exp_()
        factor = None if normalizer is None else normalizer[rows, None].to(wide.dtype)
        for other, other_values, change in distances:
            sign = _difference(wide, other[rows], other_values[rows, None]).sign_()
            sign.sub_(torch.mul(wide, sign).sum(-1, keepdim=True)).mul_(change[rows, None])
            factor = sign if factor is None else sign.add_(factor)
        assert factor is not None, "there is something to write"
        wide.mul_(factor)
        if wide is not block:
            block.copy_(wide)


def _difference(probs: Tensor, other: Tensor, normalizer: Tensor) -> Tensor:
    """Returns probs - softmax(other), a new tensor."""
    found = torch.sub(other, normalizer).exp_()
    return torch.sub(probs, found, out=found)


class _Read(torch.autograd.Function):
    """A value that was read of the rows; its gradient goes into the ledger, not through autograd."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, ledger: _Ledger, kind: str, *parts: Tensor) -> Tensor:
        ctx.ledger, ctx.kind = ledger, kind
        ctx.save_for_backward(*parts)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ledger, parts = ctx.ledger, ctx.saved_tensors
        if ctx.kind == "normalizer":
            ledger.normalizer = gradient if ledger.normalizer is None else ledger.normalizer + gradient
        elif ctx.kind == "selected":
            ledger.selected.append((*parts, gradient))
        else:
            ledger.distances.append((*parts, gradient))
        return (None,) * (4 + len(parts))


@torch.no_grad()
def _normalizer(logits: Tensor, known: list[Tensor]) -> Tensor:
    """Returns logsumexp of logits [n, V]: [n]; found once, and kept in the list `known`."""
    if not known:
        known.append(log_normalizer(logits))
    return known[0]


class Distributions:
    """softmax(logits), one distribution per row.

    Args:
        logits: [n, V].
        normalizer: [n] their logsumexp, in float32 at least, if at hand.

    Attributes:
        logits: [n, V], differentiable; a loss that computes with all of them gets a V-sized gradient of its own.
    """

    def __init__(self, logits: Tensor, normalizer: Tensor | None = None) -> None:
        self._plain = logits.detach()
        self._known = [] if normalizer is None else [normalizer]
        self._ledger: _Ledger | None = None
        self.logits = logits
        if torch.is_grad_enabled() and logits.requires_grad:
            self._ledger = _Ledger()
            self.logits = _Rows.apply(logits, self)  # type: ignore[no-untyped-call]

    def _values(self) -> Tensor:
        return _normalizer(self._plain, self._known)

    def _read(self, value: Tensor, kind: str, *parts: Tensor) -> Tensor:
        if self._ledger is None or not torch.is_grad_enabled():
            return value
        read: Tensor = _Read.apply(self.logits, value, self._ledger, kind, *parts)  # type: ignore[no-untyped-call]
        return read

    @cached_property
    def log_normalizer(self) -> Tensor:
        """[n] logsumexp of the logits, differentiable."""
        with torch.set_grad_enabled(self._ledger is not None):  # it is kept, whoever reads it first
            return self._read(self._values().clone(), "normalizer")

    def log_probs(self, index: Tensor, tokens: Tensor) -> Tensor:
        """Returns differentiable log-probabilities [..., T] of tokens [..., T] under rows index [...], at most 0."""
        picked = at_least_float32(self._plain[index.unsqueeze(-1), tokens])
        picked = self._read(picked, "selected", index, tokens)
        return (picked - self.log_normalizer[index].unsqueeze(-1)).clamp(max=0)

    def distance(self, logits: Tensor, normalizer: Tensor) -> Tensor:
        """Returns Σ_v abs(p(v) - q(v)) for every row, differentiable in p: [n].

        Args:
            logits: [n, V] logits of q, taken as constant.
            normalizer: [n] their logsumexp.
        """
        values, found = self._values(), torch.empty_like(self._values())
        with torch.no_grad():
            for rows in row_blocks(self._plain):
                probs = torch.sub(self._plain[rows], values[rows, None]).exp_()
                difference = _difference(probs, logits[rows], normalizer[rows, None])
                found[rows] = torch.linalg.vector_norm(difference, ord=1, dim=-1)
        return self._read(found, "distance", logits, normalizer)


class Place(NamedTuple):
    """Where the distributions of one call of `RowRecorder.add` are.

    Attributes:
        part: Number of the tensor among those of `finish`.
        rows: [M, P] rows of that tensor.
    """

    part: int
    rows: Tensor


class RowRecorder(Protocol):
    """Conditional logits as a policy asks for them; they become differentiable together, when all are known."""

    def add(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Place, Tensor]:
        """Returns logits [M, P, V] under the parents [M, P], without a gradient, their place, and the carry after."""

    def finish(self) -> list[Tensor]:
        """Returns differentiable tensors [n, V] that hold the logits of all calls."""


class LogitProposer(Proposer, Protocol):
    """A proposer that also gives the differentiable logits that its proposals come from."""

    @property
    def base_logits(self) -> Tensor:
        """Logits [M, K, V] of each depth without any parent's correction."""

    def logits(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits [M, P, V] under the parents [M, P], and the carry after them [M, P, c]."""


@runtime_checkable
class RecordingProposer(LogitProposer, Protocol):
    """A proposer that keeps the logits of a policy's parents in its own way."""

    def record(self, count: int | None) -> RowRecorder:
        """Returns a recorder for about `count` parents of all anchors together, or for an unknown number."""


class PlainRows:
    """Records the logits of any proposer, each call by itself."""

    def __init__(self, proposer: LogitProposer) -> None:
        self._proposer = proposer
        self._kept: list[Tensor] = []

    def add(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Place, Tensor]:
        """See `RowRecorder`."""
        logits, after = self._proposer.logits(depth, parents, carry)
        index = torch.arange(parents.numel(), device=parents.device).view(parents.shape)
        self._kept.append(logits.flatten(0, 1))
        return logits.detach(), Place(len(self._kept) - 1, index), after

    def finish(self) -> list[Tensor]:
        """See `RowRecorder`."""
        return self._kept
