"""Paired bootstrap intervals of ratios of pooled ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES_AT_ONCE = 500


@dataclass(frozen=True)
class Interval:
    """A ratio with its interval.

    Attributes:
        value: The ratio itself.
        low: Lower end; nan where fewer than two prompts carry data.
        high: Upper end.
        num_prompts: Prompts that were resampled.
    """

    value: float
    low: float
    high: float
    num_prompts: int


def pooled(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Returns the sum of the numerators over the sum of the denominators, nan where that is 0.

    >>> pooled([3, 1], [1, 1])
    2.0
    """
    below = math.fsum(denominators)
    return math.fsum(numerators) / below if below else math.nan


def paired_ratio(
    first: tuple[Sequence[float], Sequence[float]],
    second: tuple[Sequence[float], Sequence[float]],
    *,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Returns pooled(first) / pooled(second) with a percentile bootstrap interval.

    Prompts are resampled with replacement, and both arms see the same resample: what makes a prompt easy or long is
    common to them and cancels.

    Args:
        first: Numerators and denominators of the first arm, one of each per prompt.
        second: The same prompts' numerators and denominators of the other arm.
        confidence: Coverage of the interval.
        num_resamples: Resamples.
        seed: Of the resampling.

    Raises:
        ValueError: For lists of unequal length.
    """
    columns = np.asarray([*first, *second], dtype=np.float64)  # [4, prompts]
    num_prompts = columns.shape[1]
    below = pooled(second[0], second[1])
    value = pooled(first[0], first[1]) / below if below else math.nan
    if num_prompts < 2 or math.isnan(value):
        return Interval(value, math.nan, math.nan, num_prompts)
    generator = np.random.default_rng(seed)
    shares = np.full(num_prompts, 1 / num_prompts)
    ratios = []
    for start in range(0, num_resamples, _RESAMPLES_AT_ONCE):
        size = min(_RESAMPLES_AT_ONCE, num_resamples - start)
        # How often each prompt is drawn: the same as drawing indices, and sums become one product.
        counts = generator.multinomial(num_prompts, shares, size=size)  # [size, prompts]
        sums = counts @ columns.T  # [size, 4]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios.append((sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]))
    drawn = np.concatenate(ratios)
    drawn = drawn[np.isfinite(drawn)]  # resamples of prompts without any round
    if not drawn.size:
        return Interval(value, math.nan, math.nan, num_prompts)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(value, float(low), float(high), num_prompts)
