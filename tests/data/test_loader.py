"""Loaders: the same batches after a resume, with workers, and on several processes."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest
import torch

from treespark.data import BatchLoader, MicroBatch, Sample, TrainLoader

Step = list[MicroBatch]


def data(count: int) -> list[Sample]:
    lengths = [4 + (7 * i) % 11 for i in range(count)]
    return [Sample(torch.full((n,), i, dtype=torch.int32), ((2, n),), True, f"x:{i}") for i, n in enumerate(lengths)]


def loader(count: int = 11, **options: Any) -> TrainLoader:
    return TrainLoader(data(count), data_hash="a", **({"num_anchors": 3, "batch_size": 2, "seed": 5} | options))


def same(a: list[Step], b: list[Step]) -> bool:
    return len(a) == len(b) and all(
        len(x) == len(y)
        and all(
            torch.equal(getattr(m, f.name), getattr(n, f.name)) for m, n in zip(x, y, strict=True) for f in fields(m)
        )
        for x, y in zip(a, b, strict=True)
    )


def ids(step: Step) -> list[int]:
    return [i for micro in step for i in micro.document_samples.flatten().tolist() if i >= 0]


def test_an_epoch_sees_each_sample_once_and_the_next_one_in_another_order() -> None:
    """11 samples in steps of 2 x 2: 3 steps of 4, 4 and 3."""
    made = loader(micro_batches=2)
    first, second = list(made), list(made)
    assert len(made) == len(first) == 3 and [len(ids(step)) for step in first] == [4, 4, 3]
    order = [[i for step in epoch for i in ids(step)] for epoch in (first, second)]
    assert sorted(order[0]) == sorted(order[1]) == list(range(11)) and order[0] != order[1]


@pytest.mark.parametrize(("stop", "num_workers"), [(1, 0), (2, 0), (3, 0), (6, 0), (7, 0), (3, 2)])
def test_resume_is_exact(stop: int, num_workers: int) -> None:
    """Two epochs of 6 steps straight = `stop` steps, state, a new loader, the rest; workers prefetch past the state."""
    straight = [*(whole := loader()), *whole]
    first = loader(num_workers=num_workers)
    seen: list[Step] = []
    state = first.state_dict()
    while len(seen) < stop:
        for step in first:
            seen.append(step)
            state = first.state_dict()
            if len(seen) == stop:
                break
    second = loader(num_workers=num_workers)
    second.load_state_dict(state)
    while len(seen) < 12:
        seen += list(second)
    assert same(seen, straight)


def test_workers_change_nothing() -> None:
    assert same(list(loader()), list(loader(num_workers=2)))


@pytest.mark.parametrize(("world", "count"), [(2, 11), (3, 11), (4, 9), (4, 2)])
def test_processes_share_an_epoch(world: int, count: int) -> None:
    """Every process has as many steps and micro-batches; together they see each sample once.

    Step by step they see what one process with as many samples a step sees.
    """
    ranks = [list(loader(count, rank=r, world_size=world, micro_batches=2)) for r in range(world)]
    one = list(loader(count, micro_batches=2 * world))
    for step, joint in enumerate(one):
        assert len({len(rank[step]) for rank in ranks}) == 1
        assert sorted(i for rank in ranks for i in ids(rank[step])) == sorted(ids(joint))
    assert {len(rank) for rank in ranks} == {len(one)}
    assert sorted(i for rank in ranks for step in rank for i in ids(step)) == list(range(count))


def test_anchors_do_not_depend_on_the_number_of_processes() -> None:
    def anchors(steps: list[Step]) -> dict[int, list[int]]:
        return {
            int(micro.sample_ids[r]): micro.anchors[r][micro.anchor_mask[r]].tolist()
            for step in steps
            for micro in step
            for r in range(len(micro.sample_ids))
            if micro.sample_ids[r] >= 0
        }

    split: dict[int, list[int]] = {}
    for r in range(3):
        split |= anchors(list(loader(rank=r, world_size=3)))
    assert split == anchors(list(loader()))


def test_a_pass_left_early_is_over() -> None:
    """Left after one step, the next pass is epoch 1 from its start; a pass that was only opened is not."""
    left, whole = loader(), loader()
    iter(left)
    next(iter(left))
    list(whole)
    assert same(list(left), list(whole)) and left.epoch == 2


def test_evaluation_is_in_file_order_with_the_same_anchors_each_time() -> None:
    made = BatchLoader(data(5), num_anchors=3, batch_size=2)
    first, second = list(made), list(made)
    assert [ids(step) for step in first] == [[0, 1], [2, 3], [4]] and same(first, second)
    assert all(len(step) == 1 for step in first) and not hasattr(made, "state_dict")


def test_state_of_other_data_is_refused_and_other_step_sizes_are_said(caplog: pytest.LogCaptureFixture) -> None:
    made = loader()
    steps = iter(made)
    for _ in range(3):
        next(steps)
    state = made.state_dict()
    assert state["num_seen"] == 6
    with pytest.raises(ValueError, match="written with other training data"):
        loader(10).load_state_dict(state)
    other = loader(batch_size=4, seed=6)
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(state)
    assert "2 rows are seen again" in caplog.text and "data seed 5 instead of 6" in caplog.text
    assert len(list(other)) == 2 and other.seed == 5


@pytest.mark.parametrize(
    "options", [{"num_anchors": 0}, {"batch_size": 0}, {"micro_batches": 0}, {"rank": 2, "world_size": 2}]
)
def test_numbers_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        loader(**options)
