"""Pooled figures of an arm, and paired comparisons between arms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from treespark.bench.statistics import Interval, paired_ratio, pooled
from treespark.metrics.acceptance import acceptance_sums

if TYPE_CHECKING:
    from treespark.bench.results import PromptTrials, Trial

PARTS = ("draft", "build", "verify", "commit")


@dataclass(frozen=True)
class Summary:
    """What an arm reached on the prompts of a suite; sums over sums, never means of means. Unknown figures are nan.

    Attributes:
        suite: Name of the suite; None for all prompts pooled.
        arm: Name of the arm.
        num_prompts: Prompts evaluated.
        num_tokens: New tokens, the prefill's ones included.
        num_rounds: Rounds.
        tau: Acceptance length: committed tokens ÷ rounds, the bonus counted.
        mean_accepted: Accepted draft tokens ÷ rounds.
        acceptance_by_position: Share of rounds that accept at least d = 1, …, K draft tokens.
        tokens_per_second: Tokens committed in rounds ÷ accumulated decoding time; the prefill counts in neither.
        speed_ratio: That of plain decoding = 1.
        time_to_first_token: Mean seconds of the prefill.
        num_identical: Outputs that are plain decoding's, token for token.
        num_compared: Outputs compared with plain decoding's.
        time_shares: Share of the decoding time by part.
    """

    suite: str | None
    arm: str
    num_prompts: int
    num_tokens: int
    num_rounds: int
    tau: float
    mean_accepted: float
    acceptance_by_position: list[float]
    tokens_per_second: float = math.nan
    speed_ratio: float = math.nan
    time_to_first_token: float = math.nan
    num_identical: int = 0
    num_compared: int = 0
    time_shares: dict[str, float] = field(default_factory=dict)


def summarise(
    prompts: Sequence[PromptTrials], arm: str, depths: int, baseline: str | None = None, suite: str | None = None
) -> Summary:
    """Pools the records of an arm.

    Args:
        prompts: The records.
        arm: Name of the arm.
        depths: K of the drafter.
        baseline: Name of the arm that decodes plainly, for the speed ratio.
        suite: What to call the result.
    """
    trials = [prompt.trials[arm] for prompt in prompts]
    accepted = [number for trial in trials for number in trial.num_accepted]
    rounds = len(accepted)
    reached, _ = acceptance_sums(torch.tensor(accepted, dtype=torch.long), depths)
    compared = [trial for trial in trials if trial.identical is not None]
    figures = Summary(
        suite=suite,
        arm=arm,
        num_prompts=len(trials),
        num_tokens=sum(trial.num_tokens for trial in trials),
        num_rounds=rounds,
        tau=sum(sum(trial.committed) for trial in trials) / rounds if rounds else math.nan,
        mean_accepted=sum(accepted) / rounds if rounds else math.nan,
        acceptance_by_position=[count / rounds if rounds else math.nan for count in reached.tolist()],
        num_identical=sum(bool(trial.identical) for trial in compared),
        num_compared=len(compared),
    )
    timed = [trial for trial in trials if trial.timing]
    if not timed:
        return figures
    seconds = math.fsum(trial.timing["decode"] for trial in timed)
    parts = {part: math.fsum(trial.timing[part] for trial in timed) / seconds for part in PARTS} if seconds else {}
    if parts:
        parts["other"] = max(0.0, 1 - math.fsum(parts.values()))
    speed = pooled(*_speed(timed))
    base = pooled(*_speed([prompt.trials[baseline] for prompt in prompts])) if baseline is not None else math.nan
    return Summary(
        **vars(figures)
        | {
            "tokens_per_second": speed,
            "speed_ratio": speed / base if base else math.nan,
            "time_to_first_token": math.fsum(trial.timing["prefill"] for trial in timed) / len(timed),
            "time_shares": parts,
        }
    )


def compare(
    prompts: Sequence[PromptTrials], arms: Sequence[str], baseline: str | None, simulated: bool, seed: int
) -> dict[str, Interval]:
    """Compares arms on the same prompts: tau of each tree with the chain's, speed of each with plain decoding's.

    Args:
        prompts: The records.
        arms: Names of the arms.
        baseline: Name of the arm that decodes plainly, or None.
        simulated: Whether nothing was timed.
        seed: Of the resampling.
    """
    intervals = {}

    def ratio(what: str, columns: Callable[[list[Trial]], tuple[list[float], list[float]]], arm: str, to: str) -> None:
        first, second = ([prompt.trials[name] for prompt in prompts] for name in (arm, to))
        intervals[f"{what} {arm}/{to}"] = paired_ratio(columns(first), columns(second), seed=seed)

    drafted = [arm for arm in arms if arm != baseline]
    if "chain" in drafted:
        for arm in drafted:
            if arm != "chain":
                ratio("tau", _tau, arm, "chain")
    if baseline is not None and not simulated:
        for arm in drafted:
            ratio("speed", _speed, arm, baseline)
    return intervals


def _tau(trials: list[Trial]) -> tuple[list[float], list[float]]:
    return [float(sum(trial.committed)) for trial in trials], [float(len(trial.committed)) for trial in trials]


def _speed(trials: list[Trial]) -> tuple[list[float], list[float]]:
    return [float(sum(trial.committed)) for trial in trials], [trial.timing["decode"] for trial in trials]
