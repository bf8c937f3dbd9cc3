"""The study's scripts as modules, and synthetic results of it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from treespark.bench.records import PromptTrials, Trial
from treespark.bench.results import Results

FOLDER = Path(__file__).parents[1] / "studies" / "smollm2"
BUDGETED = {"class_path": "Budgeted", "init_args": {"k": 4, "num_draft_nodes": 32}}
CHAIN: dict[str, Any] = {"class_path": "Chain", "init_args": {}}
SUITES = {"gsm8k": "general", "mbpp": "general", "poetry": "writing"}


@contextmanager
def scripts(*names: str) -> Iterator[dict[str, ModuleType]]:
    """Imports the study's scripts; they import each other as neighbours, as when one of them runs."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent == FOLDER:
                del sys.modules[name]


def budget(nodes: int) -> dict[str, Any]:
    return {"class_path": "Budgeted", "init_args": {"k": 4, "num_draft_nodes": nodes}}


def run(arm: str, seed: int, **changes: Any) -> dict[str, Any]:
    """An entry of study.json's runs."""
    entry = {"name": f"{arm}-{seed}", "arm": arm, "seed": seed, "start": "chain-wide", "steps": 400, "seconds": 600.0}
    entry |= {"seconds_per_step": 2.0, "num_parameters": 5_000_000, "drafter_sha256": "d" * 64}
    entry |= {"recipe_sha256": "e" * 64, "losses": {}, "versions": {"torch": "2.6"}, "hardware": {"cpu": "a cpu"}}
    return entry | changes


def entry(drafter: str, policy: dict[str, Any] | None, marked: bool = False) -> dict[str, Any]:
    """An arm of results."""
    if policy is None:
        return {"name": "plain", "kind": "plain", "policy": None, "description": "", "marked": False, "drafter": ""}
    called = f"{policy['class_path']}({policy['init_args']})"
    name = f"{drafter}/{called}"
    return {"name": name, "kind": "policy", "policy": policy, "description": called, "marked": marked} | {
        "drafter": drafter
    }


def trial(rounds: Sequence[int], seconds: float = 0.0) -> Trial:
    """A trial of rounds that commit so many tokens."""
    accepted = [count - 1 for count in rounds]
    timing = {"decode": seconds} if seconds else {}
    same = True if seconds else None
    return Trial(1 + sum(rounds), "length", accepted, list(rounds), timing, same, sum(rounds) if seconds else 0)


def results(arms: Sequence[dict[str, Any]], rounds: Mapping[str, Any], **changes: Any) -> Results:
    """Results whose `rounds[arm](suite, index)` are the committed tokens of each round, on four prompts a suite."""
    suites = [
        {"name": name, "category": kind, "path": name, "sha256": "s" * 64, "num_prompts": 4}
        for name, kind in SUITES.items()
    ]
    prompts = [
        PromptTrials(
            suite,
            index,
            str(index),
            9,
            {
                arm["name"]: trial(rounds[arm["name"]](suite, index), 0.0 if changes.get("simulated", True) else 2.0)
                for arm in arms
            },
        )
        for suite in SUITES
        for index in range(4)
    ]
    settings = {"simulated": True, "settings": {"max_new_tokens": 128, "batch_sizes": [1]}} | changes
    return Results(arms=list(arms), suites=suites, depths=7, prompts=prompts, target={"name": "smollm2"}, **settings)


def noisy(mean: float, seed: int) -> Any:
    """Rounds around a mean, other ones for each prompt."""

    def rounds(suite: str, index: int) -> list[int]:
        generator = np.random.default_rng((seed, list(SUITES).index(suite), index))
        return [int(count) for count in generator.binomial(7, (mean - 1) / 7, size=30) + 1]

    return rounds


def write(folder: Path, runs: Sequence[dict[str, Any]], test: Results, **study: Any) -> Path:
    """Writes study.json and test.json."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"num_prompts": 1200, "by_category": {"math": 400, "code": 800}, "num_own_writing": 90, "num_removed": 7}
    data |= {"num_train": 1100, "num_validation": 100, "num_tokens": 150_000, "draft_vocab_share": 0.97}
    data |= {"prompts_sha256": "a" * 64, "train_sha256": "b" * 64, "validation_sha256": "c" * 64}
    record = {"plan": {}, "data": data, "runs": list(runs), "search": [], "exploratory": []} | study
    (folder / "study.json").write_text(json.dumps(record))
    test.save(folder / "test.json", computed=False)
    return folder
