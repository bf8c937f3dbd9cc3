"""`BestFirst` by a cost profile: the size that pays most, smaller under load; without a stop where nodes are free."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.decoding.test_loop import target_of
from tests.policies.test_contract import paths
from tests.tables import TableProposer, random_proposer
from tests.tiny import tiny_drafter
from treespark.cost import CostModel
from treespark.decoding import decode_batch, decode_plain
from treespark.policies import BestFirst, parse

seeds = st.integers(0, 10_000)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Profiles: nodes are free; each costs its rows' compute, as on a busy machine; nothing but nodes costs."""
    folder = tmp_path_factory.mktemp("costs")
    batches, tokens = (1, 2, 4, 16, 64), (1, 9, 33)
    costs = {
        "free": lambda rows, count: 1.0,
        "load": lambda rows, count: max(1.0, 0.02 * rows * count),
        "dear": lambda rows, count: 1000.0 * count,
    }
    for name, cost in costs.items():
        table = [[[cost(rows, count)] for count in tokens] for rows in batches]
        CostModel.fit(batches, tokens, (128,), table, [[0.5] for _ in batches]).save(folder / f"{name}.json")
    return {name: str(folder / f"{name}.json") for name in costs}


def repeated(proposer: TableProposer, times: int) -> TableProposer:
    found = TableProposer(proposer.table.repeat(times, 1, 1, 1), proposer.root_tokens.repeat(times))
    found.num_requests = len(found.root_tokens)  # type: ignore[attr-defined]
    return found


@given(seed=seeds, rows=st.sampled_from([1, 2, 5]))
def test_keeps_the_size_of_most_tokens_per_second(files: dict[str, str], seed: int, rows: int) -> None:
    """Against trying every size: the N best nodes are those of no stop, cut where (1 + Σ mass) / seconds is highest.

    At that size a further node adds less than its cost at the present rate, and the last one added at least that.
    """
    proposer = repeated(random_proposer(seed), rows)
    batch = len(proposer.root_tokens)
    costs = CostModel.load(files["load"])
    whole = BestFirst(3, 32, a=1.2, b=-0.1).build(proposer).pack()
    found = BestFirst(3, 32, a=1.2, b=-0.1, cost=files["load"]).build(proposer).pack()
    for row in range(batch):
        ranked = sorted(paths(whole, row).items(), key=lambda item: -item[1])
        masses = [math.exp(score) for _, score in ranked]
        rates = [(1 + sum(masses[:n])) / costs.round_seconds(batch, n) for n in range(len(masses) + 1)]
        size = int(found.num_nodes[row])
        assert rates[size] == pytest.approx(max(rates), rel=1e-12)
        assert paths(found, row) == pytest.approx(dict(ranked[:size]))
        tokens, seconds = 1 + sum(masses[:size]), costs.round_seconds(batch, size)
        for n in range(size + 1, len(masses) + 1):
            gain, cost = sum(masses[size:n]), costs.round_seconds(batch, n) - seconds
            assert gain <= cost * tokens / seconds * (1 + 1e-9)


@given(seed=seeds)
def test_trees_shrink_as_the_load_grows(files: dict[str, str], seed: int) -> None:
    """The same row among 1, 2, 4, 16 and 64 others: never more nodes, and in the end fewer than alone."""
    proposer = random_proposer(seed)
    one = TableProposer(proposer.table[:1], proposer.root_tokens[:1])
    policy = BestFirst(3, 32, cost=files["load"])
    sizes = [int(policy.build(repeated(one, rows)).pack().num_nodes[0]) for rows in (1, 2, 4, 16, 64)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0]


@given(seed=seeds)
def test_anchors_side_by_side_are_no_load(files: dict[str, str], seed: int) -> None:
    """In training and simulation rows are anchors: each gets the tree that it gets alone, whatever the chunk."""
    proposer, policy = random_proposer(seed), BestFirst(3, 32, cost=files["load"])
    whole = policy.build(proposer).pack()
    for row in range(len(proposer.root_tokens)):
        part = slice(row, row + 1)
        alone = policy.build(TableProposer(proposer.table[part], proposer.root_tokens[part])).pack()
        assert paths(alone, 0) == paths(whole, row)


@given(seed=seeds)
def test_the_ends_are_no_stop_and_no_tree(files: dict[str, str], seed: int) -> None:
    """Free nodes: the whole N-node tree, which is the identity setting. Nodes that cost a thousand rounds: none."""
    proposer = random_proposer(seed)
    free, plain = (BestFirst(3, 32, cost=cost).build(proposer).pack() for cost in (files["free"], None))
    assert torch.equal(free.tokens, plain.tokens) and torch.equal(free.parents, plain.parents)
    assert BestFirst(3, 32, cost=files["dear"]).build(proposer).pack().num_nodes.tolist() == [0, 0, 0]


def test_decodes_the_plain_text_with_trees_of_the_loads_size(files: dict[str, str]) -> None:
    target = target_of("llama")
    prompts = [[1, 2, 3], [5], [9, 8, 7, 6], [4, 4]]
    policy = BestFirst(3, 24, cost=files["load"])
    results = decode_batch(
        target, tiny_drafter(target), prompts, policy=policy, max_new_tokens=10, end_token_ids=[], max_batch_size=3
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == decode_plain(target, prompt, max_new_tokens=10, end_token_ids=[]).tokens
    again = parse(repr(policy))
    assert again.config() == policy.config() and isinstance(again, BestFirst) and again.cost == files["load"]


def test_impossible_profiles_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        BestFirst(theta=0.1, cost=files["load"])
    with pytest.raises(FileNotFoundError, match="no such cost profile"):
        BestFirst(cost=str(tmp_path / "none.json")).check(depths=4, vocab_size=64)
