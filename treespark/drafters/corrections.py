"""Base logits plus Markov corrections, for all parents of a chunk of anchors, with one gradient for each large weight.

Shapes: M anchors, K depths, P parents of a call, n rows (all parents of all calls), u distinct tokens, r rank,
V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treespark.distributions import Place
from treespark.drafters.markov import MarkovHead
from treespark.workspace import Workspace, buffer, current


def at_depth(values: Tensor, depth: int | Tensor) -> Tensor:
    """Picks `values[:, depth - 1]` of [M, K, X]: [M, 1, X], or [M, P, X] for depths [M, P]."""
    if isinstance(depth, int):
        return values[:, depth - 1 : depth]
    rows = torch.arange(len(values), device=values.device).unsqueeze(1)
    return values[rows, depth - 1]


class _Call(NamedTuple):
    """Rows [start, start + M·P) belong to P parents each of M anchors, at one depth, at a path's, or at any."""

    start: int
    parents: int
    depth: int | Tensor | None


class _Corrected(torch.autograd.Function):
    """The rows that were already written, made differentiable in base logits, latents and W2."""

    @staticmethod
    def forward(
        ctx: Any,
        base: Tensor,
        latents: Tensor,
        weight: Tensor,
        rows: Tensor,
        inverse: Tensor | None,
        calls: list[_Call],
    ) -> Tensor:
        ctx.save_for_backward(latents, inverse)
        ctx.weight, ctx.calls, ctx.workspace = weight, calls, current()
        ctx.base = (base.shape, base.dtype)
        ctx.dtype = corrections_dtype(weight)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        latents, inverse = ctx.saved_tensors
        weight, workspace = ctx.weight, ctx.workspace
        shape, dtype = ctx.base
        found_base = found_latents = found_weight = None
        if ctx.needs_input_grad[0]:
            found_base = _base_gradient(gradient, shape, ctx.calls, workspace).to(dtype)
        narrow = gradient.to(ctx.dtype)
        if inverse is not None:
            if narrow is gradient and not _is_own(gradient, found_base, workspace) and len(inverse) > len(latents):
                narrow = buffer(gradient.shape, gradient.dtype, gradient.device, workspace).copy_(gradient)
            narrow, inverse = _merged(narrow, inverse, len(latents))
        if ctx.needs_input_grad[2]:
            inputs = (latents if inverse is None else latents[inverse]).to(narrow.dtype)
            total = None if workspace is None else workspace.sum_of(weight)
            if total is not None and total.dtype == narrow.dtype:
                total.addmm_(narrow.t(), inputs)
            else:
                product = (narrow.t() @ inputs).to(weight.dtype)
                found_weight = product if total is None else None
                if total is not None:
                    total.add_(product)
        if ctx.needs_input_grad[1]:
            found_latents = (narrow @ weight.to(narrow.dtype)).to(latents.dtype)
            if inverse is not None:
                found_latents = torch.empty_like(found_latents).index_copy_(0, inverse, found_latents)
        return found_base, found_latents, found_weight, None, None, None


def _base_gradient(gradient: Tensor, shape: torch.Size, calls: list[_Call], workspace: Workspace | None) -> Tensor:
    """Sums the rows' gradients [n, V] over the parents of each slot: [M, K, V]."""
    anchors, vocab = shape[0], shape[-1]
    if len(calls) == 1 and calls[0].depth is None:
        return gradient.view(shape)
    total = buffer((anchors * shape[1], vocab), gradient.dtype, gradient.device, workspace).zero_().view(shape)
    for call in calls:
        part = gradient[call.start : call.start + anchors * call.parents].view(anchors, call.parents, vocab)
        if call.depth is None:
            total.add_(part)
        elif isinstance(call.depth, int):
            for parent in part.unbind(1):
                total[:, call.depth - 1].add_(parent)
        else:
            row = torch.arange(anchors, device=gradient.device).unsqueeze(1) * shape[1]
            total.flatten(0, 1).index_add_(0, (row + call.depth - 1).flatten(), part.flatten(0, 1))
    return total


def _is_own(gradient: Tensor, other: Tensor | None, workspace: Workspace | None) -> bool:
    """Whether nobody else reads a gradient, so that it may be changed in place."""
    shared = other is not None and other.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()
    return not shared and workspace is not None and workspace.may_overwrite(gradient)


def _merged(gradient: Tensor, inverse: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Adds up in place the rows [n, V] of the same token: [u, V], and the number [u] of the token of each row.

    Rows move only where tokens repeat: repeats are added to the first row of their token, and later first rows take
    the places that became free.
    """
    size = len(inverse)
    if size == count:
        return gradient, inverse
    order = torch.arange(size, device=inverse.device)
    first = torch.full((count,), size, device=inverse.device).scatter_reduce(0, inverse, order, "amin")
    is_first = torch.zeros(size, dtype=torch.bool, device=inverse.device)
    is_first[first] = True
    repeats = (~is_first).nonzero().squeeze(1)
    gradient.index_add_(0, first[inverse[repeats]], gradient[repeats])
    free, late = repeats[repeats < count], first[first >= count]
    gradient[free] = gradient[late]
    order[free] = late
    return gradient[:count], inverse[order[:count]]


def corrections_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype in which W2 is applied: autocast's where it is on."""
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype == torch.float32:
        return torch.get_autocast_dtype(kind)
    return weight.dtype


class _TokenCorrections:
    """b(y) = W2 W1[y], computed once for each distinct token of a chunk; no gradient."""

    def __init__(self, markov: MarkovHead) -> None:
        self._markov = markov
        weight = markov.markov_w2.weight
        self._number = torch.full((markov.markov_w1.num_embeddings,), -1, device=weight.device)
        self._rows = weight.new_empty(0, len(weight), dtype=corrections_dtype(weight))
        self._used = 0

    def reserve(self, count: int) -> None:
        """Makes room for `count` more tokens."""
        size = self._used + count
        if size > len(self._rows):
            rows = buffer((size, self._rows.shape[1]), self._rows.dtype, self._rows.device, current())
            rows[: self._used] = self._rows[: self._used]
            self._rows = rows

    def numbers(self, tokens: Tensor) -> Tensor:
        """Returns the row of each token in `rows`."""
        new = torch.unique(tokens[self._number[tokens] < 0])
        if len(new):
            end = self._used + len(new)
            if end > len(self._rows):
                self.reserve(end)
            weight = self._markov.markov_w2.weight.detach().to(self._rows.dtype)
            latents = self._markov.markov_w1.weight.detach()[new].to(self._rows.dtype)
            torch.mm(latents, weight.t(), out=self._rows[self._used : end])
            self._number[new] = torch.arange(self._used, end, device=new.device)
            self._used = end
        return self._number[tokens]

    def copy(self, tokens: Tensor, out: Tensor) -> None:
        """Writes the corrections of tokens [n] into `out` [n, V]."""
        numbers = self.numbers(tokens)
        if out.dtype == self._rows.dtype:
            torch.index_select(self._rows, 0, numbers, out=out)
        else:
            out.copy_(self._rows[numbers])


class Corrections:
    """What the recorded rows of one chunk share: base logits, and corrections of tokens that were met before.

    Args:
        markov: The Markov head.
        base: [M, K, V] base logits.
    """

    def __init__(self, markov: MarkovHead, base: Tensor) -> None:
        self.markov, self.base = markov, base
        self._tokens = _TokenCorrections(markov) if markov.by_token_alone else None

    def reserve(self, count: int) -> None:
        """Makes room for `count` more parents."""
        if self._tokens is not None:
            self._tokens.reserve(count)

    def new_rows(self, size: int) -> Tensor:
        """Returns room for [size, V] logits."""
        base, dtype = self.base, corrections_dtype(self.markov.markov_w2.weight)
        dtype = torch.promote_types(base.dtype, dtype)
        return buffer((size, base.shape[-1]), dtype, base.device, current(), scratch=True)

    @torch.no_grad()
    def write(self, out: Tensor, tokens: Tensor, latents: Tensor | None, base: Tensor) -> None:
        """Writes base [M, P or 1, V] + corrections of tokens [M, P], or of latents [M, P, r], into out [n, V]."""
        if self._tokens is not None:
            self._tokens.copy(tokens.flatten(), out)
        else:
            assert latents is not None, "a head that looks at more than the token gives latents"
            weight = self.markov.markov_w2.weight
            dtype = corrections_dtype(weight)
            factors = latents.flatten(0, 1).to(dtype), weight.to(dtype).t()
            if out.dtype == dtype:
                torch.mm(*factors, out=out)
            else:
                out.copy_(factors[0] @ factors[1])
        out.view(*tokens.shape, -1).add_(base)

    def differentiable(self, rows: Tensor, tokens: Tensor, latents: Tensor | None, calls: list[_Call]) -> Tensor:
        """Returns written rows [n, V] with their gradient, for tokens [n] or latents [n, r]."""
        weight = self.markov.markov_w2.weight
        inverse: Tensor | None = None
        if latents is None:
            distinct, inverse = torch.unique(tokens, return_inverse=True)
            latents = self.markov.embed(distinct)
        found: Tensor = _Corrected.apply(self.base, latents, weight, rows, inverse, calls)  # type: ignore[no-untyped-call]
        return found

    def path(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Returns the logits [M, K, V] after parents [M, K] along one path."""
        latents = None if self._tokens is not None else self.markov.path(tokens, hidden)
        rows = self.new_rows(tokens.numel())
        self.write(rows, tokens, latents, self.base)
        flat = None if latents is None else latents.flatten(0, 1)
        found = self.differentiable(rows, tokens.flatten(), flat, [_Call(0, tokens.shape[1], None)])
        return found.view(*tokens.shape, -1)


class CorrectedRows:
    """Records a chunk's conditional logits in a few large tensors; see `treespark.distributions.RowRecorder`.

    Args:
        hidden: [M, K, H] states of the slots.
        shared: What the rows of a chunk share.
        capacity: Rows of one tensor.
    """

    def __init__(self, hidden: Tensor, shared: Corrections, capacity: int) -> None:
        self._hidden, self._shared, self._capacity = hidden, shared, capacity
        shared.reserve(capacity)
        self._parts: list[tuple[Tensor, list[_Call], list[Tensor], list[Tensor]]] = []
        self._used = 0

    def add(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Place, Tensor]:
        """See `RowRecorder`."""
        markov, size = self._shared.markov, parents.numel()
        latents, after = None, carry
        if not markov.by_token_alone:
            latents, after = markov.step(parents, carry, at_depth(self._hidden, depth))
        if not self._parts or self._used + size > len(self._parts[-1][0]):
            self._parts.append((self._shared.new_rows(max(self._capacity, size)), [], [], []))
            self._used = 0
        rows, calls, tokens, all_latents = self._parts[-1]
        start, self._used = self._used, self._used + size
        out = rows[start : self._used]
        self._shared.write(out, parents, latents, at_depth(self._shared.base.detach(), depth))
        calls.append(_Call(start, parents.shape[1], depth))
        tokens.append(parents.flatten())
        if latents is not None:
            all_latents.append(latents.flatten(0, 1))
        index = torch.arange(start, self._used, device=parents.device).view(parents.shape)
        return out.view(*parents.shape, -1), Place(len(self._parts) - 1, index), after

    def finish(self) -> list[Tensor]:
        """See `RowRecorder`."""
        finished = []
        for rows, calls, tokens, latents in self._parts:
            used = rows[: sum(len(part) for part in tokens)]
            factors = torch.cat(latents) if latents else None
            finished.append(self._shared.differentiable(used, torch.cat(tokens), factors, calls))
        return finished


class SlotRows:
    """Records the logits of a drafter without a Markov head: all parents of a slot share its distribution.

    Args:
        base: [M, K, V] base logits.
    """

    def __init__(self, base: Tensor) -> None:
        self._base = base

    def add(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Place, Tensor]:
        """See `RowRecorder`."""
        row = torch.arange(len(parents), device=parents.device).unsqueeze(1) * self._base.shape[1]
        logits = at_depth(self._base.detach(), depth).expand(-1, parents.shape[1], -1)
        return logits, Place(0, (row + depth - 1).expand_as(parents)), carry

    def finish(self) -> list[Tensor]:
        """See `RowRecorder`."""
        return [self._base.flatten(0, 1)]
