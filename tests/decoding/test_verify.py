"""The walk and the tree mask against a reading node by node."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.fakes import FakeProposer
from treespark.decoding.verify import judged_edges, root_tree, tree_attention_mask, trim, walk
from treespark.policies import Budgeted
from treespark.tree import PackedTree


def random_packed(seed: int, rows: int = 3, k: int = 3, nodes: int = 24, vocab: int = 6, depths: int = 4) -> PackedTree:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, depths, vocab, generator=generator, dtype=torch.float64)
    # Some tokens cannot be drafted, so that some rows pack fewer nodes than others.
    logits[torch.rand(logits.shape, generator=generator) < 0.5] = -torch.inf
    logits[:, :, 0] = 0.0
    table = torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
    proposer = FakeProposer(logits, table, torch.zeros(rows, dtype=torch.long))
    return Budgeted(k=k, num_draft_nodes=nodes).build(proposer).pack()


def walk_by_hand(packed: PackedTree, choices: torch.Tensor, row: int) -> list[int]:
    path, here = [0], 0
    while True:
        wanted = int(choices[row, here])
        children = [
            node
            for node in range(1, int(packed.num_nodes[row]) + 1)
            if int(packed.parents[row, node]) == here and int(packed.tokens[row, node]) == wanted
        ]
        if not children:
            return path
        (here,) = children
        path.append(here)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), likely=st.floats(0.0, 1.0))
def test_walk_equals_a_walk_node_by_node(seed: int, likely: float) -> None:
    """Choices that often name one of the node's children give walks of every length."""
    packed = random_packed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    choices = torch.randint(0, 6, packed.tokens.shape, generator=generator)
    for row in range(len(choices)):
        for node in range(int(packed.num_nodes[row]), 0, -1):
            if float(torch.rand((), generator=generator)) < likely:
                choices[row, packed.parents[row, node]] = packed.tokens[row, node]
    result = walk(packed, choices)
    for row in range(len(choices)):
        path = walk_by_hand(packed, choices, row)
        assert torch.nonzero(result.accepted[row])[:, 0].tolist() == path
        assert int(result.num_accepted[row]) == len(path) - 1


def test_padding_is_never_accepted() -> None:
    """Padding has token 0 and parent 0; a choice of token 0 at a root without children accepts nothing."""
    packed = random_packed(0, nodes=30)
    bare = root_tree(torch.zeros(3, 1, dtype=torch.long))
    assert walk(bare, torch.zeros(3, 1, dtype=torch.long)).num_accepted.tolist() == [0, 0, 0]
    assert bool((~packed.exists).any())
    accepted = walk(packed, torch.zeros_like(packed.tokens)).accepted
    assert not bool((accepted & ~packed.exists).any())


def test_trim_drops_padding_only() -> None:
    packed = random_packed(1, nodes=30)
    width = int(packed.num_nodes.max())
    trimmed = trim(packed, width)
    assert trimmed.tokens.shape[1] == width + 1
    assert trimmed.exists.sum() == packed.exists.sum()


def test_tree_mask_of_a_fork() -> None:
    """Two committed positions, root 0, its children 1 and 2, and 3 below 1: 3 sees the prefix, 0, 1 and itself."""
    ancestors = torch.zeros(1, 4, 4, dtype=torch.bool)
    for node, path in enumerate([[0], [0, 1], [0, 2], [0, 1, 3]]):
        ancestors[0, node, path] = True
    mask = tree_attention_mask(ancestors, prefix=2)
    assert mask.shape == (1, 4, 6)
    assert mask[0, 3].tolist() == [True, True, True, True, False, True]
    assert mask[0, 2].tolist() == [True, True, True, False, True, False]


def test_tree_mask_of_a_shorter_text() -> None:
    """Of three cached positions the row's text fills one: its nodes do not look at the others."""
    ancestors = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    mask = tree_attention_mask(ancestors, 3, torch.tensor([[[True, False, False]]]))
    assert mask.int().tolist() == [[[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]]


@given(seed=st.integers(0, 10_000))
def test_judged_edges_are_those_below_accepted_nodes(seed: int) -> None:
    """Node by node: an edge counts when its parent lies on the walk, and its verdict is whether its child does."""
    packed = random_packed(seed)
    choices = torch.randint(0, 2, packed.tokens.shape, generator=torch.Generator().manual_seed(seed))
    expected = []
    for row in range(len(choices)):
        path = walk_by_hand(packed, choices, row)
        for node in range(1, int(packed.num_nodes[row]) + 1):
            if int(packed.parents[row, node]) in path:
                expected.append((float(packed.log_probs[row, node]), node in path))
    log_probs, verdicts = judged_edges(packed, walk(packed, choices).accepted)
    assert list(zip(log_probs.tolist(), verdicts.tolist(), strict=True)) == expected
