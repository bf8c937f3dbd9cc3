"""`Budgeted` against brute-force enumeration, and `Chain` as its identity setting."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import TableProposer, random_proposer
from treespark.policies import Budgeted, Chain
from treespark.tree import PackedTree


def enumerate_tree(proposer: TableProposer, row: int, k: int, width: int, num_nodes: int) -> set[tuple[int, ...]]:
    """Builds one row's packed tree with Python lists: the set of packed paths."""
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, int, int, tuple[int, ...]]] = []
    for depth in range(proposer.depths):
        candidates = []
        for score, path in frontier:
            parent = path[-1] if path else int(proposer.root_tokens[row])
            log_probs = proposer.table[row, depth, parent].log_softmax(-1).tolist()
            best = sorted(range(len(log_probs)), key=lambda token: (-log_probs[token], token))[:k]
            candidates += [(score + log_probs[token], (*path, token)) for token in best]
        pool += [(-score, depth, order, path) for order, (score, path) in enumerate(candidates)]
        chosen = sorted(range(len(candidates)), key=lambda order: (-candidates[order][0], order))[:width]
        frontier = [candidates[order] for order in sorted(chosen)]
    return {path for *_, path in sorted(pool)[:num_nodes]}


def paths(packed: PackedTree, row: int) -> set[tuple[int, ...]]:
    """Returns a row's packed nodes as token paths."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, int(packed.num_nodes[row]) + 1):
        parent = int(packed.parents[row, node])
        assert parent < node, "parents stand before their children"
        found.append((*found[parent], int(packed.tokens[row, node])))
    return set(found[1:])


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 6), st.data())
def test_equals_enumeration(seed: int, k: int, width: int, data: st.DataObject) -> None:
    """Every row's packed set is what a plain enumeration packs, prefix closed and within the budget."""
    proposer = random_proposer(seed)
    pool = k * sum(Budgeted(k, 1, width).expanded_per_depth(proposer.depths))
    num_nodes = data.draw(st.integers(1, pool))
    policy = Budgeted(k, num_nodes, width)
    policy.check(proposer.depths, proposer.vocab_size)
    packed = policy.build(proposer).pack()
    for row in range(len(proposer.root_tokens)):
        found = paths(packed, row)
        assert found == enumerate_tree(proposer, row, k, width, num_nodes)
        assert len(found) == num_nodes
        assert all(path[:-1] in found or len(path) == 1 for path in found)


@given(st.integers(0, 10_000))
def test_one_child_and_all_depths_is_the_chain(seed: int) -> None:
    """Budgeted(k = 1, N = K) and Chain pack the same tree, node by node: the greedy path."""
    proposer = random_proposer(seed)
    chain, tree = Chain().build(proposer).pack(), Budgeted(k=1, num_draft_nodes=proposer.depths).build(proposer).pack()
    for name in ("tokens", "parents", "depths", "scores", "exists", "num_nodes"):
        assert torch.equal(getattr(chain, name), getattr(tree, name)), name
    for row in range(len(proposer.root_tokens)):
        token = int(proposer.root_tokens[row])
        for depth in range(proposer.depths):
            token = int(proposer.table[row, depth, token].argmax())
            assert int(chain.tokens[row, depth + 1]) == token


def test_pool_of_the_reference_settings_is_100() -> None:
    """K = 7, k = F = 4: 4 + 6·16 = 100 candidates and the root; N = 32 nodes make 33 target positions."""
    tree = Budgeted().build(random_proposer(0, rows=2, depths=7, vocab=16))
    assert tree.tokens.shape == (2, 101)
    packed = tree.pack()
    assert packed.tokens.shape == (2, 33)
    assert packed.num_nodes.tolist() == [32, 32]
    assert tree.expanded.sum(1).tolist() == [25, 25]
    assert Budgeted().expanded_per_depth(7) == [1, 4, 4, 4, 4, 4, 4]


def test_scores_are_sums_of_log_probabilities_at_least_in_float32() -> None:
    """bfloat16 logits are summed in float32: two edges of log(1/4) each score -2.7726 at depth 2."""
    proposer = TableProposer(torch.zeros(1, 2, 4, 4, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.long))
    tree = Budgeted(k=1, num_draft_nodes=2).build(proposer)
    assert tree.scores.dtype == torch.float32
    torch.testing.assert_close(tree.scores, torch.tensor([[0.0, -math.log(4), -2 * math.log(4)]]))


def test_impossible_tokens_make_the_tree_smaller() -> None:
    """Only two tokens are possible: k = 3 gives a third child of probability 0, which is never packed or expanded."""
    logits = torch.full((1, 2, 4, 4), float("-inf"))
    logits[..., :2] = 0.0
    tree = Budgeted(k=3, num_draft_nodes=6).build(TableProposer(logits, torch.zeros(1, dtype=torch.long)))
    packed = tree.pack()
    assert packed.num_nodes.tolist() == [6]
    assert int(packed.tokens.max()) == 1
    assert tree.expanded.sum().item() == 3  # the root and two of three frontier places


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, "k >= 1, got 0"),
        ({"num_draft_nodes": 0}, "num_draft_nodes >= 1, got 0"),
        ({"frontier_width": 0}, "frontier_width >= 1, got 0"),
        ({"k": 65}, "exceeds the vocabulary of 64"),
        ({"k": 2, "num_draft_nodes": 15}, "choose 1 to 14"),
    ],
)
def test_options_out_of_range(options: dict[str, int], words: str) -> None:
    """An impossible option is an error at start that names the range; 2 + 3·4 = 14 candidates here."""
    with pytest.raises(ValueError, match=words):
        Budgeted(**options).check(depths=4, vocab_size=64)
