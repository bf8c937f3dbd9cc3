"""The survival loss: retained edges, weighted by the target's path mass."""

from __future__ import annotations

import torch
from torch import Tensor

from treespark.blocks import DraftBlocks, Labels
from treespark.losses.base import LossTerm, WeightedSum


class Survival(LossTerm):
    """m(v) · -log p_d(v given its path), summed over packed nodes; per valid (anchor, depth).

    The path mass m is detached, there is no depth decay. Source: arXiv 2610.20175 §B.2; the denominator, which
    follows from the labels alone, is ours.

    Args:
        coefficient: Factor of the term in the total.
    """

    def __init__(self, coefficient: float = 2.0) -> None:
        super().__init__(coefficient)

    def weight(self, labels: Labels) -> Tensor:
        """Returns the number of valid (anchor, depth) pairs."""
        return labels.valid.sum().double()

    def forward(self, blocks: DraftBlocks) -> WeightedSum:
        """Returns the mass-weighted edge loss over packed nodes at valid depths, and the number of valid pairs."""
        edges = torch.where(blocks.retained, blocks.replay.edge_log_probs(), 0.0)
        return WeightedSum(-(blocks.path_mass * edges).sum(), self.weight(blocks.labels))
