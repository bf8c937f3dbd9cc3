"""Markov heads: how a draft's logits depend on the tokens before them.

A head turns the parent token (with the slot's state and a carried state, if its kind wants them) into a latent of
rank r, and the latent into a correction of the base logits. Source: arXiv 2607.05147.
Shapes: M anchors, P parents, K depths, H hidden, r rank, c size of the carried state, V vocabulary.

Gates, latents and states are computed in float32 at least, also under autocast: a state is carried over K depths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treespark.registry import unknown
from treespark.selection import at_least_float32
from treespark.target.linear import apply_head
from treespark.workspace import current


class MarkovHead(nn.Module, ABC):
    """Base of the heads that have a rank above 0.

    Args:
        vocab_size: V.
        rank: r.
        hidden_size: H, for heads that look at the slot's state.

    Attributes:
        carry_size: c, the size of the state that is carried along a path; 0 where the parent token says it all.
        by_token_alone: Whether the latent is W1[y], so that a correction serves every slot after the same token.
    """

    carry_size = 0
    by_token_alone = False

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the rows of W1 for tokens [...]: [..., r]."""
        rows: Tensor = _EmbeddingRows.apply(self.markov_w1.weight, tokens)  # type: ignore[no-untyped-call]
        return rows

    @abstractmethod
    def step(self, parents: Tensor, carry: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the latents [M, P, r] after parents [M, P], and the states [M, P, c] that their children inherit.

        Args:
            parents: [M, P] token ids.
            carry: [M, P, c] the states that the parents inherited.
            hidden: [M, P, H] states of the slots that predict the children (P may be 1: the same for all).
        """

    def root_carry(self, hidden: Tensor) -> Tensor:
        """Returns the state [M, 1, c] that the root inherits, zeros in float32 at least; hidden [M, K, H]."""
        return at_least_float32(hidden.new_zeros(len(hidden), 1, self.carry_size))

    def path(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Returns the latents [M, K, r] along one path: row d follows parent tokens[:, d], tokens [M, K]."""
        carry = self.root_carry(hidden)
        latents = []
        for d in range(tokens.shape[1]):
            latent, carry = self.step(tokens[:, d : d + 1], carry, hidden[:, d : d + 1])
            latents.append(latent)
        return torch.cat(latents, dim=1)

    def bias(self, latents: Tensor) -> Tensor:
        """Returns the corrections [..., V] of latents [..., r]."""
        return apply_head(latents.to(self.markov_w2.weight.dtype), self.markov_w2.weight)

    def reset_parameters(self, std: float) -> None:
        """Starts at the uncorrected head: W1 random, W2 zero (then W2 has a gradient, and W1 after one step)."""
        nn.init.normal_(self.markov_w1.weight, std=std)
        nn.init.zeros_(self.markov_w2.weight)


class VanillaHead(MarkovHead):
    """b(y) = W2 W1[y]: the correction depends on the parent token alone."""

    by_token_alone = True

    def step(self, parents: Tensor, carry: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The latent is W1[y]; there is no state."""
        return self.embed(parents), carry

    def path(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """All depths at once, since no state is carried."""
        return self.embed(tokens)


class GatedHead(MarkovHead):
    """b(y) = W2 (σ(gate([h ; W1[y]])) · W1[y]): the slot's state decides how much of the parent counts."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, parents: Tensor, carry: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The latent is the gated W1[y]; there is no state."""
        embedded = self.embed(parents)
        gate = _parts(self.gate_proj, hidden, embedded)
        return torch.sigmoid(gate) * embedded, carry

    def path(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """All depths at once, since no state is carried."""
        return self.step(tokens, self.root_carry(hidden), hidden)[0]


class RNNHead(MarkovHead):
    """A recurrent state of size r along each path, zero at the root and inherited by all children of a parent.

    gate, candidate, output = joint([state ; W1[y] ; h]); the new state is σ(gate) · state + (1 - σ(gate)) ·
    tanh(candidate), the latent tanh(output).
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.carry_size = rank
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, parents: Tensor, carry: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Moves the inherited states on by the parents; differentiable along the path."""
        gate, candidate, output = _parts(self.joint_proj, carry, self.embed(parents), hidden).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * carry + (1 - keep) * torch.tanh(candidate)


def _parts(linear: nn.Linear, *inputs: Tensor) -> Tensor:
    """Returns `linear` of the inputs side by side, in float32 at least.

    Inputs are multiplied one by one: those with a parents' dimension of 1 are shared by all parents, not repeated.
    """
    weights = torch.split(linear.weight, [item.shape[-1] for item in inputs], dim=1)
    total = at_least_float32(linear.bias)
    for item, weight in zip(inputs, weights, strict=True):
        total = total + at_least_float32(F.linear(item.to(weight.dtype), weight))
    return total


class _EmbeddingRows(torch.autograd.Function):
    """Rows of a large weight; in a workspace the gradient is added to those rows alone, not made as large as it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.workspace = weight, current()
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        total = None if ctx.workspace is None else ctx.workspace.sum_of(weight)
        whole = torch.zeros_like(weight) if total is None else total
        whole.index_add_(0, tokens.flatten(), gradient.reshape(-1, weight.shape[1]).to(whole.dtype))
        return (whole if total is None else None), None


MARKOV_HEADS: dict[str, type[MarkovHead]] = {"vanilla": VanillaHead, "gated": GatedHead, "rnn": RNNHead}


def build_markov_head(kind: str, vocab_size: int, rank: int, hidden_size: int) -> MarkovHead | None:
    """Returns the head called `kind`, or None for rank 0 (DFlash: every depth stands alone).

    Raises:
        ValueError: For an unknown kind or a negative rank.
    """
    if rank < 0:
        raise ValueError(f"markov_rank must be 0 (no Markov head) or more, got {rank}.")
    if kind not in MARKOV_HEADS:
        raise unknown("Markov head", kind, MARKOV_HEADS)
    return MARKOV_HEADS[kind](vocab_size, rank, hidden_size) if rank else None
