"""Stop rules: derived by hand and against a token-by-token reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treespark.decoding import Round, StopRules


def test_end_token_inside_the_path_drops_what_follows() -> None:
    """Accepted [5, 2, 7] + bonus 8 with end token 2: [5, 2] stands; 7 and the bonus are gone, and so is its count."""
    rules = StopRules.of([2, 3], 10)
    kept = rules.cut([5, 2, 7, 8], 0)
    assert kept == [5, 2]
    assert Round.of(3, len(kept)) == Round(num_accepted=2, committed=2, has_bonus=False)
    assert rules.finish_reason(kept) == "stop"


def test_end_token_as_bonus_keeps_the_bonus() -> None:
    """Accepted [5] + bonus 2: nothing is cut, the bonus is committed and ends the answer."""
    kept = StopRules.of(2, 10).cut([5, 2], 0)
    assert Round.of(1, len(kept)) == Round(num_accepted=1, committed=2, has_bonus=True)


def test_limit_cuts_the_path() -> None:
    """Limit 4 with 2 tokens standing leaves room for 2 of [5, 6, 7]: both accepted, no bonus."""
    rules = StopRules.of([], 4)
    kept = rules.cut([5, 6, 7], 2)
    assert kept == [5, 6]
    assert Round.of(2, len(kept)) == Round(num_accepted=2, committed=2, has_bonus=False)
    assert rules.finish_reason([0, 0, 5, 6]) == "length"


def test_end_token_at_the_limit_is_a_stop() -> None:
    rules = StopRules.of([2], 1)
    assert rules.finish_reason([2]) == "stop"
    assert rules.finish_reason([3]) == "length"
    assert StopRules.of([2], 0).finish_reason([]) == "length"
    assert StopRules.of([2], 1).finish_reason([]) is None


def test_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be at least 0, got -1"):
        StopRules.of([], -1)


@given(
    path=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    ends=st.sets(st.integers(0, 5), max_size=3),
    limit=st.integers(0, 9),
    num_new=st.integers(0, 9),
)
def test_cut_equals_committing_one_by_one(path: list[int], ends: set[int], limit: int, num_new: int) -> None:
    """Committing token by token and asking after each whether the answer is over keeps the same tokens."""
    rules = StopRules.of(ends, limit)
    kept: list[int] = []
    standing = [9] * num_new  # no end token
    for token in path:
        if rules.finish_reason(standing + kept) is not None:
            break
        kept.append(token)
    assert rules.cut(path, num_new) == kept
