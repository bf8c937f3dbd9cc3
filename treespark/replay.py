"""A tree policy replayed on training anchors: which edges it keeps, which parents it expands, and their path mass.

Shapes: M anchors, K depths, N packed nodes (root excluded), E expanded parents, P parents of one call, k children,
V vocabulary. Source: arXiv 2610.20175 §3.2, B.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from treespark.distributions import Distributions, LogitProposer, Place, PlainRows, RecordingProposer
from treespark.policies.base import TreePolicy
from treespark.selection import log_normalizer, top_children
from treespark.tree import CandidateTree, Expansion, PackedTree, gather_rows


class ExpandedParents(NamedTuple):
    """The distributions of one `expand` call, kept for the losses; or those of `marginals`, one for each depth.

    Attributes:
        depths: [M, P] depth of the children.
        distributions: The distributions, and others beside them.
        rows: [M, P] which of them are the parents'.
        children: [M, P, k] tokens that were proposed.
        child_log_probs: [M, P, k] their log-probabilities given the path, differentiable.
    """

    depths: Tensor
    distributions: Distributions
    rows: Tensor
    children: Tensor
    child_log_probs: Tensor

    @property
    def boundary(self) -> Tensor:
        """[M, P] the parents' k-th largest log-probability (their admission boundary), detached."""
        return self.child_log_probs[..., -1].detach()

    @property
    def logits(self) -> Tensor:
        """[M, P, V] the parents' logits, differentiable."""
        return self.distributions.logits[self.rows]

    @property
    def log_normalizer(self) -> Tensor:
        """[M, P] logsumexp of the logits, differentiable."""
        return self.distributions.log_normalizer[self.rows]

    def log_probs(self, tokens: Tensor) -> Tensor:
        """Returns differentiable log-probabilities [M, P, T] of tokens [M, P, T]."""
        return self.distributions.log_probs(self.rows, tokens)


class _Call(NamedTuple):
    """What `expand` or `marginals` returned, until its distributions are differentiable."""

    depths: Tensor
    place: Place
    normalizer: Tensor
    children: Tensor


class _Recorder:
    """Stands between a policy and a proposer and keeps what was expanded; a policy sees detached log-probabilities."""

    def __init__(self, proposer: LogitProposer, count: int | None) -> None:
        self.proposer = proposer
        self.depths, self.vocab_size, self.root_tokens = proposer.depths, proposer.vocab_size, proposer.root_tokens
        self.rows = proposer.record(count) if isinstance(proposer, RecordingProposer) else PlainRows(proposer)
        self.calls: list[_Call] = []
        self.asked_marginals: Tensor | None = None

    def root_carry(self) -> Tensor:
        return self.proposer.root_carry()

    def expand(self, depth: int | Tensor, parents: Tensor, carry: Tensor, k: int) -> Expansion:
        logits, place, after = self.rows.add(depth, parents, carry)
        with torch.no_grad():
            normalizer = log_normalizer(logits)
            tokens, log_probs = top_children(logits, k, normalizer)
        depths = torch.as_tensor(depth, device=parents.device).expand_as(parents)
        self.calls.append(_Call(depths, place, normalizer, tokens))
        return Expansion(tokens, log_probs, after)

    def score(self, depth: int | Tensor, parents: Tensor, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.proposer.score(depth, parents, carry, tokens)

    def marginals(self, k: int) -> tuple[Tensor, Tensor]:
        base = self.proposer.base_logits  # not under no_grad: a proposer may keep them as it made them
        with torch.no_grad():
            tokens, log_probs = top_children(base, k)
        self.asked_marginals = tokens
        return tokens, log_probs

    def expanded(self) -> list[ExpandedParents]:
        """Returns the distributions of the `expand` calls, differentiable."""
        parts = self.rows.finish()
        if not self.calls:
            return []
        dtype = self.calls[0].normalizer.dtype
        normalizers = [torch.empty(len(part), dtype=dtype, device=part.device) for part in parts]
        filled = [torch.zeros(len(part), dtype=torch.bool, device=part.device) for part in parts]
        for call in self.calls:
            normalizers[call.place.part][call.place.rows] = call.normalizer
            filled[call.place.part][call.place.rows] = True
        distributions = [
            Distributions(part, values if bool(known.all()) else None)
            for part, values, known in zip(parts, normalizers, filled, strict=True)
        ]
        return [self._entry(distributions[call.place.part], call.place.rows, call) for call in self.calls]

    def marginal(self) -> ExpandedParents | None:
        """Returns the distributions of the `marginals` call, differentiable; None where the policy did not ask."""
        if self.asked_marginals is None:
            return None
        tokens = self.asked_marginals
        depths = torch.arange(1, self.depths + 1, device=tokens.device).expand(len(tokens), -1)
        index = torch.arange(tokens.shape[:2].numel(), device=tokens.device).view(tokens.shape[:2])
        distributions = Distributions(self.proposer.base_logits.flatten(0, 1))
        call = _Call(depths, Place(0, index), index, tokens)
        return self._entry(distributions, index, call)

    @staticmethod
    def _entry(distributions: Distributions, index: Tensor, call: _Call) -> ExpandedParents:
        log_probs = distributions.log_probs(index, call.children)
        return ExpandedParents(call.depths, distributions, index, call.children, log_probs)


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
    known = policy.expanded_per_depth(proposer.depths)
    recorder = _Recorder(proposer, None if known is None else sum(known) * len(proposer.root_tokens))
    tree = policy.build(recorder, generator=generator)
    exists = gather_rows(tree.exists, tree.expansions)
    sizes = [call.children.shape[1] for call in recorder.calls]
    if sum(sizes) != exists.shape[1]:
        raise ValueError(
            f"{type(policy).__name__}.build lists {exists.shape[1]} expansions but expanded {sum(sizes)} parents; "
            "CandidateTree.expansions must name every parent given to Proposer.expand, in the order of the calls."
        )
    entries, parent_exists = recorder.expanded(), list(torch.split(exists, sizes, dim=1)) if sizes else []
    marginal = recorder.marginal()
    if marginal is not None:
        entries.append(marginal)
        parent_exists.append(torch.ones_like(marginal.depths, dtype=torch.bool))
    return Replay(tree, tree.pack(), entries, parent_exists, marginal)


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
