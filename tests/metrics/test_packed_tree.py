"""Packed-tree diagnostics against loops over nodes, and their identities."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.decoding.fakes import FakeProposer
from treespark.metrics import (
    ArgmaxSurvival,
    CutScore,
    ExpandedParentsByDepth,
    PackedNodesByDepth,
    PackedTreeCoverage,
    TargetRank,
)
from treespark.policies import Budgeted, Chain, TreePolicy
from treespark.tree import CandidateTree, PackedTree

K, V = 3, 5


def mass_of(packed: PackedTree, q: Tensor) -> Tensor:
    """Path mass node by node: 1 at the root, then the parent's times q_d of the token; 0 for padding."""
    mass = torch.zeros(packed.tokens.shape, dtype=torch.float64)
    mass[:, 0] = 1.0
    for row, count in enumerate(packed.num_nodes.tolist()):
        for node in range(1, count + 1):
            step = q[row, packed.depths[row, node] - 1, packed.tokens[row, node]]
            mass[row, node] = mass[row, packed.parents[row, node]] * step
    return mass


class Case:
    """Random anchors: candidates, packed trees, target distributions q [M, K, V] and contiguous valid depths."""

    def __init__(self, seed: int, rows: int = 4, policy: TreePolicy | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(rows, K, V, generator=generator, dtype=torch.float64)
        logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf  # fewer nodes in some rows
        logits[:, :, 0] = 0.0
        table = torch.randn(V, V, generator=generator, dtype=torch.float64)
        proposer = FakeProposer(logits, table, torch.zeros(rows, dtype=torch.long))
        self.candidates: CandidateTree = (policy or Budgeted(k=2, num_draft_nodes=9)).build(proposer)
        self.packed: PackedTree = self.candidates.pack()
        self.q = torch.randn(rows, K, V, generator=generator, dtype=torch.float64).softmax(-1)
        self.argmax = self.q.argmax(-1)
        lengths = torch.randint(0, K + 1, (rows, 1), generator=generator)
        self.valid = torch.arange(K) < lengths
        self.mass = mass_of(self.packed, self.q)

    def paths(self, row: int) -> list[tuple[int, ...]]:
        """Token paths of the packed nodes, root excluded."""
        found: list[tuple[int, ...]] = [()]
        for node in range(1, int(self.packed.num_nodes[row]) + 1):
            found.append((*found[int(self.packed.parents[row, node])], int(self.packed.tokens[row, node])))
        return found[1:]

    def mean(self, figure: Any) -> Tensor:
        """Mean of figure(row, depth) over the valid anchors of each depth; None leaves an anchor out."""
        means = []
        for depth in range(1, K + 1):
            values = [figure(row, depth) for row in range(len(self.valid)) if self.valid[row, depth - 1]]
            values = [value for value in values if value is not None]
            means.append(sum(values) / len(values) if values else math.nan)
        return torch.tensor(means, dtype=torch.float64)

    def argmax_path(self, row: int, depth: int) -> tuple[int, ...]:
        return tuple(self.argmax[row, :depth].tolist())


def check(metric: Any, expected: Tensor, *updates: tuple[Any, ...]) -> None:
    for update in updates:
        metric.update(*update)
    torch.testing.assert_close(metric.compute(), expected, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_against_loops_over_paths(seed: int) -> None:
    """Mass of a path is the product of q_d over its tokens; survival, rank and counts are read off the path lists."""
    case = Case(seed)
    packed, valid = case.packed, case.valid

    def coverage(row: int, depth: int) -> float:
        paths = [path for path in case.paths(row) if len(path) == depth]
        return sum(math.prod(float(case.q[row, d, token]) for d, token in enumerate(path)) for path in paths)

    def survival(row: int, depth: int) -> float:
        return float(case.argmax_path(row, depth) in case.paths(row))

    def nodes(row: int, depth: int) -> float:
        return sum(len(path) == depth for path in case.paths(row))

    def rank(row: int, depth: int) -> float | None:
        wanted = case.argmax_path(row, depth)
        by_path = dict(zip(case.paths(row), packed.log_probs[row, 1:].tolist(), strict=False))
        if wanted not in by_path:
            return None
        siblings = [value for path, value in by_path.items() if path[:-1] == wanted[:-1]]
        return 1 + sum(value > by_path[wanted] for value in siblings)

    check(PackedTreeCoverage(K), case.mean(coverage), (packed, case.mass, valid))
    check(ArgmaxSurvival(K), case.mean(survival), (packed, case.argmax, valid))
    check(PackedNodesByDepth(K), case.mean(nodes), (packed, valid))
    check(TargetRank(K), case.mean(rank), (packed, case.argmax, valid))
    scores = [
        float(packed.scores[row, 1 : int(packed.num_nodes[row]) + 1].min())
        for row in range(len(valid))
        if valid[row, 0] and packed.num_nodes[row] > 0
    ]
    expected = sum(scores) / len(scores) if scores else math.nan
    check(CutScore(), torch.tensor(expected, dtype=torch.float64), (packed, valid))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_coverage_of_one_anchor_falls_with_depth(seed: int) -> None:
    """A depth's packed nodes are children of packed nodes and q sums to at most 1: mass cannot grow."""
    case = Case(seed, rows=1)
    case.valid[:] = True
    metric = PackedTreeCoverage(K)
    metric.update(case.packed, case.mass, case.valid)
    by_depth = metric.compute().tolist()
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise([1.0, *by_depth]))


def test_a_tree_of_all_tokens_covers_everything() -> None:
    """With k = V and every candidate packed the mass at each depth is 1, and the argmax path is always inside."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)
    proposer = FakeProposer(logits, torch.zeros(3, 3), torch.zeros(2, dtype=torch.long))
    packed = Budgeted(k=3, num_draft_nodes=12, frontier_width=3).build(proposer).pack()
    q = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64).softmax(-1)
    mass = mass_of(packed, q)
    valid = torch.ones(2, 2, dtype=torch.bool)
    check(PackedTreeCoverage(2), torch.ones(2, dtype=torch.float64), (packed, mass, valid))
    check(ArgmaxSurvival(2), torch.ones(2, dtype=torch.float64), (packed, q.argmax(-1), valid))


def test_expanded_parents() -> None:
    """Budgeted(k=2) expands the root, then 2 parents into each of the depths 2 and 3; the chain 1 each."""
    case = Case(0)
    case.valid[:] = True
    parents = case.candidates.expanded
    expected = torch.tensor(
        [
            (parents & (case.candidates.depths == depth)).sum().item() / len(case.valid)  # parents stand one above
            for depth in range(K)
        ],
        dtype=torch.float64,
    )
    check(ExpandedParentsByDepth(K), expected, (case.candidates, case.valid))
    assert expected[0] == 1.0 and expected.max() <= 2.0
    chain = Case(0, policy=Chain())
    chain.valid[:] = True
    check(ExpandedParentsByDepth(K), torch.ones(K, dtype=torch.float64), (chain.candidates, chain.valid))


@pytest.mark.parametrize("metric", [PackedTreeCoverage, ArgmaxSurvival, PackedNodesByDepth, TargetRank])
def test_depths_without_a_valid_anchor_are_nan(metric: Any) -> None:
    """Two anchors valid at depth 1 alone leave depths 2 and 3 without a denominator."""
    case = Case(1, rows=2)
    case.valid[:] = torch.tensor([True, False, False])
    inputs: list[Any] = [case.packed, case.valid]
    if metric is PackedTreeCoverage:
        inputs.insert(1, case.mass)
    elif metric is not PackedNodesByDepth:
        inputs.insert(1, case.argmax)
    built = metric(K)
    built.update(*inputs)
    assert torch.isnan(built.compute()[1:]).all()
