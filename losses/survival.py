"""The survival loss: retained edges, weighted by the target's path mass."""

from __future__ import annotations

import torch
from torch import Tensor

from treespark.blocks import DraftBlocks, Labels
from treespark.losses.base import LossTerm, WeightedSum, check_denominator


class Survival(LossTerm):
    """m(v) · -log p_d(v given its path), summed over packed nodes; per valid (anchor, depth).

    The path mass m is detached, there is no depth decay. Source: arXiv 2610.20175 §B.2; the denominator "count", which
    follows from the labels alone, is ours. Reports `path_mass`, the packed nodes' mass per valid (anchor, depth).

    Args:
        coefficient: Factor of the term in the total.
        denominator: "count" divides by the number of valid (anchor, depth) pairs; "mass" by the packed nodes' summed
            path mass, which makes the value a mean edge loss.
        paths: "all" takes every packed node (the paper's); "reference" only those on the reference path, where the
            target's distribution is exact and no proxy. The latter is ours.

    Raises:
        ValueError: For another denominator, or other paths.
    """

    diagnostics = ("path_mass",)

    def __init__(self, coefficient: float = 2.0, denominator: str = "count", paths: str = "all") -> None:
        super().__init__(coefficient)
        self.denominator = check_denominator(self, denominator)
        if paths not in ("all", "reference"):
            raise ValueError(f'Survival needs paths "all" or "reference", got {paths!r}.')
        self.paths = paths

    def weight(self, labels: Labels) -> Tensor | None:
        """Returns the number of valid (anchor, depth) pairs, or None where the packed mass is the denominator."""
        return labels.valid.sum().double() if self.denominator == "count" else None

    def forward(self, blocks: DraftBlocks) -> WeightedSum:
        """Returns the mass-weighted edge loss over packed nodes at valid depths, and its denominator."""
        retained = blocks.retained
        if self.paths == "reference":
            retained = retained & blocks.replay.packed.on_path(blocks.labels.tokens)
        edges = torch.where(retained, blocks.replay.edge_log_probs(), 0.0)
        mass = torch.where(retained, blocks.path_mass, 0.0).double().sum()
        pairs = blocks.labels.valid.sum().double()
        weight = pairs if self.denominator == "count" else mass
        return WeightedSum(-(blocks.path_mass * edges).sum(), weight, {"path_mass": (mass, pairs)})
