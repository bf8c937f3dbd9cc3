"""What a loss is: a weighted sum over anchors, divided once by a global weight."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from treespark.blocks import DraftBlocks, Labels
from treespark.registry import Registered


class WeightedSum(NamedTuple):
    """A loss's numerator and denominator over some anchors; both add up over any split of the anchors.

    Attributes:
        sum: Scalar numerator, differentiable.
        weight: Scalar denominator, no gradient.
        diagnostics: By name, numerator and denominator of what the loss reports besides its value; scalars without a
            gradient that add up likewise. Exactly the names in `LossTerm.diagnostics`.
    """

    sum: Tensor
    weight: Tensor
    diagnostics: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({})


class LossTerm(Registered, ABC, kind="loss"):
    """A term of the training objective.

    A new loss is one subclass with `forward` (and `weight`, where labels alone give the denominator). Sums, never
    means: the objective adds numerators and denominators over chunks, micro-batches and processes and divides once
    (arXiv 2610.20175 §B.4).

    Args:
        coefficient: Factor of the term in the total; 0 switches the term and its work off.

    Attributes:
        needs: What the drafter must offer: any of "confidence" (a confidence head).
        diagnostics: Names of the further figures that `forward` reports; logged as `train/<loss>/<name>`.

    Raises:
        ValueError: For a negative or non-finite coefficient.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    diagnostics: ClassVar[tuple[str, ...]] = ()

    def __init__(self, coefficient: float = 1.0) -> None:
        if not 0.0 <= coefficient < float("inf"):
            raise ValueError(f"{type(self).__name__} needs a finite coefficient >= 0, got {coefficient}.")
        self.coefficient = coefficient

    @property
    def name(self) -> str:
        """The class name in snake case, as metric keys use it."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    def weight(self, labels: Labels) -> Tensor | None:
        """Returns the scalar denominator where labels alone give it, else None.

        With it, each chunk's gradient is taken as soon as the chunk is computed; without it, chunks are recomputed in
        the backward pass.
        """
        return None

    @abstractmethod
    def forward(self, blocks: DraftBlocks) -> WeightedSum:
        """Returns the numerator and denominator over the blocks' valid items."""

    def __call__(self, blocks: DraftBlocks) -> WeightedSum:
        """Same as `forward`, checked.

        Raises:
            ValueError: When the reported diagnostics are not the declared ones.
        """
        found = self.forward(blocks)
        if set(found.diagnostics) != set(self.diagnostics):
            raise ValueError(
                f"{type(self).__name__} declares the diagnostics {sorted(self.diagnostics)} but reports "
                f"{sorted(found.diagnostics)}; every process must report the same, so name them in `diagnostics`."
            )
        return found


def check_denominator(term: LossTerm, denominator: str) -> str:
    """Returns `denominator` if it is "count" or "mass".

    Raises:
        ValueError: Otherwise.
    """
    if denominator not in ("count", "mass"):
        raise ValueError(f'{type(term).__name__} needs denominator "count" or "mass", got {denominator!r}.')
    return denominator


class DepthWeighted(LossTerm):
    """Base of losses that average one value per (anchor, depth) with weights w_d = exp(-(d-1)/gamma).

    Args:
        coefficient: Factor of the term in the total.
        gamma: Decay length of the depth weights, in depths.

    Raises:
        ValueError: When gamma is not positive.
    """

    def __init__(self, coefficient: float = 1.0, gamma: float = 4.0) -> None:
        super().__init__(coefficient)
        if not gamma > 0:
            raise ValueError(f"{type(self).__name__} needs gamma > 0, got {gamma}.")
        self.gamma = gamma

    @abstractmethod
    def values(self, blocks: DraftBlocks) -> Tensor:
        """Returns one differentiable value for each anchor and depth: [M, K]."""

    def weight(self, labels: Labels) -> Tensor:
        """Returns Σ w_d over valid (anchor, depth)."""
        return (labels.valid * labels.decay(self.gamma)).sum()

    def forward(self, blocks: DraftBlocks) -> WeightedSum:
        """Returns Σ w_d · value over valid (anchor, depth), and Σ w_d."""
        weights = blocks.labels.valid * blocks.labels.decay(self.gamma)
        # where, not a product: a value of an invalid depth may be infinite.
        values = torch.where(blocks.labels.valid, self.values(blocks), 0.0)
        return WeightedSum((weights.to(values.dtype) * values).sum(), weights.sum())
