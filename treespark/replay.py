"""A tree policy replayed on training anchors: which edges it keeps, which parents it expands, and their path mass.

Shapes: M anchors, K depths, N packed nodes (root excluded), E expanded parents, P parents of one call, k children,
V vocabulary. Source: arXiv 2610.20175 §3.2, B.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from treespark.policies.base import TreePolicy
from treespark.selection import log_normalizer, selected_log_probs, top_children
from treespark.tree import CandidateTree, Expansion, PackedTree, Proposer, gather_rows


class LogitProposer(Proposer, Protocol):
    """A proposer that also gives the differentiable logits that its proposals come from."""

    @property
    def base_logits(self) -> Tensor:
        """Logits [M, K, V] of each depth without any parent's correction."""

    def logits(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits [M, P, V] under the parents [M, P], and the carry after them [M, P, c]."""


class ExpandedParents(NamedTuple):
    """The distributions of one `expand` call, kept for the losses; or those of `marginals`, one for each depth.

    Attributes:
        depths: [M, P] depth of the children.
        logits: [M, P, V], differentiable.
        log_normalizer: [M, P] logsumexp of the logits, differentiable.
        children: [M, P, k] tokens that were proposed.
        child_log_probs: [M, P, k] their log-probabilities given the path, differentiable.
    """

    depths: Tensor
    logits: Tensor
    log_normalizer: Tensor
    children: Tensor
    child_log_probs: Tensor

    @property
    def boundary(self) -> Tensor:
        """[M, P] the parents' k-th largest log-probability (their admission boundary), detached."""
        return self.child_log_probs[..., -1].detach()

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Returns differentiable log-probabilities [M, P, T] of tokens [M, P, T]."""
        return selected_log_probs(self.logits, tokens, self.log_normalizer)


class _Recorder:
    """Stands between a policy and a proposer and keeps what was expanded; a policy sees detached log-probabilities."""

    def __init__(self, proposer: LogitProposer) -> None:
        self.proposer = proposer
        self.depths, self.vocab_size, self.root_tokens = proposer.depths, proposer.vocab_size, proposer.root_tokens
        self.calls: list[ExpandedParents] = []
        self.marginal: ExpandedParents | None = None

    def root_carry(self) -> Tensor:
        return self.proposer.root_carry()

    def expand(self, depth: int | Tensor, parents: Tensor, carry: Tensor, k: int) -> Expansion:
        logits, after = self.proposer.logits(depth, parents, carry)
        normalizer = log_normalizer(logits)
        tokens, log_probs = top_children(logits, k, normalizer)
        depths = torch.as_tensor(depth, device=parents.device).expand_as(parents)
        self.calls.append(ExpandedParents(depths, logits, normalizer, tokens, log_probs))
        return Expansion(tokens, log_probs.detach(), after)

    def score(self, depth: int | Tensor, parents: Tensor, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.proposer.score(depth, parents, carry, tokens)

    def marginals(self, k: int) -> tuple[Tensor, Tensor]:
        logits = self.proposer.base_logits
        normalizer = log_normalizer(logits)
        tokens, log_probs = top_children(logits, k, normalizer)
        depths = torch.arange(1, self.depths + 1, device=tokens.device).expand(len(tokens), -1)
        self.marginal = ExpandedParents(depths, logits, normalizer, tokens, log_probs)
        return tokens, log_probs.detach()


@dataclass(frozen=True)
class Replay:
    """One replay of a policy on M anchors. Identities, scores and topology carry no gradient.

    Attributes:
        tree: What the policy proposed.
        packed: What it packed.
        expanded: The expanded parents, one entry for each `expand` call. Where the policy asked for the marginals, they
            are the last entry: one distribution for each depth, shared by all its parents.
        parent_exists: Per entry [M, P], False where the parent was padding.
        marginal: That last entry, or None.
    """

    tree: CandidateTree
    packed: PackedTree
    expanded: list[ExpandedParents]
    parent_exists: list[Tensor]
    marginal: ExpandedParents | None = None

    def edge_log_probs(self) -> Tensor:
        """Returns differentiable log p(v | path) of the packed nodes: [M, N+1], 0 for the root and for padding."""
        packed = self.packed
        rows, width = packed.tokens.shape
        real = packed.exists & (packed.depths > 0)
        row = torch.arange(rows, device=real.device).unsqueeze(1).expand(-1, width)
        total, start = None, 0
        if self.marginal is not None:
            # Every parent of a depth shares that depth's distribution; a parent that was expanded has its own.
            places = (packed.depths - 1).clamp(min=0)
            plain = real & ~gather_rows(self.tree.expanded, gather_rows(self.tree.parents, packed.index))
            total = torch.where(plain, _edges(self.marginal, row, places, packed.tokens), 0.0)
        if self.tree.expansions.shape[1]:
            # Slot of each candidate among the expanded parents; padding parents write to a spare place.
            calls = self.expanded[: len(self.expanded) - (self.marginal is not None)]
            exists = torch.cat(self.parent_exists[: len(calls)], 1)
            spare = self.tree.tokens.shape[1]
            slot = torch.full((rows, spare + 1), -1, dtype=torch.long, device=real.device)
            order = torch.arange(self.tree.expansions.shape[1], device=slot.device).expand(rows, -1)
            slot.scatter_(1, torch.where(exists, self.tree.expansions, spare), order)
            slots = slot.gather(1, gather_rows(self.tree.parents, packed.index))
            for call in calls:
                size = call.children.shape[1]
                local = (slots - start).clamp(0, size - 1)
                here = real & (slots >= start) & (slots < start + size)
                edges = torch.where(here, _edges(call, row, local, packed.tokens), 0.0)
                total = edges if total is None else total + edges
                start += size
        assert total is not None, "a policy expands the root or asks for marginals"
        return total


def _edges(call: ExpandedParents, row: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """Returns the log-probabilities [M, I] of tokens [M, I] among the children proposed at places [M, I] of a call."""
    rank = (call.children[row, places] == tokens.unsqueeze(-1)).long().argmax(-1)
    return call.child_log_probs[row, places, rank]


def replay(policy: TreePolicy, proposer: LogitProposer, *, generator: torch.Generator | None = None) -> Replay:
    """Runs `policy` on the drafter's own proposals, as decoding does, and keeps the distributions it expanded."""
    recorder = _Recorder(proposer)
    tree = policy.build(recorder, generator=generator)
    exists = gather_rows(tree.exists, tree.expansions)
    sizes = [call.logits.shape[1] for call in recorder.calls]
    if sum(sizes) != exists.shape[1]:
        raise ValueError(
            f"{type(policy).__name__}.build lists {exists.shape[1]} expansions but expanded {sum(sizes)} parents; "
            "CandidateTree.expansions must name every parent given to Proposer.expand, in the order of the calls."
        )
    entries, parent_exists = list(recorder.calls), list(torch.split(exists, sizes, dim=1)) if sizes else []
    if recorder.marginal is not None:
        entries.append(recorder.marginal)
        parent_exists.append(torch.ones_like(recorder.marginal.depths, dtype=torch.bool))
    return Replay(tree, tree.pack(), entries, parent_exists, recorder.marginal)


def path_mass(packed: PackedTree, target_log_probs: Tensor, depths: int) -> Tensor:
    """Returns the target's mass of every packed node's path: m(root) = 1, m(child) = m(parent) · q_d(child).

    q_d is the target's distribution at depth d of the reference chain, reused as a proxy on every branch
    (arXiv 2610.20175 §3.2).

    Args:
        packed: M packed trees.
        target_log_probs: [M, N+1] log q_d(token) of each node at its own depth.
        depths: K, the depth of the deepest node at most.

    Returns:
        [M, N+1], 0 for padding; no gradient.
    """
    step = target_log_probs.detach().exp()
    mass = (packed.exists & (packed.depths == 0)).to(step.dtype)
    for depth in range(1, depths + 1):
        mass = torch.where(packed.depths == depth, mass.gather(1, packed.parents) * step, mass)
    return mass.masked_fill(~packed.exists, 0.0)
