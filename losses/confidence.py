"""The confidence head's loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from treespark.blocks import DraftBlocks
from treespark.losses.base import DepthWeighted


class Confidence(DepthWeighted):
    """Binary cross-entropy of the confidence logit against the overlap 1 - ½·L1 (detached), weighted by w_d.

    The overlap is the one-step acceptance probability under rejection sampling, not greedy acceptance
    (arXiv 2610.20175 §B.4).

    Args:
        coefficient: Factor of the term in the total.
        gamma: Decay length of the depth weights.
        detach: Train the head alone: no gradient into the backbone or the Markov embedding.
    """

    needs = frozenset({"confidence"})

    def __init__(self, coefficient: float = 1.0, gamma: float = 4.0, detach: bool = False) -> None:
        super().__init__(coefficient, gamma)
        self.detach = detach

    def values(self, blocks: DraftBlocks) -> Tensor:
        """Returns the binary cross-entropies: [M, K]."""
        logits = blocks.proposer.confidence_logits(blocks.reference_parents, detach=self.detach)
        overlap = (1.0 - 0.5 * blocks.l1.detach()).clamp(0.0, 1.0)
        return F.binary_cross_entropy_with_logits(logits.to(overlap.dtype), overlap, reduction="none")
