"""What is measured of an arm: each measure is a sum over a sum, never a mean of means.

* tau: tokens committed in rounds ÷ rounds.
* speed, the single-request throughput: tokens committed in rounds ÷ accumulated decoding time. The prefill and its
  token count in neither.
* system throughput: generated tokens, the prefills' included ÷ elapsed time of the workloads.
* per-request throughput: tokens after the first ones ÷ time after the first ones, summed over requests.
* time to first token: from a request's arrival, when a row was free for it, to its first token; the mean over requests.

Source: arXiv 2610.20175 (tau and the three throughputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treespark.bench.statistics import Array

if TYPE_CHECKING:
    from treespark.bench.records import PromptTrials, Trial


@dataclass(frozen=True)
class Measure:
    """A ratio of sums.

    Attributes:
        name: What tables and files call it.
        parts: Numerator and denominator of one trial.
        timed: Whether it needs live decoding.
        is_speed: Whether gains are means of the suites' gains; else they are ratios of means.
    """

    name: str
    parts: Callable[[Trial], tuple[float, float]]
    timed: bool = True
    is_speed: bool = True


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("tau", lambda trial: (sum(trial.committed), len(trial.committed)), timed=False, is_speed=False),
        Measure("speed", lambda trial: (sum(trial.committed), trial.timing.get("decode", 0.0))),
        Measure("system", lambda trial: (trial.num_tokens, trial.timing.get("share", 0.0))),
        Measure("per request", lambda trial: (sum(trial.committed), trial.timing.get("rest", 0.0))),
        Measure("first token", lambda trial: (trial.timing.get("first_token", 0.0), 1.0), is_speed=False),
    )
}


def speeds(batch_size: int) -> list[str]:
    """Names of the throughputs that are reported for a batch size, the main one first."""
    return ["speed", "system"] if batch_size == 1 else ["system", "per request"]


def columns(records: Sequence[PromptTrials], arm: str, measure: Measure) -> Array:
    """Returns numerators and denominators [2, P, R] of P prompts, each decoded R times.

    Where an interruption left some prompts with fewer repeats than others, the repeats are summed and R is 1.
    """
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for record in records:
        found.setdefault((record.suite, record.index), []).append(measure.parts(record.trials[arm]))
    if len({len(parts) for parts in found.values()}) > 1:
        found = {key: [(sum(a for a, _ in parts), sum(b for _, b in parts))] for key, parts in found.items()}
    table = np.asarray(list(found.values()), dtype=np.float64)  # [P, R, 2]
    return np.moveaxis(table.reshape(len(found), -1, 2), 2, 0)


def rate(records: Sequence[PromptTrials], arm: str, measure: Measure) -> float:
    """Returns the measure, pooled over the records; nan without a denominator."""
    above, below = columns(records, arm, measure).sum((1, 2)) if records else (0.0, 0.0)
    return float(above / below) if below else float("nan")
