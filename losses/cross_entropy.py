"""Cross-entropy on the reference text."""

from __future__ import annotations

from torch import Tensor

from treespark.blocks import DraftBlocks
from treespark.losses.base import DepthWeighted


class CrossEntropy(DepthWeighted):
    """-log p_d of the reference token given the reference path, weighted by w_d.

    Source: arXiv 2607.05147; arXiv 2610.20175 §B.4.

    Args:
        coefficient: Factor of the term in the total.
        gamma: Decay length of the depth weights.
    """

    def __init__(self, coefficient: float = 0.1, gamma: float = 4.0) -> None:
        super().__init__(coefficient, gamma)

    def values(self, blocks: DraftBlocks) -> Tensor:
        """Returns -log p_d(label): [M, K]."""
        return -blocks.label_log_probs
