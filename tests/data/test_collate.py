"""Micro-batches and anchors: boundaries, padding, and draws that depend on the sample alone."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treespark.data import MicroBatch, Sample, collate, eligible_anchors, sample_anchors


def sample(length: int, *spans: tuple[int, int], own: bool = False) -> Sample:
    return Sample(torch.arange(10, 10 + length, dtype=torch.int32), spans, own, "x:1")


def batch(*rows: list[Sample], num_anchors: int = 8, epoch: int = 0) -> MicroBatch:
    count = itertools.count()
    return collate(rows, [[next(count) for _ in row] for row in rows], num_anchors=num_anchors, seed=0, epoch=epoch)


def test_documents_of_lengths_5_and_9() -> None:
    """Spans 2..4 of the first and 3..8 of the second document, which starts at 5.

    Anchors t need t and t+1 supervised in one document: 2, 3; then 8..12. The last token of each document is none.
    """
    made = batch([sample(5, (2, 5)), sample(9, (3, 9), own=True)])
    assert made.document_ids.tolist() == [[0] * 5 + [1] * 9]
    assert made.position_ids.tolist() == [[*range(5), *range(9)]]
    assert made.loss_mask[0].nonzero().flatten().tolist() == [2, 3, 4, 8, 9, 10, 11, 12, 13]
    assert made.anchors[made.anchor_mask].tolist() == [2, 3, 8, 9, 10, 11, 12]
    assert made.prompt_lengths.tolist() == [8] and made.own_text.tolist() == [True]


def test_supervised_neighbours_of_two_documents_make_no_anchor() -> None:
    """Document 0 ends supervised and document 1 starts supervised: position 3 would pair across the boundary."""
    made = batch([sample(4, (2, 4)), sample(4, (0, 2))])
    assert made.anchors[made.anchor_mask].tolist() == [2, 4]


def test_padding_is_on_the_right_and_invisible() -> None:
    made = batch([sample(3, (1, 3))], [sample(6, (2, 6), own=True)])
    assert made.input_ids.tolist() == [[10, 11, 12, 0, 0, 0], [10, 11, 12, 13, 14, 15]]
    assert made.attention_mask.tolist() == [[True] * 3 + [False] * 3, [True] * 6]
    assert made.document_ids[0].tolist() == [0, 0, 0, -1, -1, -1]
    assert made.anchors.tolist() == [[1, 0, 0], [2, 3, 4]]
    assert made.anchor_mask.tolist() == [[True, False, False], [True, True, True]]
    assert made.own_text.tolist() == [False, True]


def test_rows_without_an_anchor_raise_nothing() -> None:
    """An answer of one token, and a row that only pads: all-False anchor masks."""
    made = batch([sample(4, (3, 4))], [])
    assert not made.anchor_mask.any() and made.anchors.shape == (2, 1)
    assert made.attention_mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert not made.loss_mask[1].any()


def test_moving_gives_a_batch() -> None:
    made = batch([sample(4, (1, 4))]).to("cpu")
    assert isinstance(made, MicroBatch) and made.input_ids.dtype == torch.long and made.loss_mask.dtype == torch.bool


rows = st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=40)


@settings(deadline=None)
@given(rows, st.integers(1, 50), st.integers(0, 3), st.integers(0, 3))
def test_anchors_are_eligible_distinct_ascending(
    row: list[tuple[bool, int]], num_anchors: int, epoch: int, sample_id: int
) -> None:
    """Against the definition, position by position."""
    mask = torch.tensor([m for m, _ in row])
    documents = torch.tensor([d for _, d in row])
    eligible = eligible_anchors(mask, documents)
    expected = [t for t in range(len(row) - 1) if row[t][0] and row[t + 1][0] and row[t][1] == row[t + 1][1]]
    assert eligible.nonzero().flatten().tolist() == expected
    drawn = sample_anchors(eligible, num_anchors, 0, epoch, sample_id).tolist()
    assert drawn == sorted(set(drawn)) and set(drawn) <= set(expected)
    assert len(drawn) == min(num_anchors, len(expected))


@settings(deadline=None)
@given(st.lists(st.integers(4, 20), min_size=1, max_size=5), st.integers(1, 6), st.randoms())
def test_draws_do_not_depend_on_the_batch(lengths: list[int], num_anchors: int, random: object) -> None:
    """Any order of rows, any padding: each sample keeps its anchors."""
    samples = [sample(n, (1, n)) for n in lengths]
    order = list(range(len(samples)))
    random.shuffle(order)  # type: ignore[attr-defined]
    made = collate([[samples[i]] for i in order], [[i] for i in order], num_anchors=num_anchors, seed=3, epoch=1)
    for row, i in enumerate(order):
        alone = collate([[samples[i]]], [[i]], num_anchors=num_anchors, seed=3, epoch=1)
        assert made.anchors[row][made.anchor_mask[row]].tolist() == alone.anchors[alone.anchor_mask].tolist()


def test_draws_change_with_seed_epoch_and_sample() -> None:
    eligible = torch.ones(1000, dtype=torch.bool)
    draws = [tuple(sample_anchors(eligible, 5, *key).tolist()) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert len(set(draws)) == 4


def test_draws_are_uniform() -> None:
    """4 of 8 positions over 4,000 samples: each is drawn half of the time; 5 deviations are 5 * sqrt(1000) = 158."""
    counts = torch.zeros(8)
    for i in range(4000):
        counts[sample_anchors(torch.ones(8, dtype=torch.bool), 4, 0, 0, i)] += 1
    assert (counts - 2000).abs().max() < 158
