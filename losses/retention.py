"""The retention loss: the target's own continuation against the score at which the tree was cut."""

from __future__ import annotations

import torch

from treespark.blocks import DraftBlocks
from treespark.losses.base import LossTerm, WeightedSum


class Retention(LossTerm):
    """min(c, max(0, δ + cut - s_d)) along the reference path, up to the first token that the tree lost.

    s_d = Σ_{i≤d} log p_i(label) is the reference path's score, which serving would give it; the cut is the score of an
    anchor's last packed node. So the loss acts on the packing boundary of the whole tree, where survival weighs edges
    that are packed and coverage compares siblings. A depth counts where the reference path is packed up to its parent,
    so the context is one that verification reaches. An anchor whose tree is not full has no cut and counts nowhere.
    The cut and what is packed carry no gradient; there is no depth decay. Source: ours, beside arXiv 2610.20175 §B.
    Reports the shares of counted depths that are `active` (the hinge has a gradient) and `capped`.

    Args:
        coefficient: Factor of the term in the total.
        margin: δ, in nats.
        cap: c, in nats.

    Raises:
        ValueError: When margin < 0 or cap <= 0.
    """

    diagnostics = ("active", "capped")

    def __init__(self, coefficient: float = 1.0, margin: float = 0.5, cap: float = 3.0) -> None:
        super().__init__(coefficient)
        if not margin >= 0:
            raise ValueError(f"Retention needs margin >= 0, got {margin}.")
        if not cap > 0:
            raise ValueError(f"Retention needs cap > 0, got {cap}.")
        self.margin, self.cap = margin, cap

    def forward(self, blocks: DraftBlocks) -> WeightedSum:
        """Returns the summed hinges and the number of counted (anchor, depth) pairs."""
        labels, packed = blocks.labels, blocks.replay.packed
        full = packed.num_nodes == blocks.policy.num_nodes(blocks.proposer.depths)
        cut = packed.scores.detach().masked_fill(~packed.exists, torch.inf).amin(1)
        # How deep the reference path is packed: its nodes, root excluded, form a prefix.
        held = packed.on_path(labels.tokens).sum(1) - 1
        depth = torch.arange(labels.tokens.shape[1], device=held.device)
        counted = labels.valid & (depth <= held.unsqueeze(1)) & full.unsqueeze(1)
        scores = torch.where(counted, blocks.label_log_probs, 0.0).cumsum(1)
        gap = self.margin + cut.unsqueeze(1) - scores
        hinge = torch.where(counted, gap.clamp(0.0, self.cap), 0.0)
        weight = counted.sum().double()
        active = (counted & (gap > 0) & (gap < self.cap)).sum().double()
        capped = (counted & (gap >= self.cap)).sum().double()
        return WeightedSum(hinge.sum(), weight, {"active": (active, weight), "capped": (capped, weight)})
