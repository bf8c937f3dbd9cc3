"""Benchmarks: suites of prompts, arms decoded side by side, paired comparisons, the report.

Importing this package stays cheap: what it offers is loaded when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treespark.bench.arms import Arm, make_arms
    from treespark.bench.command import bench
    from treespark.bench.records import Difference, Miss, PromptTrials, Trial
    from treespark.bench.report import print_report
    from treespark.bench.results import Results
    from treespark.bench.runner import run
    from treespark.bench.statistics import Interval, paired_ratio
    from treespark.bench.suites import BenchPrompt, Suite, load_suite
    from treespark.bench.summary import Summary, summarise

_HOMES = {
    "Arm": "arms",
    "BenchPrompt": "suites",
    "Difference": "records",
    "Interval": "statistics",
    "Miss": "records",
    "PromptTrials": "records",
    "Results": "results",
    "Suite": "suites",
    "Summary": "summary",
    "Trial": "records",
    "bench": "command",
    "load_suite": "suites",
    "make_arms": "arms",
    "paired_ratio": "statistics",
    "print_report": "report",
    "run": "runner",
    "summarise": "summary",
}

__all__ = [
    "Arm",
    "BenchPrompt",
    "Difference",
    "Interval",
    "Miss",
    "PromptTrials",
    "Results",
    "Suite",
    "Summary",
    "Trial",
    "bench",
    "load_suite",
    "make_arms",
    "paired_ratio",
    "print_report",
    "run",
    "summarise",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"treespark.bench.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
