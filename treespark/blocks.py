"""Draft blocks: the labels of a chunk of anchors and everything that several losses share, computed once on demand.

Shapes: R rows, S sequence, M anchors of a chunk, K depths, V vocabulary, H hidden, N packed nodes.
Depth d = 1..K is stored at index d-1; it predicts the token d positions after the anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treespark.distributions import Distributions, LogitProposer, shared
from treespark.policies.base import TreePolicy
from treespark.replay import Replay, path_mass, replay
from treespark.selection import at_least_float32, log_normalizer


class DraftProposerLike(LogitProposer, Protocol):
    """What the losses need of a drafter's proposer, beyond what a tree policy needs."""

    def path_logits(self, tokens: Tensor) -> Tensor:
        """Returns logits [M, K, V] conditioned on the parents `tokens` [M, K] along one path."""

    def confidence_logits(self, tokens: Tensor, detach: bool = False) -> Tensor:
        """Returns confidence logits [M, K] for the same parents."""


@dataclass(frozen=True)
class Labels:
    """What the reference text says about M blocks.

    Attributes:
        root_tokens: [M] the anchors' tokens.
        tokens: [M, K] the tokens that follow; where `valid` is False the value is meaningless but in range.
        valid: [M, K] True while the label lies in the same document and in the supervised span, contiguously from
            depth 1.
        expanded_per_depth: How many parents the policy expands into depth 1..K, where that is fixed; else None.
    """

    root_tokens: Tensor
    tokens: Tensor
    valid: Tensor
    expanded_per_depth: list[int] | None = None

    def __len__(self) -> int:
        """Number of anchors M."""
        return len(self.root_tokens)

    def __getitem__(self, rows: slice) -> Labels:
        """Returns the labels of a slice of the anchors."""
        return Labels(self.root_tokens[rows], self.tokens[rows], self.valid[rows], self.expanded_per_depth)

    def decay(self, gamma: float) -> Tensor:
        """Returns the depth weights w_d = exp(-(d-1)/gamma): [K], float64."""
        depth = torch.arange(self.tokens.shape[1], device=self.tokens.device, dtype=torch.float64)
        return torch.exp(-depth / gamma)


def make_labels(
    input_ids: Tensor,
    loss_mask: Tensor,
    document_ids: Tensor,
    rows: Tensor,
    anchors: Tensor,
    depths: int,
    expanded_per_depth: list[int] | None = None,
) -> Labels:
    """Collects the labels of M anchors.

    Args:
        input_ids: [R, S] token ids.
        loss_mask: [R, S] True for supervised tokens.
        document_ids: [R, S] document of each token, -1 for padding.
        rows: [M] row of each anchor.
        anchors: [M] position of each anchor.
        depths: K.
        expanded_per_depth: See `Labels`.

    Returns:
        The labels; a label is read at its own position anchor + d, never at its slot's.
    """
    position = anchors.unsqueeze(1) + torch.arange(1, depths + 1, device=anchors.device)
    inside = position < input_ids.shape[1]
    position = position.clamp(max=input_ids.shape[1] - 1)
    row = rows.unsqueeze(1)
    same = document_ids[row, position] == document_ids[rows, anchors].unsqueeze(1)
    valid = (inside & same & loss_mask[row, position]).cumprod(1).bool()
    return Labels(input_ids[rows, anchors], input_ids[row, position], valid, expanded_per_depth)


class DraftBlocks:
    """A chunk of M anchors, as every loss sees it.

    Args:
        labels: The reference text's labels.
        proposer: The drafter's distributions for the chunk.
        target_hidden: [M, K, H] final-normed target states at anchor + d - 1; their head gives q_d.
        target_head: Maps target states to target logits.
        policy: The tree policy that replay runs.

    Attributes:
        differentiable: Whether gradients were enabled when the blocks were made. What losses share has one then, even
            if the first of them asks under `torch.no_grad`.
    """

    def __init__(
        self,
        labels: Labels,
        proposer: DraftProposerLike,
        target_hidden: Tensor,
        target_head: Callable[[Tensor], Tensor],
        policy: TreePolicy,
    ) -> None:
        self.labels, self.proposer, self.policy = labels, proposer, policy
        self._target_hidden, self._target_head = target_hidden, target_head
        self.differentiable = torch.is_grad_enabled()

    @shared
    def reference_parents(self) -> Tensor:
        """[M, K] parent token of each depth on the reference path: the anchor, then the labels."""
        return torch.cat([self.labels.root_tokens.unsqueeze(1), self.labels.tokens[:, :-1]], 1)

    @shared
    def _path(self) -> Distributions:
        """The drafter's distributions along the reference path: row m·K + d - 1."""
        return Distributions(self.proposer.path_logits(self.reference_parents).flatten(0, 1))

    @shared
    def path_logits(self) -> Tensor:
        """[M, K, V] the drafter's logits along the reference path, differentiable."""
        return at_least_float32(self._path.logits.view(*self.labels.tokens.shape, -1))

    @shared
    def path_log_normalizer(self) -> Tensor:
        """[M, K] logsumexp of `path_logits`, differentiable."""
        return self._path.log_normalizer.view(self.labels.tokens.shape)

    @shared
    def label_log_probs(self) -> Tensor:
        """[M, K] log p_d of the label given the reference path, differentiable."""
        tokens = self.labels.tokens.flatten()
        index = torch.arange(len(tokens), device=tokens.device)
        return self._path.log_probs(index, tokens.unsqueeze(-1)).view(self.labels.tokens.shape)

    @shared
    def target_logits(self) -> Tensor:
        """[M, K, V] the target's logits at each depth of the reference chain; no gradient."""
        with torch.no_grad():
            return at_least_float32(self._target_head(self._target_hidden)).detach()

    @shared
    def target_log_normalizer(self) -> Tensor:
        """[M, K] logsumexp of `target_logits`."""
        return log_normalizer(self.target_logits)

    @shared
    def l1(self) -> Tensor:
        """[M, K] Σ_v abs(p_d(v) - q_d(v)) on the reference path, differentiable."""
        distance = self._path.distance(self.target_logits.flatten(0, 1), self.target_log_normalizer.flatten())
        return distance.view(self.labels.tokens.shape)

    @shared
    def replay(self) -> Replay:
        """The policy replayed on the chunk."""
        return replay(self.policy, self.proposer)

    @shared
    def path_mass(self) -> Tensor:
        """[M, N+1] the target's mass of every packed node's path; no gradient."""
        packed = self.replay.packed
        return path_mass(packed, self.target_log_probs(packed.depths, packed.tokens), self.proposer.depths)

    @shared
    def retained(self) -> Tensor:
        """[M, N+1] True for packed nodes (root excluded) at valid depths."""
        packed = self.replay.packed
        depth = (packed.depths - 1).clamp(min=0)
        return packed.exists & (packed.depths > 0) & self.labels.valid.gather(1, depth)

    def target_log_probs(self, depths: Tensor, tokens: Tensor) -> Tensor:
        """Returns log q_d of tokens [M, I] at depths [M, I]; what depth 0, the root's, gives means nothing: [M, I]."""
        row = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        depth, tokens = (depths - 1).clamp(min=0), tokens.masked_fill(depths == 0, 0)
        return self.target_logits[row, depth, tokens] - self.target_log_normalizer.gather(1, depth)

    def top_target_tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the target's `count` likeliest tokens of each depth and their probabilities: [M, K, count] each."""
        logits, tokens = self.target_logits.topk(count, dim=-1)
        return tokens, (logits - self.target_log_normalizer.unsqueeze(-1)).exp()
