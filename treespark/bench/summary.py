"""Figures of an arm on a suite, and their means over suites."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from treespark.bench.measures import MEASURES, rate, speeds
from treespark.metrics.acceptance import acceptance_sums

if TYPE_CHECKING:
    from treespark.bench.records import PromptTrials, Trial

PARTS = ("draft", "head", "build", "verify", "commit")


@dataclass(frozen=True)
class Summary:
    """What an arm reached on the prompts of a suite, or on average over suites. Unknown figures are nan.

    On a suite a figure is a sum over a sum (`measures`). Over suites it is their unweighted mean, while counts add up.

    Attributes:
        suite: Name of the suite; None for the mean over suites.
        category: Category of the suite, or of all suites of the mean; empty for all suites.
        arm: Name of the arm.
        batch_size: Requests side by side.
        num_prompts: Different prompts evaluated.
        num_repeats: How often each was decoded, at most.
        num_tokens: New tokens, the prefill's ones included.
        num_rounds: Rounds.
        tau: Acceptance length: committed tokens ÷ rounds, the bonus counted.
        simulated_tau: The same of simulated rounds.
        mean_accepted: Accepted draft tokens ÷ rounds.
        acceptance_by_position: Share of rounds that accept at least d = 1, …, K draft tokens.
        single_throughput: Tokens per second of the accumulated decoding time.
        system_throughput: Tokens per second of the elapsed time.
        per_request_throughput: Tokens per second of a request after its first token.
        speed_ratio: Single-request throughput, or for several requests side by side system throughput, where that of
            plain decoding is 1.
        time_to_first_token: Mean seconds.
        num_identical: Outputs that are plain decoding's, token for token.
        num_compared: Outputs compared with plain decoding's.
        num_near_ties: Tokens that are not the likeliest, but as likely within rounding, in bfloat16 and float16.
        time_shares: Share of the decoding time by part.
    """

    suite: str | None
    category: str
    arm: str
    batch_size: int
    num_prompts: int
    num_repeats: int
    num_tokens: int
    num_rounds: int
    tau: float
    simulated_tau: float
    mean_accepted: float
    acceptance_by_position: list[float]
    single_throughput: float = math.nan
    system_throughput: float = math.nan
    per_request_throughput: float = math.nan
    speed_ratio: float = math.nan
    time_to_first_token: float = math.nan
    num_identical: int = 0
    num_compared: int = 0
    num_near_ties: int = 0
    time_shares: dict[str, float] = field(default_factory=dict)


def summarise(
    records: Sequence[PromptTrials],
    arm: str,
    depths: int,
    baseline: str | None = None,
    suite: str | None = None,
    category: str = "",
    batch_size: int = 1,
) -> Summary:
    """Pools an arm's records of one suite and one batch size.

    Args:
        records: The records; those without the arm are left out.
        arm: Name of the arm.
        depths: K of the drafter.
        baseline: Name of the arm that decodes plainly, for the speed ratio.
        suite: What to call the result.
        category: The suite's category.
        batch_size: Of the records.
    """
    records = [record for record in records if arm in record.trials]
    trials = [record.trials[arm] for record in records]
    accepted = [number for trial in trials for number in trial.num_accepted]
    rounds = len(accepted)
    reached, _ = acceptance_sums(torch.tensor(accepted, dtype=torch.long), depths)
    compared = [trial for trial in trials if trial.identical is not None]
    simulated = [number for trial in trials for number in trial.simulated or ()]
    figures = Summary(
        suite=suite,
        category=category,
        arm=arm,
        batch_size=batch_size,
        num_prompts=len({(record.suite, record.index) for record in records}),
        num_repeats=len({record.repeat for record in records}),
        num_tokens=sum(trial.num_tokens for trial in trials),
        num_rounds=rounds,
        tau=rate(records, arm, MEASURES["tau"]),
        simulated_tau=sum(simulated) / len(simulated) if simulated else math.nan,
        mean_accepted=sum(accepted) / rounds if rounds else math.nan,
        acceptance_by_position=[count / rounds if rounds else math.nan for count in reached.tolist()],
        num_identical=sum(bool(trial.identical) for trial in compared),
        num_compared=len(compared),
        num_near_ties=sum(trial.num_near_ties for trial in trials),
    )
    if not any(trial.timing for trial in trials):
        return figures
    main = MEASURES[speeds(batch_size)[0]]
    base = rate(records, baseline, main) if baseline is not None else math.nan
    return replace(
        figures,
        single_throughput=rate(records, arm, MEASURES["speed"]) if batch_size == 1 else math.nan,
        system_throughput=rate(records, arm, MEASURES["system"]),
        per_request_throughput=rate(records, arm, MEASURES["per request"]),
        speed_ratio=rate(records, arm, main) / base if base else math.nan,
        time_to_first_token=rate(records, arm, MEASURES["first token"]),
        time_shares=_shares(trials),
    )


def _shares(trials: Sequence[Trial]) -> dict[str, float]:
    """Parts of the decoding time; empty where decoding does not tell them."""
    timed = [trial.timing for trial in trials if "verify" in trial.timing]
    seconds = math.fsum(timing["decode"] for timing in timed)
    if not seconds:
        return {}
    parts = {part: math.fsum(timing.get(part, 0.0) for timing in timed) / seconds for part in PARTS}
    return parts | {"other": max(0.0, 1 - math.fsum(parts.values()))}


def mean_over_suites(summaries: Sequence[Summary], category: str = "") -> Summary:
    """Returns the unweighted mean of an arm's figures over suites; a figure that a suite lacks is nan.

    Args:
        summaries: The arm's summaries under one batch size, one per suite.
        category: What the suites have in common.
    """
    first, count = summaries[0], len(summaries)
    found: dict[str, Any] = {}
    for item in fields(Summary):
        values = [getattr(summary, item.name) for summary in summaries]
        if item.name == "num_repeats":
            found[item.name] = max(values)
        elif item.name.startswith("num_"):
            found[item.name] = sum(values)
        elif isinstance(values[0], float):
            found[item.name] = math.fsum(values) / count
    found["acceptance_by_position"] = [
        math.fsum(column) / count for column in zip(*(s.acceptance_by_position for s in summaries), strict=True)
    ]
    found["time_shares"] = {
        part: math.fsum(summary.time_shares.get(part, math.nan) for summary in summaries) / count
        for part in first.time_shares
    }
    return replace(first, suite=None, category=category, **found)
