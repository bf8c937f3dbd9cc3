"""Comparisons of arms that were trained several times: a bootstrap over prompts and over seeds.

Shapes: S suites, P prompts of a suite, R repeats of each, n runs, B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from treespark.bench.measures import MEASURES, Measure, columns
from treespark.bench.results import Results
from treespark.bench.statistics import (
    NUM_RESAMPLES,
    Array,
    Interval,
    mean_of_gains,
    ratio_of_means,
    resample,
)

TAU, SPEED = MEASURES["tau"], MEASURES["speed"]

_SEED_STREAM = 1 << 20  # apart from the suites' streams


@dataclass(frozen=True)
class Group:
    """The runs of one arm under one policy.

    Attributes:
        label: What the arm is called.
        names: The arms of the results, one per run.
        seeds: The runs' seeds, ascending.
    """

    label: str
    names: tuple[str, ...]
    seeds: tuple[int, ...]

    def only(self, seeds: Collection[int]) -> Group:
        """The runs of some seeds."""
        kept = [(name, seed) for name, seed in zip(self.names, self.seeds, strict=True) if seed in seeds]
        return Group(self.label, tuple(name for name, _ in kept), tuple(seed for _, seed in kept))


def paired(first: Group, second: Group) -> tuple[Group, Group]:
    """Two arms with the seeds that they share, or whole where they share none."""
    shared = set(first.seeds) & set(second.seeds)
    return (first.only(shared), second.only(shared)) if shared else (first, second)


def accepts(depth: int) -> Measure:
    """Returns the share of rounds that accept at least `depth` draft tokens."""
    return Measure(
        f"position {depth}",
        lambda trial: (sum(number >= depth for number in trial.num_accepted), len(trial.num_accepted)),
        timed=False,
        is_speed=False,
    )


def suite_columns(results: Results, suite: str, names: Sequence[str], measure: Measure) -> Array | None:
    """Returns sums above and below [n, 2, P, R] of arms on a suite's prompts that hold all of them, or None."""
    found = results.select(suite, results.batch_sizes[0])
    records = [record for record in found if all(name in record.trials for name in names)]
    return np.stack([columns(records, name, measure) for name in names]) if records else None


def rates(results: Results, suites: Sequence[str], group: Group, measure: Measure = TAU) -> Array:
    """Returns the measure [S, n] of each run, pooled within each suite; nan where nothing was measured."""
    tables = [suite_columns(results, suite, group.names, measure) for suite in suites]
    empty = np.full(len(group.names), math.nan)
    return np.array([empty if table is None else _rates(table.sum((2, 3))) for table in tables])


def compare(
    results: Results,
    suites: Sequence[str],
    first: Group,
    second: Group,
    measure: Measure = TAU,
    *,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval:
    """Returns the ratio of two arms with its 95 % percentile interval over prompts and seeds.

    Each run's sums are pooled within a suite; its rate is averaged over the arm's runs, then over suites, unweighted
    (for a speed, the suites' gains are averaged: arXiv 2610.20175). A resample draws prompts within each suite, the
    same ones for all runs of both arms, and runs of each arm, the same ones for all suites. Arms that share seeds are
    compared on these alone and draw the same runs: what a seed does to both cancels. With one run each it is
    `compare_suites`.

    Args:
        results: The records.
        suites: Names of the suites.
        first: The arm above.
        second: The arm below.
        measure: What is compared.
        num_resamples: B.
    """
    first, second = paired(first, second)
    names = (*first.names, *second.names)
    count, combine = len(first.names), mean_of_gains if measure.is_speed else ratio_of_means
    tables = {suite: suite_columns(results, suite, names, measure) for suite in suites}
    found = {suite: table for suite, table in tables.items() if table is not None}
    num_prompts = sum(table.shape[2] for table in found.values())
    if not found:
        return Interval(math.nan, math.nan, math.nan, 0)
    generator = np.random.default_rng((results.seed, _SEED_STREAM))
    weights = _draw_runs(count, num_resamples, generator)
    others = weights if first.seeds == second.seeds else _draw_runs(len(second.names), num_resamples, generator)
    above, below, drawn_above, drawn_below = [], [], [], []
    with np.errstate(divide="ignore", invalid="ignore"):
        for suite, table in found.items():
            each = _rates(table.sum((2, 3)))  # [n]
            above.append(each[:count].mean())
            below.append(each[count:].mean())
            flat = table.reshape(-1, *table.shape[2:])  # [2n, P, R]
            sums = resample(flat, num_resamples, (results.seed, results.suite_names.index(suite)))
            drawn = _rates(sums.reshape(num_resamples, -1, 2))  # [B, n]
            drawn_above.append((drawn[:, :count] * weights).sum(1))
            drawn_below.append((drawn[:, count:] * others).sum(1))
        value = float(combine(np.array(above), np.array(below)))
        samples = combine(np.array(drawn_above), np.array(drawn_below))
    samples = samples[np.isfinite(samples)]
    single = len(names) == 2 and all(table.shape[2] < 2 for table in found.values())
    # A share that some resamples lack altogether (nothing accepted so deep) has a ratio without bounds.
    few = samples.size < 0.975 * num_resamples
    if not math.isfinite(value) or few or single:
        return Interval(value if math.isfinite(value) else math.nan, math.nan, math.nan, num_prompts)
    low, high = np.quantile(samples, [0.025, 0.975])
    return Interval(value, float(low), float(high), num_prompts)


def _rates(sums: Array) -> Array:
    """Turns numerators and denominators [..., 2] into rates [...]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = sums[..., 0] / sums[..., 1]
    return found


def _draw_runs(count: int, num_resamples: int, generator: np.random.Generator) -> Array:
    """Returns the shares [B, n] of runs that are drawn with replacement."""
    found: Array = generator.multinomial(count, np.full(count, 1 / count), size=num_resamples) / count
    return found
