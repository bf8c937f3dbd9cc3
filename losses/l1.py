"""L1 distance between the drafter's and the target's distributions."""

from __future__ import annotations

from torch import Tensor

from treespark.blocks import DraftBlocks
from treespark.losses.base import DepthWeighted


class L1(DepthWeighted):
    """Σ_v abs(p_d(v) - q_d(v)) on the reference path (twice the total variation), weighted by w_d.

    Source: arXiv 2607.05147; arXiv 2610.20175 §B.4.

    Args:
        coefficient: Factor of the term in the total.
        gamma: Decay length of the depth weights.
    """

    def __init__(self, coefficient: float = 0.9, gamma: float = 4.0) -> None:
        super().__init__(coefficient, gamma)

    def values(self, blocks: DraftBlocks) -> Tensor:
        """Returns the L1 distances: [M, K], between 0 and 2."""
        return blocks.l1
