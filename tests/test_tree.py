"""Selection of children, packing and the ancestor mask."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import random_proposer
from treespark.policies import Budgeted
from treespark.selection import top_children
from treespark.tree import CandidateTree


@given(st.integers(0, 10_000), st.integers(1, 6), st.booleans())
def test_top_children_equal_a_stable_sort_of_the_full_log_softmax(seed: int, k: int, tied: bool) -> None:
    """Selecting first and normalising only the selected values gives the tree of the full log-softmax."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 6, generator=generator)
    if tied:
        logits = logits.round()  # many equal logits: the smaller token id comes first
    tokens, log_probs = top_children(logits, k)
    full = logits.double().log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(tokens, order)
    torch.testing.assert_close(log_probs.double(), full.gather(-1, order), rtol=0, atol=1e-6)


def test_top_children_of_uniform_logits_are_the_first_tokens() -> None:
    """All logits equal: ids 0, 1, 2 with log-probability -log V each, -log 8 here."""
    tokens, log_probs = top_children(torch.zeros(2, 8), 3)
    assert tokens.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(log_probs, torch.full((2, 3), -2.0794415))


def tree_of(scores: list[float], parents: list[int], depths: list[int], num_draft_nodes: int) -> CandidateTree:
    """Returns a one-row tree with the given nodes after the root."""
    width = len(scores) + 1
    score = torch.tensor([[0.0, *scores]])
    return CandidateTree(
        tokens=torch.arange(width).unsqueeze(0),
        parents=torch.tensor([[0, *parents]]),
        depths=torch.tensor([[0, *depths]]),
        log_probs=torch.zeros_like(score),
        scores=score,
        exists=torch.ones_like(score, dtype=torch.bool),
        expansions=torch.tensor([[0]]),
        num_draft_nodes=num_draft_nodes,
    )


def test_ties_keep_the_parent_of_a_child_with_probability_one() -> None:
    """Node 2's child 3 has probability 1 and so the same score -1; with N = 1 the shallower of the two stays."""
    packed = tree_of([-2.0, -1.0, -1.0], [0, 0, 2], [1, 1, 2], num_draft_nodes=1).pack()
    assert packed.tokens.tolist() == [[0, 2]]
    packed = tree_of([-2.0, -1.0, -1.0], [0, 0, 2], [1, 1, 2], num_draft_nodes=2).pack()
    assert packed.tokens.tolist() == [[0, 2, 3]]
    assert packed.parents.tolist() == [[0, 0, 1]]


def test_nodes_without_a_finite_score_are_never_packed() -> None:
    """NaN, -inf and +inf scores leave fewer nodes; padding is marked and points at the root."""
    tree = tree_of([-1.0, float("nan"), float("-inf"), float("inf")], [0, 0, 0, 0], [1, 1, 1, 1], num_draft_nodes=3)
    packed = tree.pack()
    assert packed.num_nodes.tolist() == [1]
    assert packed.exists.tolist() == [[True, True, False, False]]
    assert packed.parents.tolist() == [[0, 0, 0, 0]]
    assert packed.ancestor_mask()[0].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 12))
def test_ancestor_mask_equals_walking_up(seed: int, k: int, num_draft_nodes: int) -> None:
    """The doubling equals a plain walk from each node to the root."""
    policy = Budgeted(k=k, num_draft_nodes=min(num_draft_nodes, 4 * k))
    packed = policy.build(random_proposer(seed)).pack()
    mask = packed.ancestor_mask()
    for row in range(len(mask)):
        for node in range(mask.shape[1]):
            seen, at = {node}, node
            while packed.exists[row, node] and at != 0:
                at = int(packed.parents[row, at])
                seen.add(at)
            assert mask[row, node].nonzero().flatten().tolist() == sorted(seen)
