"""Comparison with plain decoding: only the first difference counts."""

from __future__ import annotations

import pytest

from treespark.decoding import Comparison, DecodeResult, compare_outputs


def result(tokens: list[int], gaps: list[float] | None = None) -> DecodeResult:
    return DecodeResult(tokens, [], "length", gaps=gaps)


def test_same_text() -> None:
    assert compare_outputs(result([4, 5], [1.0, 1.0]), result([4, 5])) == Comparison(True, 2)


def test_first_difference_at_a_near_tie() -> None:
    """Texts differ at 1 and 3: index 1 counts, where plain decoding's best two are 5e-4 apart; 2 tokens compared."""
    comparison = compare_outputs(result([4, 5, 6, 7], [1.0, 5e-4, 1.0, 1.0]), result([4, 9, 6, 8]))
    assert comparison == Comparison(False, 2, 1, 5e-4, True)


def test_difference_without_a_near_tie() -> None:
    assert not compare_outputs(result([4], [0.5]), result([5])).near_tie


def test_other_length_is_a_difference() -> None:
    """[4] against [4, 5] with equal stop rules: one of them stopped wrongly."""
    assert compare_outputs(result([4, 5], [1.0, 1e-6]), result([4])) == Comparison(False, 1, 1)


def test_gaps_are_needed() -> None:
    with pytest.raises(ValueError, match="decode_plain"):
        compare_outputs(result([4]), result([4]))
