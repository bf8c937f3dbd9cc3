"""Candidate trees and packed trees as padded flat tensors, and the one function that packs.

Shapes: M anchors or requests, P parents, k children per parent, C nodes of a candidate tree (root included),
N packed nodes (root excluded), E expanded parents, c size of a path state, V vocabulary, K depths.
Node 0 of every row is the root (the anchor). Parents stand before their children. Padding has `exists` False.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Expansion(NamedTuple):
    """The top-k children of P parents in each of M rows.

    Attributes:
        tokens: [M, P, k] token ids, best first; equal logits stand in order of token id.
        log_probs: [M, P, k] natural log-probabilities given the path, at least float32, at most 0.
        carry: [M, P, c] path state after each parent, inherited by all its children (c = 0 for a Markov chain).
        log_confidence: [M, P] log of the confidence head's acceptance probability after each parent, or None.
    """

    tokens: Tensor
    log_probs: Tensor
    carry: Tensor
    log_confidence: Tensor | None = None


class Proposer(Protocol):
    """A drafter's conditional distributions for M anchors (training) or M requests (serving)."""

    @property
    def depths(self) -> int:
        """Number of depths K that can be drafted."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens V."""

    @property
    def root_tokens(self) -> Tensor:
        """Anchor tokens [M]."""

    def root_carry(self) -> Tensor:
        """Path state that the root inherits: [M, 1, c]."""

    def expand(self, depth: int | Tensor, parents: Tensor, carry: Tensor, k: int) -> Expansion:
        """Proposes children at `depth` (1..K; [M, P] when parents differ) of parents [M, P] with carry [M, P, c]."""

    def score(self, depth: int | Tensor, parents: Tensor, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns differentiable log-probabilities [M, P, T] of tokens [M, P, T], and the carry after the parents."""

    def marginals(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns the top-k tokens and log-probabilities [M, K, k] of each depth without any parent's correction."""


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """Picks `values[m, index[m, i]]`: values [M, C] or [M, C, c], index [M, I] -> [M, I] or [M, I, c]."""
    if values.dim() == 3:
        index = index.unsqueeze(-1).expand(-1, -1, values.shape[-1])
    return values.gather(1, index)


@dataclass(frozen=True)
class CandidateTree:
    """All candidates that a policy proposed, before packing.

    Attributes:
        tokens: [M, C] token ids; node 0 is the anchor.
        parents: [M, C] index of each node's parent (0 for the root itself); always smaller than the node's own index.
        depths: [M, C] depth, 0 for the root; non-decreasing along a row.
        log_probs: [M, C] log-probability of the node given its path (0 for the root).
        scores: [M, C] what packing ranks by; a child's score is at most its parent's.
        exists: [M, C] False for padding and for nodes without a finite score.
        expansions: [M, E] index of every parent that was given to `Proposer.expand`, in the order of the calls; replay
            finds the distribution that a node was drawn from by it.
        num_draft_nodes: N, the most nodes that packing keeps (root excluded).
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor
    scores: Tensor
    exists: Tensor
    expansions: Tensor
    num_draft_nodes: int

    def pack(self) -> PackedTree:
        """Keeps the N best nodes: decreasing score, ties by smaller depth, then by candidate order.

        Nodes with a NaN or infinite score are never packed, so a row may hold fewer than N. Source: arXiv 2610.20175
        §3.1; the order of ties past the depth is ours. Candidates are stored by depth and in order, hence a stable
        sort by score alone gives that order, and the kept set is prefix closed.
        """
        usable = self.exists & torch.isfinite(self.scores)
        ranked = torch.where(usable, self.scores, -torch.inf)[:, 1:]
        order = ranked.sort(dim=1, descending=True, stable=True).indices[:, : self.num_draft_nodes] + 1
        kept = gather_rows(usable, order)
        # Back into candidate order (parents first), padding at the end.
        padding = self.tokens.shape[1]
        order = torch.where(kept, order, padding).sort(dim=1).values
        kept = order < padding
        root = torch.zeros_like(order[:, :1])
        index = torch.cat([root, order.masked_fill(~kept, 0)], dim=1)
        exists = torch.cat([torch.ones_like(kept[:, :1]), kept], dim=1)
        # Where each candidate went, so that parents can be renumbered.
        rows, width = index.shape
        place = torch.zeros(rows, padding + 1, dtype=torch.long, device=index.device)
        slots = torch.arange(width, device=index.device).expand(rows, -1)
        place.scatter_(1, torch.where(exists, index, padding), slots)
        parents = place.gather(1, gather_rows(self.parents, index)).masked_fill(~exists, 0)
        return PackedTree(
            tokens=gather_rows(self.tokens, index).masked_fill(~exists, 0),
            parents=parents,
            depths=gather_rows(self.depths, index).masked_fill(~exists, 0),
            log_probs=gather_rows(self.log_probs, index).masked_fill(~exists, 0.0),
            scores=gather_rows(self.scores, index).masked_fill(~exists, -torch.inf),
            exists=exists,
            index=index,
            num_nodes=kept.sum(1),
        )

    @property
    def expanded(self) -> Tensor:
        """[M, C] True where children of the node were proposed."""
        mask = torch.zeros_like(self.exists)
        return mask.scatter_(1, self.expansions, True) & self.exists


@dataclass(frozen=True)
class PackedTree:
    """The nodes that the target verifies, node 0 the root, parents first and by depth, padding at the end.

    Attributes:
        tokens: [M, N+1] token ids.
        parents: [M, N+1] packed index of each node's parent; 0 for the root and for padding.
        depths: [M, N+1] depth, 0 for the root and for padding.
        log_probs: [M, N+1] log-probability of the node given its path.
        scores: [M, N+1] packing scores; -inf for padding.
        exists: [M, N+1] False for padding.
        index: [M, N+1] position of each node in the candidate tree.
        num_nodes: [M] packed nodes, root excluded.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor
    scores: Tensor
    exists: Tensor
    index: Tensor
    num_nodes: Tensor

    def ancestor_mask(self) -> Tensor:
        """Returns [M, N+1, N+1], True where column j is row i itself or one of its ancestors.

        Padding nodes see themselves alone.
        """
        width = self.tokens.shape[1]
        eye = torch.eye(width, dtype=torch.bool, device=self.tokens.device).expand(len(self.tokens), -1, -1)
        mask, above = eye, torch.where(self.exists, self.parents, torch.arange(width, device=eye.device))
        # Doubling: after step s a node knows its ancestors up to distance 2^s.
        for _ in range(max(1, (width - 1).bit_length())):
            mask = mask | mask.gather(1, above.unsqueeze(-1).expand(-1, -1, width))
            above = above.gather(1, above)
        return mask

    def on_path(self, tokens: Tensor) -> Tensor:
        """Returns [M, N+1] bool: the root, and nodes whose path carries the tokens [M, K] of depths 1, 2, …."""
        wanted = tokens.gather(1, (self.depths - 1).clamp(min=0))
        agrees = self.exists & (self.tokens == wanted)
        agrees[:, 0] = True
        return self.exists & (agrees.unsqueeze(1) | ~self.ancestor_mask()).all(2)
