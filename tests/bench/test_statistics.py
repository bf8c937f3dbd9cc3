"""Intervals against independent computations."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treespark.bench.records import PromptTrials, Trial
from treespark.bench.statistics import Pair, compare_suites, mean_of_gains, paired_ratio, pooled, ratio_of_means
from treespark.bench.summary import summarise

ROUNDS = st.lists(st.integers(0, 4), max_size=6)


def trial(num_accepted: list[int], seconds: float = 1.0, identical: bool | None = None) -> Trial:
    committed = [number + 1 for number in num_accepted]
    timing = dict.fromkeys(("draft", "build", "verify", "commit"), seconds / 8) | {"decode": seconds, "prefill": 0.5}
    return Trial(1 + sum(committed), "length", num_accepted, committed, timing, identical)


def prompts(arms: dict[str, list[Trial]]) -> list[PromptTrials]:
    count = len(next(iter(arms.values())))
    return [
        PromptTrials("s", index, str(index), 3, {name: trials[index] for name, trials in arms.items()})
        for index in range(count)
    ]


def test_ratio_by_hand() -> None:
    """(3 + 5) / (1 + 1) = 4 and (2 + 2) / (1 + 1) = 2, so the ratio is 2, not the mean of 1.5 and 2.5."""
    interval = paired_ratio(([3, 5], [1, 1]), ([2, 2], [1, 1]))
    assert interval.value == 2.0
    # Both prompts alike give 1.5 or 2.5; each resample of two has one of the ratios 1.5, 2, 2.5 with shares ¼, ½, ¼.
    assert (interval.low, interval.high) == (1.5, 2.5)


def test_bootstrap_against_a_plain_loop() -> None:
    """Indices drawn one by one in pure Python give the same interval up to resampling noise."""
    generator = random.Random(3)
    rounds = [generator.randint(5, 40) for _ in range(25)]
    chain = [count * generator.uniform(1.2, 2.0) for count in rounds]
    tree = [value * generator.uniform(1.0, 1.4) for value in chain]
    interval = paired_ratio((tree, rounds), (chain, rounds), seed=1)
    drawn = []
    for _ in range(10_000):
        chosen = [generator.randrange(25) for _ in range(25)]
        drawn.append(sum(tree[i] for i in chosen) / sum(chain[i] for i in chosen))
    drawn.sort()
    width = interval.high - interval.low
    assert interval.value == pytest.approx(sum(tree) / sum(chain))
    assert interval.low == pytest.approx(drawn[250], abs=0.06 * width)
    assert interval.high == pytest.approx(drawn[9750], abs=0.06 * width)


def test_bootstrap_against_scipy() -> None:
    """`scipy.stats.bootstrap` with the same statistic, paired, percentile method."""
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    first = generator.uniform(1, 3, 30), generator.uniform(1, 2, 30)
    second = generator.uniform(1, 2, 30), generator.uniform(1, 2, 30)

    def statistic(a, b, c, d, axis=-1):  # type: ignore[no-untyped-def]
        return (a.sum(axis) / b.sum(axis)) / (c.sum(axis) / d.sum(axis))

    expected = stats.bootstrap(
        (*first, *second), statistic, paired=True, method="percentile", n_resamples=10_000, random_state=generator
    ).confidence_interval
    interval = paired_ratio((list(first[0]), list(first[1])), (list(second[0]), list(second[1])))
    width = interval.high - interval.low
    assert interval.low == pytest.approx(expected.low, abs=0.06 * width)
    assert interval.high == pytest.approx(expected.high, abs=0.06 * width)


def test_pairing_removes_what_arms_share() -> None:
    """Arms that differ by the same factor on every prompt: the ratio is that factor in every resample."""
    base = [1.0, 7.0, 3.0, 20.0]
    interval = paired_ratio(([3 * value for value in base], [1] * 4), (base, [1] * 4))
    assert interval.low == pytest.approx(3) and interval.high == pytest.approx(3)


def test_seed_and_too_few_prompts() -> None:
    """The same seed gives the same interval; one prompt gives none; no data gives no ratio."""
    data = ([3.0, 5.0, 9.0], [1.0, 2.0, 2.0]), ([2.0, 2.0, 4.0], [1.0, 1.0, 3.0])
    assert paired_ratio(*data, seed=5) == paired_ratio(*data, seed=5)
    single = paired_ratio(([3], [1]), ([2], [1]))
    assert single.value == 1.5 and math.isnan(single.low)
    assert math.isnan(paired_ratio(([0, 0], [0, 0]), ([1, 1], [1, 1])).value)
    assert math.isnan(pooled([], []))


@given(st.lists(ROUNDS, min_size=1, max_size=6))
def test_tau_is_a_sum_over_a_sum(accepted: list[list[int]]) -> None:
    """Acceptance length = Σ committed ÷ Σ rounds over all prompts, and the shares by position sum to mean accepted."""
    summary = summarise(prompts({"tree": [trial(numbers) for numbers in accepted]}), "tree", depths=4)
    flat = [number for numbers in accepted for number in numbers]
    assert summary.num_rounds == len(flat)
    if not flat:
        assert math.isnan(summary.tau) and math.isnan(summary.mean_accepted)
        return
    assert summary.tau == pytest.approx(sum(number + 1 for number in flat) / len(flat))
    assert sum(summary.acceptance_by_position) == pytest.approx(summary.mean_accepted)
    assert summary.acceptance_by_position == pytest.approx([sum(n >= d for n in flat) / len(flat) for d in range(1, 5)])


def pair(first: list[tuple[float, float]], second: list[tuple[float, float]], stream: int = 0) -> Pair:
    """A suite with one repeat: (numerator, denominator) of each prompt."""
    return Pair(np.array(first, float).T[..., None], np.array(second, float).T[..., None], stream)


def test_means_of_gains_and_ratios_of_means() -> None:
    """Suite A: 2/1 against 1/1, suite B: 12/1 against 8/1. Gains 100 % and 50 %: mean ratio 1.75. Means 7, 4.5."""
    pairs = [pair([(2, 1)], [(1, 1)]), pair([(12, 1)], [(8, 1)], 1)]
    assert compare_suites(pairs, mean_of_gains).value == pytest.approx(1.75)
    assert compare_suites(pairs, ratio_of_means).value == pytest.approx(7 / 4.5)
    assert math.isnan(compare_suites(pairs).low)  # one prompt each: nothing to resample
    assert compare_suites(pairs[:1], mean_of_gains).value == compare_suites(pairs[:1], ratio_of_means).value == 2.0
    assert math.isnan(compare_suites([]).value)


def test_repeats_are_nested() -> None:
    """One prompt apart, all variation lies between repeats: the interval shows it, and a sum over repeats hides it.

    Two prompts with repeats 1 and 3 against a constant 1: a resample draws 2 x 2 repeats of mean 2, so its ratio runs
    over 1, 1.5, ..., 3, and only 1 in 16 is an end. With the repeats summed all resamples are 2.
    """
    numbers = np.array([[[1.0, 3.0], [1.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]])  # [2, P, R]
    constant = np.ones((2, 2, 2))
    nested = compare_suites([Pair(numbers, constant)])
    assert nested.value == 2.0 and (nested.low, nested.high) == (1.0, 3.0) and nested.num_prompts == 2
    summed = compare_suites([Pair(numbers.sum(2, keepdims=True), constant.sum(2, keepdims=True))])
    assert (summed.low, summed.high) == (2.0, 2.0)


def test_nested_resampling_against_a_plain_loop() -> None:
    """Prompts, then repeats of each drawn prompt, drawn one by one in pure Python give the same interval."""
    generator = random.Random(5)
    table = [[generator.uniform(1, 2) * (1 + 0.3 * index) for _ in range(3)] for index in range(8)]
    base = [[generator.uniform(1, 2) for _ in range(3)] for _ in range(8)]
    ones = np.ones((8, 3))
    interval = compare_suites([Pair(np.stack([np.array(table), ones]), np.stack([np.array(base), ones]))])
    drawn = []
    for _ in range(10_000):
        cells = [(p, generator.randrange(3)) for p in [generator.randrange(8) for _ in range(8)] for _ in range(3)]
        drawn.append(sum(table[p][r] for p, r in cells) / sum(base[p][r] for p, r in cells))
    drawn.sort()
    width = interval.high - interval.low
    assert interval.low == pytest.approx(drawn[250], abs=0.06 * width)
    assert interval.high == pytest.approx(drawn[9750], abs=0.06 * width)


def test_suites_are_resampled_independently() -> None:
    """Two equal suites in different streams: their mean varies less than one of them, by about the root of 2."""
    generator = np.random.default_rng(0)
    items = [(float(value), 1.0) for value in generator.uniform(1, 3, 40)]
    ones = [(1.0, 1.0)] * 40
    single = compare_suites([pair(items, ones)])
    double = compare_suites([pair(items, ones), pair(items, ones, 1)])
    shrunk = (double.high - double.low) / (single.high - single.low)
    assert double.value == pytest.approx(single.value) and shrunk == pytest.approx(0.5**0.5, abs=0.05)
