"""Paired comparisons between the arms of a run: on a suite, over a category, over all suites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treespark.bench.measures import MEASURES, Measure, columns, speeds
from treespark.bench.statistics import Interval, Pair, compare_suites, mean_of_gains, ratio_of_means

if TYPE_CHECKING:
    from treespark.bench.records import PromptTrials
    from treespark.bench.results import Results


def compare_arms(
    results: Results, suite: str | None = None, category: str = "", batch_size: int | None = None
) -> dict[str, Interval]:
    """Compares arms on the same prompts, by name ("tau tree/chain", "speed tree/plain").

    tau and the throughputs of every arm with those of its drafter's chain, and of the first drafter's arm under the
    same policy; and the throughputs of every arm with plain decoding's. Over
    several suites a throughput's ratio is one plus the mean of the suites' relative gains, and that of tau the ratio of
    the suites' means (arXiv 2610.20175).

    Args:
        results: The records.
        suite: A suite; None takes those of the category.
        category: A category of suites; empty takes all.
        batch_size: Requests side by side; None takes the first.
    """
    size = results.batch_sizes[0] if batch_size is None else batch_size
    kinds = {arm["name"]: arm["kind"] for arm in results.arms if results.has(arm["name"], size)}
    names = results.suites_of(category) if suite is None else [suite]
    records = [results.select(name, size) for name in names]
    streams = [results.suite_names.index(name) for name in names]
    timed = [] if results.simulated else speeds(size)
    found = {}

    def add(measure: str, first: str, second: str) -> None:
        pairs = pair_up(records, streams, first, second, MEASURES[measure])
        combine = mean_of_gains if MEASURES[measure].is_speed else ratio_of_means
        found[f"{measure} {first}/{second}"] = compare_suites(pairs, combine, seed=results.seed)

    for name, kind in kinds.items():
        if kind in ("policy", "lookup"):
            for other in _references(results, name):
                for measure in ["tau", *timed] if other in kinds else ():
                    add(measure, name, other)
    if results.baseline is not None:
        for name in kinds:
            for measure in timed if name != results.baseline else ():
                add(measure, name, results.baseline)
    return found


def _references(results: Results, name: str) -> list[str]:
    """Names of the arms that an arm is set against: its drafter's chain, the first drafter's arm of its kind."""
    drafters = {arm["name"]: arm["drafter"] for arm in results.arms}
    mine = drafters[name]
    mode = name.removeprefix(f"{mine}/")
    found = [f"{mine}/chain" if mine else "chain", f"{next(iter(results.drafters), '')}/{mode}"]
    return [other for other in found if other in drafters and other != name]


def pair_up(
    records: Sequence[Sequence[PromptTrials]], streams: Sequence[int], first: str, second: str, measure: Measure
) -> list[Pair]:
    """Returns a measure of two arms on each suite's records; suites without a record are left out."""
    return [
        Pair(columns(items, first, measure), columns(items, second, measure), stream)
        for items, stream in zip(records, streams, strict=True)
        if items
    ]
