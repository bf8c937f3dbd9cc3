"""The coverage loss: the target's likely tokens against each expanded parent's admission boundary."""

from __future__ import annotations

import torch
from torch import Tensor

from treespark.blocks import DraftBlocks, Labels
from treespark.losses.base import LossTerm, WeightedSum


class Coverage(LossTerm):
    """q_d(y)·w_d · min(c, max(0, δ + θ(u) - log p_d(y given u))) over expanded parents u and top target tokens y.

    θ(u), the parent's k-th largest log-probability, is detached. Every expanded parent counts, packed or not. The
    hinge stays positive inside the margin even for tokens among the top k; past the cap its gradient is zero.
    Source: arXiv 2610.20175 §B.3; the denominator Σ w_d·E_d, by which the value is at most c, is ours.

    Args:
        coefficient: Factor of the term in the total.
        num_tokens: J, the target's likeliest tokens that are pulled in at every depth.
        margin: δ, in nats.
        cap: c, in nats.
        gamma: Decay length of the depth weights.

    Raises:
        ValueError: When num_tokens < 1, margin < 0, cap <= 0 or gamma <= 0.
    """

    def __init__(
        self,
        coefficient: float = 0.5,
        num_tokens: int = 4,
        margin: float = 0.5,
        cap: float = 1.0,
        gamma: float = 4.0,
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

    def weight(self, labels: Labels) -> Tensor | None:
        """Returns Σ over valid (anchor, depth) of w_d · E_d, or None where the policy does not fix E_d."""
        if labels.expanded_per_depth is None:
            return None
        expanded = torch.tensor(labels.expanded_per_depth, device=labels.valid.device)
        return (labels.valid * labels.decay(self.gamma) * expanded).sum()

    def forward(self, blocks: DraftBlocks) -> WeightedSum:
        """Returns the summed hinges and the weight of the expanded parents."""
        labels = blocks.labels
        tokens, probs = blocks.top_target_tokens(min(self.num_tokens, blocks.proposer.vocab_size))
        decay = labels.decay(self.gamma)
        row = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        total, expanded = probs.new_zeros(()), decay.new_zeros(())
        for parents, exists in zip(blocks.replay.expanded, blocks.replay.parent_exists, strict=True):
            depth = parents.depths - 1
            counted = labels.valid.gather(1, depth) & exists
            weights = torch.where(counted, decay[depth], 0.0)
            gap = self.margin + parents.boundary.unsqueeze(-1) - parents.log_probs(tokens[row, depth])
            hinge = torch.where(counted.unsqueeze(-1), gap.clamp(0.0, self.cap), 0.0)
            total = total + (probs[row, depth] * weights.to(probs.dtype).unsqueeze(-1) * hinge).sum()
            expanded = expanded + weights.sum()
        known = self.weight(labels)
        return WeightedSum(total, expanded if known is None else known)
