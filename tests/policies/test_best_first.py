"""`BestFirst`: the best tree under its own scores by enumeration, its identity settings, its stop and its fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.test_contract import paths
from tests.tables import TableProposer, random_proposer
from treespark.policies import BestFirst, Budgeted, Chain, fit_edges
from treespark.policies.best_first import log_odds

seeds = st.integers(0, 10_000)


def enumerate_best(proposer: TableProposer, row: int, policy: BestFirst) -> dict[tuple[int, ...], float]:
    """Returns the N best nodes of the full k-ary tree whose path mass reaches θ, taken one by one from a list."""
    scored: list[tuple[float, int, int, tuple[int, ...]]] = []

    def grow(path: tuple[int, ...], mass: float) -> None:
        if len(path) == proposer.depths:
            return
        parent = path[-1] if path else int(proposer.root_tokens[row])
        probs = proposer.table[row, len(path), parent].softmax(-1).tolist()
        for token in sorted(range(len(probs)), key=lambda token: (-probs[token], token))[: policy.k]:
            p = probs[token]
            edge = 1 / (1 + math.exp(-(policy.a * math.log(p / (1 - p)) + policy.b)))
            scored.append((-mass * edge, len(path), len(scored), (*path, token)))
            grow((*path, token), mass * edge)

    grow((), 1.0)
    best = sorted(scored)[: policy.num_draft_nodes]
    return {path: math.log(-mass) for mass, _, _, path in best if -mass >= policy.theta}


@given(
    seed=seeds,
    k=st.integers(1, 4),
    num_nodes=st.integers(1, 30),
    a=st.sampled_from([0.5, 1.0, 1.7]),
    b=st.sampled_from([-1.0, 0.0, 0.4]),
    theta=st.sampled_from([0.0, 0.02, 0.2, 0.9]),
)
def test_is_the_best_tree_under_its_own_scores(
    seed: int, k: int, num_nodes: int, a: float, b: float, theta: float
) -> None:
    """Against the full tree of 4 depths and at most 4 + 16 + 64 + 256 nodes, every row with a size of its own."""
    proposer = random_proposer(seed)
    num_nodes = min(num_nodes, sum(k**depth for depth in range(1, 5)))
    policy = BestFirst(k, num_nodes, a=a, b=b, theta=theta)
    packed = policy.build(proposer).pack()
    for row in range(len(proposer.root_tokens)):
        assert paths(packed, row) == pytest.approx(enumerate_best(proposer, row, policy))


@given(seeds, st.integers(1, 4), st.integers(1, 4))
def test_identity_setting_is_budgeted(seed: int, k: int, width: int) -> None:
    """a = 1, b = 0, θ = 0 and a frontier width: the same candidates, expansions and packed nodes, bit for bit."""
    proposer = random_proposer(seed)
    num_nodes = min(12, k * sum(Budgeted(k, 1, width).frontier_limits(4)))
    mine, other = BestFirst(k, num_nodes, width).build(proposer), Budgeted(k, num_nodes, width).build(proposer)
    for name in ("tokens", "parents", "depths", "log_probs", "scores", "exists", "expansions"):
        assert torch.equal(getattr(mine, name), getattr(other, name)), name
    assert BestFirst(k, num_nodes, width).expanded_per_depth(4) == Budgeted(k, num_nodes, width).expanded_per_depth(4)


@given(seeds)
def test_one_child_and_all_depths_is_the_chain(seed: int) -> None:
    proposer = random_proposer(seed)
    mine, chain = BestFirst(k=1, num_draft_nodes=4).build(proposer).pack(), Chain().build(proposer).pack()
    assert torch.equal(mine.tokens, chain.tokens) and torch.equal(mine.parents, chain.parents)


def test_size_follows_the_row() -> None:
    """θ = 0.3 over two depths. A sure row (p = 0.98) keeps its spine; an even one of two tokens keeps the two halves
    (mass 0.25 each below is too little); one over ten tokens (p = 0.1) packs nothing, and what lies under θ is not
    expanded.
    """
    logits = torch.zeros(3, 2, 10, 10, dtype=torch.float64)
    logits[0, ..., 3] = math.log(9 * 0.98 / 0.02)
    logits[1, ..., 2:] = -torch.inf
    tree = BestFirst(k=2, num_draft_nodes=6, theta=0.3).build(TableProposer(logits, torch.zeros(3, dtype=torch.long)))
    packed = tree.pack()
    assert packed.num_nodes.tolist() == [2, 2, 0]
    assert list(paths(packed, 0)) == [(3,), (3, 3)] and list(paths(packed, 1)) == [(0,), (1,)]
    assert tree.expanded.sum(1).tolist() == [2, 3, 1]


def test_log_odds_at_the_ends() -> None:
    """log 1/2 has odds 1; a sure token keeps the score 0 and an impossible one -inf under any calibration."""
    values = torch.tensor([math.log(0.5), 0.0, -math.inf], dtype=torch.float64)
    assert log_odds(values).tolist() == [0.0, math.inf, -math.inf]
    assert BestFirst(a=2.0, b=0.0).edge_scores(values).tolist() == [pytest.approx(math.log(0.5)), 0.0, -math.inf]


def test_fit_recovers_the_calibration_that_drew_the_verdicts() -> None:
    """40,000 verdicts drawn with σ(0.7 · logit p - 0.4): the fit is within 0.05 (its standard error is about 0.01)."""
    generator = torch.Generator().manual_seed(0)
    odds = 2 * torch.randn(40_000, generator=generator, dtype=torch.float64)
    accepted = torch.rand(40_000, generator=generator) < torch.sigmoid(0.7 * odds - 0.4)
    a, b = fit_edges(torch.nn.functional.logsigmoid(odds), accepted)
    assert a == pytest.approx(0.7, abs=0.05) and b == pytest.approx(-0.4, abs=0.05)


def test_fit_of_few_or_separable_edges_stays_finite() -> None:
    """One accepted edge at p = 1/2 has no odds to learn from: a = 1, and b = 0.401 solves b = 1 - σ(b)."""
    a, b = fit_edges(torch.tensor([math.log(0.5)]), torch.tensor([True]))
    assert a == pytest.approx(1.0) and b == pytest.approx(0.40105813, abs=1e-6)
    separable = torch.tensor([0.9, 0.8, 0.1, 0.2]).log(), torch.tensor([True, True, False, False])
    assert all(math.isfinite(value) for value in fit_edges(*separable))
    a, b = fit_edges(torch.tensor([0.0, -math.inf, -1.0]), torch.tensor([True, False, True]))
    assert math.isfinite(a) and math.isfinite(b)


def test_fit_refuses_what_it_cannot_learn_from() -> None:
    with pytest.raises(ValueError, match="n >= 1 edges"):
        fit_edges(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    likelier_fails = torch.tensor([0.9, 0.1] * 50).log(), torch.tensor([False, True] * 50)
    with pytest.raises(ValueError, match="accepted less often"):
        fit_edges(*likelier_fails)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"a": 0.0}, "needs a > 0"),
        ({"b": math.nan}, "finite b"),
        ({"theta": 1.0}, "0 <= theta < 1, got 1.0"),
        ({"theta": -0.1}, "0 <= theta < 1"),
        ({"k": 65}, "exceeds the vocabulary of 64"),
        ({"k": 2, "num_draft_nodes": 31}, "choose 1 to 30"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], words: str) -> None:
    """2 + 4 + 8 + 16 = 30 nodes in four depths of two children."""
    with pytest.raises(ValueError, match=words):
        BestFirst(**options).check(depths=4, vocab_size=64)
