"""Intervals against independent computations."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treespark.bench.results import PromptTrials, Trial
from treespark.bench.statistics import paired_ratio, pooled
from treespark.bench.summary import compare, summarise

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


def test_speeds_by_hand() -> None:
    """Plain: 4 tokens in 4 s = 1/s. Tree: rounds of 2 and 4 tokens in 1.5 + 0.5 s = 3/s. Parts fill half of it."""
    table = prompts(
        {
            "plain": [trial([0, 0], 2.0), trial([0, 0], 2.0)],
            "tree": [trial([1], 1.5, identical=True), trial([3], 0.5, identical=False)],
        }
    )
    tree = summarise(table, "tree", depths=3, baseline="plain")
    assert (tree.tokens_per_second, tree.speed_ratio, tree.time_to_first_token) == (3.0, 3.0, 0.5)
    assert (tree.num_identical, tree.num_compared, tree.tau, tree.mean_accepted) == (1, 2, 3.0, 2.0)
    assert tree.time_shares == pytest.approx(
        {"draft": 0.125, "build": 0.125, "verify": 0.125, "commit": 0.125, "other": 0.5}
    )
    assert summarise(table, "plain", depths=3, baseline="plain").speed_ratio == 1.0
    intervals = compare(table, ["plain", "tree"], "plain", simulated=False, seed=0)
    assert intervals["speed tree/plain"].value == 3.0 and list(intervals) == ["speed tree/plain"]


def test_comparisons_that_are_made() -> None:
    """Every tree's tau with the chain's, every arm's speed with plain decoding's; no speed when simulated."""
    table = prompts({name: [trial([1]), trial([2])] for name in ("plain", "chain", "tree", "other")})
    names = list(table[0].trials)
    assert list(compare(table, names, "plain", simulated=False, seed=0)) == [
        "tau tree/chain",
        "tau other/chain",
        "speed chain/plain",
        "speed tree/plain",
        "speed other/plain",
    ]
    assert list(compare(table, names[1:], None, simulated=True, seed=0)) == ["tau tree/chain", "tau other/chain"]
