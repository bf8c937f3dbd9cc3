"""The cost model: monotone, exact at what was measured, linear between, and itself again after a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treespark.cost import CostModel

BATCHES, TOKENS, LENGTHS = (1, 4, 12), (1, 8, 33), (64, 256)
seconds = st.floats(0.001, 10.0)


def bound_by_compute(batch: int, tokens: int, length: int) -> float:
    """Reading the weights takes 1, a row of tokens 0.1, and 256 positions as much as a row: the larger counts."""
    return max(1.0, 0.1 * batch * tokens) + 0.1 * batch * length / 256


def model() -> CostModel:
    table = [[[bound_by_compute(b, n, c) for c in LENGTHS] for n in TOKENS] for b in BATCHES]
    return CostModel.fit(BATCHES, TOKENS, LENGTHS, table, [[0.2 * b] * 2 for b in BATCHES], {"device": "cpu"})


def test_measured_points_are_kept_and_what_lies_between_is_linear() -> None:
    """Tokens 8 and 33 at batch 4, context 256: 3.2 + 0.4 and 13.2 + 0.4; half way, at 20.5, stands 8.6.

    Integers: at 13, a fifth of the way, 3.6 + 2 = 5.6. Beyond 33 it goes on by 0.4 a token.
    """
    costs = model()
    for b in BATCHES:
        for n in TOKENS:
            for c in LENGTHS:
                assert costs.target_seconds(b, n, c) == pytest.approx(bound_by_compute(b, n, c))
    assert costs.target_seconds(4, 13, 256) == pytest.approx(5.6)
    assert costs.target_seconds(4, 43, 256) == pytest.approx(17.6)
    assert costs.target_seconds(1, 1, 8) == costs.target_seconds(1, 1, 64)
    # No length: the middle of the grid, of two the longer.
    assert costs.target_seconds(4, 8) == costs.target_seconds(4, 8, 256)


def test_speedup_is_the_machines_limit() -> None:
    """tau 4 at batch 1, 32 nodes, context 256: t(1) = 1.1, t(33) = 3.4, drafting 0.2; 4 * 1.1 / 3.6."""
    costs = model()
    assert costs.round_seconds(1, 32, 256) == pytest.approx(3.6)
    assert costs.speedup(4.0, 1, 32, 256) == pytest.approx(4.4 / 3.6)


@given(st.lists(seconds, min_size=18, max_size=18), st.lists(seconds, min_size=6, max_size=6))
def test_more_never_costs_less(values: list[float], draft: list[float]) -> None:
    """Whatever was measured: along every direction, at and between the points."""
    table = [[values[6 * b + 2 * n : 6 * b + 2 * n + 2] for n in range(3)] for b in range(3)]
    costs = CostModel.fit(BATCHES, TOKENS, LENGTHS, table, [draft[2 * b : 2 * b + 2] for b in range(3)])
    for batch, next_batch in ((1, 3), (3, 4), (4, 9), (9, 12)):
        for tokens, more in ((1, 5), (5, 8), (8, 30), (30, 33), (33, 50)):
            for length, longer in ((10, 64), (64, 100), (100, 256)):
                at = costs.target_seconds(batch, tokens, length)
                assert costs.target_seconds(next_batch, tokens, length) >= at - 1e-9
                assert costs.target_seconds(batch, more, length) >= at - 1e-9
                assert costs.target_seconds(batch, tokens, longer) >= at - 1e-9
                assert costs.draft_seconds(next_batch, longer) >= costs.draft_seconds(batch, length) - 1e-9


def test_falling_neighbours_are_averaged() -> None:
    """3, 1 and 5 become 2, 2 and 5: the nearest values that do not fall."""
    costs = CostModel.fit((1,), (1, 2, 3), (8,), [[[3.0], [1.0], [5.0]]], [[0.0]])
    assert [costs.target_seconds(1, n) for n in (1, 2, 3)] == [2.0, 2.0, 5.0]


def test_a_saved_profile_is_the_same(tmp_path: Path) -> None:
    """It is the same again, from a folder that saving made."""
    file = tmp_path / "new" / "costs.json"
    model().save(file)
    assert CostModel.load(file) == model()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "target": 3}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="not a cost profile"):
        CostModel.load(tmp_path / "costs.json")
    with pytest.raises(FileNotFoundError, match="bench --profile"):
        CostModel.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("grid", "words"),
    [(((1,), (8, 1), (64,)), r"ascending tokens, got \[8, 1\]"), (((1, 2), (1,), (64,)), "one number for each")],
)
def test_grids_that_do_not_fit_are_refused(grid: tuple[tuple[int, ...], ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CostModel(*grid, target=(((1.0,),),), draft=((1.0,),))
