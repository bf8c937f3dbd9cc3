"""The confidence head: the logit of a drafted token's one-step acceptance probability (arXiv 2607.05147)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """Linear on [h_{d-1} ; W1[y]], or on h_{d-1} alone.

    Args:
        hidden_size: H.
        markov_rank: r, the width of W1[y]; 0 to use the slot's state alone.
    """

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.with_markov = markov_rank > 0
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def from_hidden(self, hidden: Tensor) -> Tensor:
        """Returns the slot's part of the logit, the same for every parent of a depth: [..., H] -> [...]."""
        return F.linear(hidden, self.proj.weight[:, : self.hidden_size], self.proj.bias).squeeze(-1)

    def from_parent(self, embedded: Tensor) -> Tensor:
        """Returns the parent's part of the logit: W1[y] [..., r] -> [...]."""
        return F.linear(embedded, self.proj.weight[:, self.hidden_size :]).squeeze(-1)
