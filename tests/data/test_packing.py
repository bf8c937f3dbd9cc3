"""Packed rows: nothing lost, nothing doubled, the same on any number of workers and processes; budgets of anchors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_loader import Step, data, ids, loader, same
from treespark.data import Sample, eligible_anchors
from treespark.data.packing import Packing, best_fit, share_anchors

LENGTH = 20


def test_best_fit_by_hand() -> None:
    """Room 10: 6 opens row 0, 5 row 1, 4 fills row 0, 3 goes to row 1, 2 fills it, 1 opens row 2."""
    assert best_fit([6, 5, 4, 3, 2, 1], 10) == [[0, 2], [1, 3, 4], [5]]


def plain_best_fit(lengths: list[int], room: int) -> list[int]:
    """The rows' tokens, by searching all rows for the fullest that has room."""
    sizes: list[int] = []
    for length in lengths:
        fitting = [size for size in sizes if size + length <= room]
        if fitting:
            sizes[sizes.index(max(fitting))] += length
        else:
            sizes.append(length)
    return sorted(sizes)


lengths = st.lists(st.integers(1, LENGTH), min_size=1, max_size=60)


@settings(deadline=None)
@given(lengths, st.integers(0, 3), st.integers(0, 3))
def test_every_document_once_in_rows_that_fit(documents: list[int], seed: int, epoch: int) -> None:
    """Against the search over all rows; no two rows would fit into one, and each epoch has as many rows."""
    packing = Packing(documents, LENGTH)
    rows = packing.rows(seed, epoch)
    assert sorted(i for row in rows for i in row) == list(range(len(documents)))
    sizes = sorted(sum(documents[i] for i in row) for row in rows)
    assert sizes == plain_best_fit(sorted(documents, reverse=True), LENGTH)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > LENGTH
    assert len(rows) == packing.num_rows == len(packing.rows(seed, epoch + 1))
    assert rows == Packing(documents, LENGTH).rows(seed, epoch)


def test_epochs_differ_in_rows_and_order() -> None:
    """Forty documents of four lengths: which of them share a row, and when it comes, is drawn anew."""
    packing = Packing([5, 6, 7, 8] * 10, LENGTH)
    first, second, other = packing.rows(0, 0), packing.rows(0, 1), packing.rows(1, 0)
    assert first != second and first != other
    assert {frozenset(row) for row in first} != {frozenset(row) for row in second}


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="21 tokens does not fit into a row of 20"):
        Packing([3, 21], LENGTH)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(0, 800))
def test_shares_are_exact_and_proportional(eligible: list[int], budget: int) -> None:
    """The shares sum to the budget or to all there is, and each is its exact quota rounded down or up."""
    shares, total = share_anchors(eligible, budget), sum(eligible)
    assert sum(shares) == min(budget, total)
    for share, number in zip(shares, eligible, strict=True):
        quota = min(1.0, budget / max(total, 1)) * number
        assert share <= number and quota - 1 < share < quota + 1


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5)


@given(spans)
def test_eligible_positions_are_counted_from_the_spans(gaps: list[tuple[int, int]]) -> None:
    """Spans by their gap to the one before (0: they touch) and length: as counted position by position."""
    found, at = [], 0
    for gap, size in gaps:
        found.append((at + gap, at + gap + size))
        at += gap + size
    mask = torch.zeros(at + 2, dtype=torch.bool)
    for start, stop in found:
        mask[start:stop] = True
    expected = int(eligible_anchors(mask, torch.zeros_like(mask, dtype=torch.long)).sum())
    assert Sample(torch.zeros(at + 2, dtype=torch.int32), tuple(found), True, "x").num_eligible == expected


@pytest.mark.parametrize(("stop", "num_workers"), [(1, 0), (3, 0), (5, 2)])
def test_a_packed_epoch_resumes_exactly(stop: int, num_workers: int) -> None:
    """Two epochs of 6 steps straight = `stop` steps, state, a new loader, the rest. A budget of 7 anchors a step."""
    options = {"count": 23, "pack_length": LENGTH, "anchors_per_step": 7}
    straight = [*(whole := loader(**options)), *whole]
    assert len(straight) == 2 * len(whole) == 12
    first = loader(**options, num_workers=num_workers)
    seen = [batch for _, batch in zip(range(stop), first, strict=False)]
    second = loader(**options, num_workers=num_workers)
    second.load_state_dict(first.state_dict())
    while len(seen) < len(straight):
        seen += list(second)
    assert same(seen, straight)


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_a_packed_epoch(world: int) -> None:
    """Each step's documents are those of one process with as many rows; tokens differ by less than a row a step.

    The anchors of each document are the same as well, also where a budget is shared out over all processes.
    """
    options = {"count": 40, "pack_length": LENGTH, "anchors_per_step": 9}
    ranks = [list(loader(**options, rank=r, world_size=world, micro_batches=2)) for r in range(world)]
    one = list(loader(**options, micro_batches=2 * world))
    assert {len(rank) for rank in ranks} == {len(one)}
    for step, joint in enumerate(one):
        parts = [rank[step] for rank in ranks]
        assert len({len(part) for part in parts}) == 1
        assert sorted(i for part in parts for i in ids(part)) == sorted(ids(joint))
        # The last step of an epoch may hold fewer rows than processes.
        tokens = [sum(int((m.document_ids >= 0)[m.sample_ids >= 0].sum()) for m in part) for part in parts]
        assert max(tokens) - min(tokens) <= LENGTH
        anchors = [int(m.anchor_mask.sum()) for part in parts for m in part]
        assert sum(anchors) == sum(int(m.anchor_mask.sum()) for m in joint) == 9
    assert sorted(i for rank in ranks for step in rank for i in ids(step)) == list(range(40))


def drawn(batches: list[Step]) -> dict[int, list[int]]:
    """Anchors of each sample, as positions inside its document."""
    found = {}
    for micro in (micro for step in batches for micro in step):
        for row, document in (micro.document_samples >= 0).nonzero().tolist():
            at = micro.anchors[row][micro.anchor_mask[row]]
            at = at[micro.document_ids[row, at] == document]
            found[int(micro.document_samples[row, document])] = micro.position_ids[row, at].tolist()
    return found


def test_packing_changes_no_documents_anchors_or_tokens() -> None:
    """`num_anchors` counts per document: the same draws, packed and one document a row."""
    samples = data(30)
    packed, plain = list(loader(30, pack_length=LENGTH)), list(loader(30))
    assert len(packed) < len(plain)
    assert drawn(packed) == drawn(plain) and len(drawn(plain)) == 30
    for micro in (micro for step in packed for micro in step):
        inside = micro.document_ids >= 0
        owner = micro.document_samples.gather(1, micro.document_ids.clamp(min=0))
        rows = micro.sample_ids >= 0
        assert torch.equal(micro.input_ids[rows][inside[rows]], owner[rows][inside[rows]])  # sample i holds tokens i
        sizes = [sum(len(samples[i]) for i in row if i >= 0) for row in micro.document_samples[rows].tolist()]
        assert inside.sum(1)[rows].tolist() == sizes


def test_a_budget_larger_than_all_takes_every_position() -> None:
    for step in loader(9, anchors_per_step=1000):
        for micro in step:
            eligible = eligible_anchors(micro.loss_mask, micro.document_ids)
            assert int(micro.anchor_mask.sum()) == int(eligible.sum())


def test_state_of_another_packing_is_refused_inside_an_epoch() -> None:
    """At an epoch's start nothing depends on it; after a step the rest of the rows does."""
    packed = loader(23, pack_length=LENGTH)
    loader(23).load_state_dict(packed.state_dict())
    next(iter(packed))
    with pytest.raises(ValueError, match=r"pack_length 20 \(\d+ rows\); it is none \(23 rows\)"):
        loader(23).load_state_dict(packed.state_dict())
    with pytest.raises(ValueError, match="anchors_per_step must be at least 1"):
        loader(anchors_per_step=0)
