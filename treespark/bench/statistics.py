"""Paired bootstrap intervals of ratios of pooled ratios, within suites and over suites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

NUM_RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 500


@dataclass(frozen=True)
class Interval:
    """A ratio with its interval.

    Attributes:
        value: The ratio itself.
        low: Lower end; nan where no suite has two prompts that carry data.
        high: Upper end.
        num_prompts: Prompts that were resampled.
    """

    value: float
    low: float
    high: float
    num_prompts: int


@dataclass(frozen=True)
class Pair:
    """Two arms on the prompts of one suite.

    Attributes:
        first: [2, P, R] numerators and denominators of the first arm: P prompts, R repeats of each.
        second: The same of the other arm.
        stream: Suites of different streams are resampled independently.
    """

    first: Array
    second: Array
    stream: int = 0

    @property
    def columns(self) -> Array:
        """[4, P, R]: both arms' numerators and denominators."""
        return np.concatenate([self.first, self.second])


def pooled(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Returns the sum of the numerators over the sum of the denominators, nan where that is 0.

    >>> pooled([3, 1], [1, 1])
    2.0
    """
    below = math.fsum(denominators)
    return math.fsum(numerators) / below if below else math.nan


def resample(columns: Array, num_resamples: int, seed: tuple[int, ...]) -> Array:
    """Returns the sums [num_resamples, C] of columns [C, P, R] over resamples.

    P prompts are drawn with replacement, and for each drawn prompt R of its repeats with replacement, which carry the
    noise of the machine. All columns see the same resample.
    """
    _, prompts, repeats = columns.shape
    flat = columns.reshape(len(columns), -1).T  # [P * R, C]
    return np.concatenate([counts @ flat for counts in _draw(prompts, repeats, num_resamples, seed)])


@lru_cache(maxsize=32)
def _draw(prompts: int, repeats: int, num_resamples: int, seed: tuple[int, ...]) -> list[npt.NDArray[np.uint16]]:
    """Returns how often each resample draws each prompt and repeat, in parts of [size, P * R].

    The counts are the same as drawing indices, and sums become one product. They serve all arms and measures.
    """
    generator = np.random.default_rng(seed)
    shares, inner = np.full(prompts, 1 / prompts), np.full(repeats, 1 / repeats)
    parts = []
    for start in range(0, num_resamples, _RESAMPLES_AT_ONCE):
        size = min(_RESAMPLES_AT_ONCE, num_resamples - start)
        counts = generator.multinomial(prompts, shares, size=size)  # [size, P]
        if repeats > 1:
            counts = generator.multinomial(repeats * counts, inner).reshape(size, -1)
        parts.append(counts.astype(np.uint16))
    return parts


def ratio_of_means(first: Array, second: Array) -> Array:
    """Returns the ratio [...] of the unweighted means over suites of two arms' rates [suites, ...]."""
    found: Array = first.mean(0) / second.mean(0)
    return found


def mean_of_gains(first: Array, second: Array) -> Array:
    """Returns one plus the mean over suites of the relative gains [...] of rates [suites, ...] over others."""
    found: Array = (first / second).mean(0)
    return found


def compare_suites(
    pairs: Sequence[Pair],
    combine: Callable[[Array, Array], Array] = ratio_of_means,
    *,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Returns a comparison of two arms over suites with a percentile bootstrap interval.

    Inside a suite numerators and denominators are pooled; `combine` turns the suites' rates into one ratio. Prompts are
    resampled within their suites, with their repeats nested, and both arms see the same resample: what makes a prompt
    easy or long is common to them and cancels.

    Args:
        pairs: One per suite.
        combine: `ratio_of_means` or `mean_of_gains`; with one suite both are the ratio.
        confidence: Coverage of the interval.
        num_resamples: Resamples.
        seed: Of the resampling.
    """
    num_prompts = sum(pair.first.shape[1] for pair in pairs)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.array([_rates(pair.columns.sum((1, 2))) for pair in pairs]).reshape(-1, 2)  # [suites, 2]
        value = float(combine(values[:, 0], values[:, 1])) if len(pairs) else math.nan
        if not math.isfinite(value):
            return Interval(math.nan, math.nan, math.nan, num_prompts)
        if all(pair.first.shape[1] < 2 for pair in pairs):
            return Interval(value, math.nan, math.nan, num_prompts)
        draws = [_rates(resample(pair.columns, num_resamples, (seed, pair.stream)).T) for pair in pairs]
        drawn = combine(np.array([rates[0] for rates in draws]), np.array([rates[1] for rates in draws]))
    drawn = drawn[np.isfinite(drawn)]  # resamples of prompts without any round
    if not drawn.size:
        return Interval(value, math.nan, math.nan, num_prompts)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(value, float(low), float(high), num_prompts)


def _rates(sums: Array) -> tuple[Array, Array]:
    """Turns sums [4, ...] into the two arms' rates [...]."""
    return sums[0] / sums[1], sums[2] / sums[3]


def paired_ratio(
    first: tuple[Sequence[float], Sequence[float]],
    second: tuple[Sequence[float], Sequence[float]],
    *,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Returns pooled(first) / pooled(second) with its interval: `compare_suites` on one suite without repeats.

    Args:
        first: Numerators and denominators of the first arm, one of each per prompt.
        second: The same prompts' numerators and denominators of the other arm.
        confidence: Coverage of the interval.
        num_resamples: Resamples.
        seed: Of the resampling.

    Raises:
        ValueError: For lists of unequal length.
    """
    columns = np.asarray([*first, *second], dtype=np.float64)[..., None]  # [4, prompts, 1]
    pair = Pair(columns[:2], columns[2:])
    return compare_suites([pair], confidence=confidence, num_resamples=num_resamples, seed=seed)
