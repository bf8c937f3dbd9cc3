"""The coverage loss: the target's likely tokens against each expanded parent's admission boundary."""

from __future__ import annotations

import torch
from torch import Tensor

from treespark.blocks import DraftBlocks, Labels
from treespark.losses.base import LossTerm, WeightedSum, check_denominator


class Coverage(LossTerm):
    """q_d(y)·w_d · min(c, max(0, δ + θ(u) - log p_d(y given u))) over expanded parents u and top target tokens y.

    θ(u) is the parent's k-th largest log-probability. Every expanded parent counts, packed or not. The hinge stays
    positive inside the margin even for tokens among the top k; past the cap its gradient is zero.
    Source: arXiv 2610.20175 §B.3; the denominator "count", by which the value is at most c, is ours.
    Reports the shares of expanded parents that are `active` (some hinge has a gradient) and `capped` (some hinge is
    past the cap).

    Args:
        coefficient: Factor of the term in the total.
        num_tokens: J, the target's likeliest tokens that are pulled in at every depth.
        margin: δ, in nats.
        cap: c, in nats.
        gamma: Decay length of the depth weights.
        detach_boundary: Whether θ(u) carries no gradient. Otherwise the boundary is pulled down while the tokens are
            pulled up, and the normalising terms of both cancel.
        denominator: "count" divides by Σ w_d over expanded parents, "mass" by Σ q_d(y)·w_d over their target tokens.

    Raises:
        ValueError: When num_tokens < 1, margin < 0, cap <= 0 or gamma <= 0, or for another denominator.
    """

    diagnostics = ("active", "capped")

    def __init__(
        self,
        coefficient: float = 0.5,
        num_tokens: int = 4,
        margin: float = 0.5,
        cap: float = 1.0,
        gamma: float = 4.0,
        detach_boundary: bool = True,
        denominator: str = "count",
    ) -> None:
        super().__init__(coefficient)
        for name, value, good in (
            ("num_tokens >= 1", num_tokens, num_tokens >= 1),
            ("margin >= 0", margin, margin >= 0),
            ("cap > 0", cap, cap > 0),
            ("gamma > 0", gamma, gamma > 0),
        ):
            if not good:
                raise ValueError(f"Coverage needs {name}, got {value}.")
        self.num_tokens, self.margin, self.cap, self.gamma = num_tokens, margin, cap, gamma
        self.detach_boundary, self.denominator = detach_boundary, check_denominator(self, denominator)

    def weight(self, labels: Labels) -> Tensor | None:
        """Returns Σ over valid (anchor, depth) of w_d · E_d; None where the policy does not fix E_d, or for "mass"."""
        if labels.expanded_per_depth is None or self.denominator == "mass":
            return None
        expanded = torch.tensor(labels.expanded_per_depth, device=labels.valid.device)
        return (labels.valid * labels.decay(self.gamma) * expanded).sum()

    def forward(self, blocks: DraftBlocks) -> WeightedSum:
        """Returns the summed hinges and the weight of the expanded parents or of their target tokens."""
        labels = blocks.labels
        tokens, probs = blocks.top_target_tokens(min(self.num_tokens, blocks.proposer.vocab_size))
        decay = labels.decay(self.gamma)
        row = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        total, weight = probs.new_zeros(()), decay.new_zeros(())
        num_parents, num_active, num_capped = (decay.new_zeros(()) for _ in range(3))
        for parents, exists in zip(blocks.replay.expanded, blocks.replay.parent_exists, strict=True):
            depth = parents.depths - 1
            counted = labels.valid.gather(1, depth) & exists
            weights = torch.where(counted, decay[depth], 0.0)
            boundary = parents.boundary if self.detach_boundary else parents.child_log_probs[..., -1]
            gap = self.margin + boundary.unsqueeze(-1) - parents.log_probs(tokens[row, depth])
            hinge = torch.where(counted.unsqueeze(-1), gap.clamp(0.0, self.cap), 0.0)
            importance = probs[row, depth] * weights.to(probs.dtype).unsqueeze(-1)
            total = total + (importance * hinge).sum()
            weight = weight + (importance.double() if self.denominator == "mass" else weights).sum()
            num_parents = num_parents + counted.sum()
            num_active = num_active + (((gap > 0) & (gap < self.cap)).any(-1) & counted).sum()
            num_capped = num_capped + ((gap >= self.cap).any(-1) & counted).sum()
        known = self.weight(labels)
        shares = {"active": (num_active, num_parents), "capped": (num_capped, num_parents)}
        return WeightedSum(total, weight if known is None else known, shares)
