"""The training objective: loss terms summed over chunks of anchors, micro-batches and processes, divided once.

Memory is bounded by the chunk, not by the number of anchors. Source of the normalisation: arXiv 2610.20175 §B.4.

Shapes: M anchors of a micro-batch, K depths, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treespark.blocks import DraftBlocks, Labels
from treespark.losses.base import LossTerm, WeightedSum
from treespark.workspace import Workspace


@dataclass(frozen=True)
class Drafted:
    """One micro-batch after the backbone's pass.

    Attributes:
        hidden: [M, K, H] the drafter's slot states, differentiable.
        labels: The labels of the M anchors.
        make_blocks: Builds the blocks of a chunk from its slot states and its slice of the anchors.
    """

    hidden: Tensor
    labels: Labels
    make_blocks: Callable[[Tensor, slice], DraftBlocks]

    def chunks(self, size: int) -> Iterator[slice]:
        """Yields slices of at most `size` anchors."""
        for start in range(0, len(self.hidden), size):
            yield slice(start, min(start + size, len(self.hidden)))


@dataclass(frozen=True)
class ObjectiveValue:
    """The objective of one optimiser step.

    Attributes:
        loss: Scalar to call backward on; where gradients are averaged over processes, already times their number.
        sums: [L] global numerators of the active terms, no gradient.
        weights: [L] global denominators.
        diagnostics: What the terms report besides, `<loss>/<name>`: global numerator over global denominator, nan
            where there was nothing.
    """

    loss: Tensor
    sums: Tensor
    weights: Tensor
    diagnostics: dict[str, Tensor]

    @property
    def values(self) -> Tensor:
        """[L] value of each term, nan where nothing was valid."""
        return self.sums / self.weights


class Objective:
    """Combines loss terms into one scalar with the gradient of one process on the joint batch.

    Where labels alone give every denominator, each chunk's gradient is taken right after the chunk's forward pass and
    nothing is recomputed; otherwise chunks are recomputed in the backward pass.

    Args:
        terms: The loss terms; those with coefficient 0 do no work.
        chunk_anchors: Anchors per chunk.

    Raises:
        ValueError: When there is no active term, two terms share a name, or chunk_anchors < 1.
    """

    def __init__(self, terms: Sequence[LossTerm], chunk_anchors: int) -> None:
        self.terms = [term for term in terms if term.coefficient != 0]
        names = [term.name for term in self.terms]
        if not self.terms:
            raise ValueError("No loss has a coefficient above 0; at least one term is needed to train.")
        if len(set(names)) < len(names):
            raise ValueError(f"Each loss may stand once in the list of losses, got {', '.join(names)}.")
        if chunk_anchors < 1:
            raise ValueError(f"chunk_anchors must be at least 1, got {chunk_anchors}.")
        self.chunk_anchors = chunk_anchors
        self._diagnostics = [f"{term.name}/{name}" for term in self.terms for name in term.diagnostics]

    @property
    def figures(self) -> list[str]:
        """Names of the L terms' values (`loss/<loss>`) and of their D diagnostics (`<loss>/<name>`)."""
        return [f"loss/{term.name}" for term in self.terms] + self._diagnostics

    def __call__(
        self,
        micro_batches: Iterable[Drafted],
        parameters: Sequence[Tensor],
        *,
        labels: Sequence[Labels],
        reduce: Callable[[Tensor], Tensor] = lambda values: values,
        world_size: int = 1,
    ) -> ObjectiveValue:
        """Evaluates the objective of one step.

        Args:
            micro_batches: The micro-batches; may be a generator, so that features are computed one at a time.
            parameters: Trainable parameters that the blocks' losses may reach besides `hidden`.
            labels: The micro-batches' labels, known before any of them is drafted.
            reduce: Sums a small vector over all processes.
            world_size: Factor for strategies that average gradients over processes.

        Returns:
            The loss, connected to every parameter even where nothing is valid.
        """
        known = self._label_weights(labels)
        weights = None if known is None else reduce(known)
        total: Tensor | None = None
        local = self._no_tally()
        pending: Tensor | None = None
        connected = False  # whether the loss reaches every parameter
        for drafted in micro_batches:
            if weights is not None:
                factors = [
                    term.coefficient / weight if weight > 0 else 0.0
                    for term, weight in zip(self.terms, weights.tolist(), strict=True)
                ]
                part, tally = self._eager(drafted, parameters, factors)
                total = part if total is None else total + part
                connected |= len(drafted.hidden) > 0
            else:
                sums, tally = self._deferred(drafted)
                pending = sums if pending is None else pending + sums
            local += tally
        device = parameters[0].device
        joint = reduce(local.to(device)).cpu()
        size = len(self.terms)
        if pending is not None:
            factor = torch.tensor([term.coefficient for term in self.terms], dtype=torch.float64) / joint[1, :size]
            total = (pending * torch.where(joint[1, :size] > 0, factor, 0.0).to(pending)).sum()
        if total is None or not connected:
            total = self._connected(total, parameters)
        loss = total * world_size
        reported = dict(zip(self._diagnostics, joint[0, size:] / joint[1, size:], strict=True))
        return ObjectiveValue(loss, joint[0, :size], joint[1, :size], reported)

    @torch.no_grad()
    def evaluate(self, drafted: Drafted, visit: Callable[[DraftBlocks], Any] | None = None) -> tuple[Tensor, Tensor]:
        """Returns one process's numerators and denominators [L + D] of a micro-batch's `figures`, without gradients.

        Args:
            drafted: The micro-batch.
            visit: Called with every chunk's blocks, for metrics.
        """
        total = self._no_tally()
        for rows in drafted.chunks(self.chunk_anchors):
            blocks = drafted.make_blocks(drafted.hidden[rows], rows)
            total += self._tally([term(blocks) for term in self.terms]).cpu()
            if visit is not None:
                visit(blocks)
        sums, weights = total
        return sums, weights

    @staticmethod
    def _connected(total: Tensor | None, parameters: Sequence[Tensor]) -> Tensor:
        """Adds a zero that every parameter gets a gradient from, so that an all-reduce runs in each process."""
        zero = torch.stack([parameter.sum() for parameter in parameters]).sum() * 0.0
        return zero if total is None else total + zero

    def _no_tally(self) -> Tensor:
        return torch.zeros(2, len(self.terms) + len(self._diagnostics), dtype=torch.float64)

    def _tally(self, parts: Sequence[WeightedSum]) -> Tensor:
        """Numerators and denominators [2, L + D] of the terms, then of their D diagnostics; float64, no gradient."""
        pairs = [(part.sum, part.weight) for part in parts]
        for term, part in zip(self.terms, parts, strict=True):
            pairs += [part.diagnostics[name] for name in term.diagnostics]
        return torch.stack(
            [torch.stack([item.detach().double() for item in side]) for side in zip(*pairs, strict=True)]
        )

    def _label_weights(self, labels: Sequence[Labels]) -> Tensor | None:
        """Local denominators [L] from labels alone, or None where a term cannot tell."""
        rows = []
        for item in labels:
            row = [term.weight(item) for term in self.terms]
            if any(weight is None for weight in row):
                return None
            rows.append(torch.stack([weight.double() for weight in row if weight is not None]))
        return torch.stack(rows).sum(0)

    def _eager(self, drafted: Drafted, parameters: Sequence[Tensor], factors: list[float]) -> tuple[Tensor, Tensor]:
        tally = self._no_tally()

        def value(hidden: Tensor, rows: slice) -> Tensor:
            blocks = drafted.make_blocks(hidden, rows)
            parts = [term(blocks) for term in self.terms]
            tally.add_(self._tally(parts).cpu())
            return torch.stack([part.sum * factor for part, factor in zip(parts, factors, strict=True)]).sum()

        chunks = list(drafted.chunks(self.chunk_anchors))
        if not chunks:
            return drafted.hidden.sum() * 0.0, tally
        loss: Tensor = _GradientInForward.apply(value, chunks, drafted.hidden, *parameters)  # type: ignore[no-untyped-call]
        return loss, tally

    def _deferred(self, drafted: Drafted) -> tuple[Tensor, Tensor]:
        total = (drafted.hidden.sum() * 0.0).expand(len(self.terms))
        tally = self._no_tally()
        for rows in drafted.chunks(self.chunk_anchors):

            def sums(hidden: Tensor, rows: slice = rows) -> tuple[Tensor, Tensor]:
                blocks = drafted.make_blocks(hidden, rows)
                parts = [term(blocks) for term in self.terms]
                return torch.stack([part.sum for part in parts]), self._tally(parts)

            part, counted = checkpoint(sums, drafted.hidden[rows], use_reentrant=False)
            total, tally = total + part, tally + counted.cpu()
        return total, tally


class _GradientInForward(torch.autograd.Function):
    """Sums `value(hidden[rows], rows)` over chunks and takes each chunk's gradient while its tensors are alive."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Callable[[Tensor, slice], Tensor],
        chunks: list[slice],
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        total: Tensor | None = None
        hidden_grad = torch.zeros_like(hidden)
        with Workspace(parameters) as workspace:
            gradients: list[Tensor | None] = [None] * len(parameters)
            for rows in chunks:
                with torch.enable_grad():
                    leaf = hidden[rows].detach().requires_grad_()
                    loss = value(leaf, rows)
                    found = torch.autograd.grad(loss, [leaf, *parameters], allow_unused=True)
                total = loss.detach() if total is None else total + loss.detach()
                if found[0] is not None:
                    hidden_grad[rows] = found[0]
                for index, gradient in enumerate(found[1:]):
                    if gradient is not None:
                        # The first is copied: autograd may give one tensor to two parameters, or a chunk's buffer.
                        known = gradients[index]
                        gradients[index] = gradient.clone() if known is None else known.add_(gradient)
                del loss, found
                workspace.clear()
            for index, parameter in enumerate(parameters):
                summed, known = workspace.collected(parameter), gradients[index]
                if summed is not None:
                    gradients[index] = summed if known is None else summed.add_(known)
        ctx.gradients, ctx.inputs = [hidden_grad, *gradients], [hidden, *parameters]
        assert total is not None, "there is at least one chunk"
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        if ctx.gradients is None:
            raise RuntimeError("The objective's gradient was already taken; a step has one backward pass.")
        # In place: the gradients of large weights would otherwise take twice their memory.
        scaled = []
        for gradient, given in zip(ctx.gradients, ctx.inputs, strict=True):
            # Where there is nothing to add, zeros without memory of their own: an all-reduce still runs.
            zeros = scale.new_zeros((), dtype=given.dtype).expand_as(given)
            scaled.append(zeros if gradient is None else gradient.mul_(scale))
        ctx.gradients = ctx.inputs = None
        return (None, None, *scaled)
