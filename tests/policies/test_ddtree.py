"""`DDTree` against enumeration, against trees that its own builder gave, and its identity settings."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.policies.test_contract import paths
from tests.tables import TableProposer
from treespark.policies import Budgeted, Chain, DDTree, TreePolicy

GOLDEN = Path(os.environ.get("TREESPARK_GOLDEN") or Path(__file__).parents[3] / "shared" / "golden")


def uncorrected(logits: Tensor) -> TableProposer:
    """Returns a proposer of logits [M, K, V] whose depths do not depend on the parent."""
    table = logits.unsqueeze(2).expand(-1, -1, logits.shape[-1], -1)
    return TableProposer(table, torch.zeros(len(logits), dtype=torch.long))


def random_logits(seed: int, rows: int = 2, depths: int = 3, vocab: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(rows, depths, vocab, generator=generator, dtype=torch.float64)


@given(st.integers(0, 10_000), st.integers(1, 155))
def test_equals_enumeration(seed: int, num_nodes: int) -> None:
    """All 5 + 25 + 125 paths with the sums of their depths' log-probabilities: the N largest are packed."""
    logits = random_logits(seed)
    policy = DDTree(num_nodes)
    policy.check(3, 5)
    packed = policy.build(uncorrected(logits)).pack()
    for row, depths in enumerate(logits.log_softmax(-1).tolist()):
        full = [path for size in (1, 2, 3) for path in itertools.product(range(5), repeat=size)]
        score = {path: sum(depths[d][token] for d, token in enumerate(path)) for path in full}
        assert set(paths(packed, row)) == set(sorted(full, key=lambda path: (-score[path], len(path)))[:num_nodes])


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 12))
def test_is_a_wide_budgeted_tree_where_nothing_depends_on_the_parent(seed: int, k: int, num_nodes: int) -> None:
    proposer = uncorrected(random_logits(seed))
    num_nodes = min(num_nodes, 3 if k == 1 else 14)
    same = Budgeted(k, num_nodes, frontier_width=num_nodes)
    mine, other = DDTree(num_nodes, k).build(proposer).pack(), same.build(proposer).pack()
    for row in range(2):
        assert paths(mine, row) == pytest.approx(paths(other, row))


@pytest.mark.parametrize("policy", [DDTree(num_draft_nodes=3, k=1), Budgeted(k=1, num_draft_nodes=3)], ids=repr)
def test_one_child_is_the_chain_there(policy: TreePolicy) -> None:
    proposer = uncorrected(random_logits(0))
    mine, chain = policy.build(proposer).pack(), Chain().build(proposer).pack()
    assert torch.equal(mine.tokens, chain.tokens) and torch.equal(mine.parents, chain.parents)


def test_ties_go_to_the_smaller_depth_then_to_the_order() -> None:
    """Uniform over two tokens, float32: nodes 0, 1 (log 1/2 each), then 00, 01, 10, 11; five of the six are packed."""
    packed = DDTree(num_draft_nodes=5).build(uncorrected(torch.zeros(1, 2, 2))).pack()
    assert list(paths(packed, 0)) == [(0,), (1,), (0, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize("num_nodes", [1, 8, 32])
def test_equals_the_trees_of_ddtree_s_own_builder(num_nodes: int) -> None:
    """The published builder takes the best node first: its order is ours by decreasing score."""
    file = GOLDEN / "ddtree.safetensors"
    if not file.is_file():
        pytest.skip(f"no trees of DDTree's own builder at {file}; set TREESPARK_GOLDEN to their folder")
    from safetensors.torch import load_file

    golden = load_file(file)
    packed = DDTree(num_nodes).build(uncorrected(golden["draft_logits"].unsqueeze(0))).pack()
    order = packed.scores[0, 1:].sort(descending=True, stable=True).indices + 1
    place = torch.zeros(num_nodes + 1, dtype=torch.long).scatter_(0, order, torch.arange(1, num_nodes + 1))
    assert torch.equal(packed.tokens[0, order], golden[f"tokens_{num_nodes}"])
    assert torch.equal(packed.depths[0, order], golden[f"depths_{num_nodes}"])
    assert torch.equal(place[packed.parents[0, order]], golden[f"parents_{num_nodes}"])
    both = torch.cat([torch.zeros(1, dtype=torch.long), order])
    assert torch.equal(packed.ancestor_mask()[0][both][:, both], golden[f"visibility_{num_nodes}"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_draft_nodes": 0}, "num_draft_nodes >= 1, got 0"),
        ({"k": 0}, "k >= 1, got 0"),
        ({"k": 5}, "exceeds the vocabulary of 4"),
        ({"k": 2, "num_draft_nodes": 15}, "choose 1 to 14"),
    ],
)
def test_options_out_of_range(options: dict[str, int], words: str) -> None:
    """2 + 4 + 8 = 14 nodes in three depths of two children."""
    with pytest.raises(ValueError, match=words):
        DDTree(**options).check(depths=3, vocab_size=4)
