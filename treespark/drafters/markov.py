"""Markov heads: how a draft's logits depend on the tokens before them.

A head turns the parent token (with the slot's state and a carried state, if its kind wants them) into a latent of
rank r, and the latent into a correction of the base logits. Source: arXiv 2607.05147.
Shapes: M anchors, P parents, K depths, H hidden, r rank, c size of the carried state, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespark.registry import unknown


class MarkovHead(nn.Module, ABC):
    """Base of the heads that have a rank above 0.

    Attributes:
        carry_size: c, the size of the state that is carried along a path; 0 where the parent token says it all.
    """

    carry_size = 0

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the rows of W1 for tokens [...]: [..., r]."""
        rows: Tensor = self.markov_w1(tokens)
        return rows

    @abstractmethod
    def step(self, parents: Tensor, carry: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the latents [M, P, r] after parents [M, P], and the states [M, P, c] that their children inherit.

        Args:
            parents: [M, P] token ids.
            carry: [M, P, c] the states that the parents inherited.
            hidden: [M, P, H] states of the slots that predict the children (P may be 1: the same for all).
        """

    def path(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Returns the latents [M, K, r] along one path: row d follows parent tokens[:, d], tokens [M, K]."""
        carry = hidden.new_zeros(len(tokens), 1, self.carry_size)
        latents = []
        for d in range(tokens.shape[1]):
            latent, carry = self.step(tokens[:, d : d + 1], carry, hidden[:, d : d + 1])
            latents.append(latent)
        return torch.cat(latents, dim=1)

    def bias(self, latents: Tensor) -> Tensor:
        """Returns the corrections [..., V] of latents [..., r]."""
        return F.linear(latents, self.markov_w2.weight)

    def reset_parameters(self, std: float) -> None:
        """Starts at the uncorrected head: W1 random, W2 zero (then W2 has a gradient, and W1 after one step)."""
        nn.init.normal_(self.markov_w1.weight, std=std)
        nn.init.zeros_(self.markov_w2.weight)


class VanillaHead(MarkovHead):
    """b(y) = W2 W1[y]: the correction depends on the parent token alone."""

    def step(self, parents: Tensor, carry: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The latent is W1[y]; there is no state."""
        return self.embed(parents), carry

    def path(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """All depths at once, since no state is carried."""
        return self.embed(tokens)


MARKOV_HEADS: dict[str, type[MarkovHead]] = {"vanilla": VanillaHead}


def build_markov_head(kind: str, vocab_size: int, rank: int) -> MarkovHead | None:
    """Returns the head called `kind`, or None for rank 0 (DFlash: every depth stands alone).

    Raises:
        ValueError: For an unknown kind or a negative rank.
    """
    if rank < 0:
        raise ValueError(f"markov_rank must be 0 (no Markov head) or more, got {rank}.")
    if kind not in MARKOV_HEADS:
        raise unknown("Markov head", kind, MARKOV_HEADS)
    return MARKOV_HEADS[kind](vocab_size, rank) if rank else None
