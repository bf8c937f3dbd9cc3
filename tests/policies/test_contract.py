"""What every registered tree policy owes, ours and any that is added: these tests ask the registry, not a list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import TableProposer, random_proposer
from treespark.policies import TreePolicy, parse
from treespark.replay import replay
from treespark.tree import PackedTree

POLICIES = [cls() for cls in TreePolicy.available().values() if cls.__module__.startswith("treespark.")]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
seeds = st.integers(0, 10_000)


def proposer_of(seed: int) -> TableProposer:
    return random_proposer(seed, vocab=16)


def paths(packed: PackedTree, row: int) -> dict[tuple[int, ...], float]:
    """Returns a row's packed nodes as token paths with their scores."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, int(packed.num_nodes[row]) + 1):
        parent = int(packed.parents[row, node])
        assert parent < node and packed.depths[row, node] == packed.depths[row, parent] + 1
        assert packed.scores[row, node] <= packed.scores[row, parent]
        found.append((*found[parent], int(packed.tokens[row, node])))
    return {path: float(packed.scores[row, node]) for node, path in enumerate(found) if path}


@every_policy
@given(seed=seeds)
def test_trees_are_prefix_closed_and_within_the_budget(policy: TreePolicy, seed: int) -> None:
    """Distinct paths (so siblings differ), parents first, at most N nodes; N is the packed width."""
    proposer = proposer_of(seed)
    policy.check(proposer.depths, proposer.vocab_size)
    packed = policy.build(proposer).pack()
    for row in range(len(packed.tokens)):
        found = paths(packed, row)
        assert len(found) == int(packed.num_nodes[row]) <= policy.num_nodes(proposer.depths)
        assert all(path[:-1] in found or len(path) == 1 for path in found)


@every_policy
@given(seed=seeds)
def test_training_tree_is_the_serving_tree_and_its_edges_are_differentiable(policy: TreePolicy, seed: int) -> None:
    """Replay packs what decoding packs, and its edge log-probabilities are those of the packed tree, with gradient."""
    proposer = proposer_of(seed)
    proposer.table.requires_grad_()
    serving, found = policy.build(proposer).pack(), replay(policy, proposer)
    for name in ("tokens", "parents", "depths", "scores", "log_probs", "exists", "num_nodes"):
        assert torch.equal(getattr(serving, name), getattr(found.packed, name)), name
    assert not found.packed.scores.requires_grad
    edges = found.edge_log_probs()
    torch.testing.assert_close(edges.detach(), found.packed.log_probs.to(edges.dtype))
    (gradient,) = torch.autograd.grad(edges.sum(), proposer.table)
    assert gradient.abs().sum() > 0


@every_policy
@given(seed=seeds, row=st.integers(0, 2))
def test_rows_are_independent(policy: TreePolicy, seed: int, row: int) -> None:
    """A row builds and expands the same tree alone as among others, whatever the others' trees look like."""
    many = proposer_of(seed)
    alone = TableProposer(many.table[row : row + 1], many.root_tokens[row : row + 1])
    batch, single = policy.build(many), policy.build(alone)
    assert paths(batch.pack(), row) == paths(single.pack(), 0)
    assert int(batch.expanded.sum(1)[row]) == int(single.expanded.sum(1)[0])


@every_policy
def test_expansions_count_as_the_policy_says(policy: TreePolicy) -> None:
    """Where E_d is fixed, replay shows that many parents at every depth (a marginal counts as one)."""
    proposer = proposer_of(0)
    fixed = policy.expanded_per_depth(proposer.depths)
    found = replay(policy, proposer)
    counts = torch.zeros(proposer.depths, dtype=torch.long)
    for call, exists in zip(found.expanded, found.parent_exists, strict=True):
        counts.index_add_(0, (call.depths - 1)[exists], torch.ones(int(exists.sum()), dtype=torch.long))
    assert fixed is None or counts.tolist() == [len(proposer.root_tokens) * count for count in fixed]


@every_policy
def test_impossible_rows_pack_nothing(policy: TreePolicy) -> None:
    """NaN distributions give the bare root, and leave the other rows alone."""
    proposer = proposer_of(1)
    table = proposer.table.clone()
    table[1] = torch.nan
    packed = policy.build(TableProposer(table, proposer.root_tokens)).pack()
    expected = policy.build(proposer).pack()
    assert packed.num_nodes[1] == 0
    assert paths(packed, 0) == paths(expected, 0) and paths(packed, 2) == paths(expected, 2)


@every_policy
def test_written_as_a_call_and_recorded(policy: TreePolicy) -> None:
    """A policy survives its record and its text form."""
    again: Any = parse(repr(policy))
    assert again.config() == policy.config() == TreePolicy.from_config(policy.config()).config()
