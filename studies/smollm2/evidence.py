"""What the study stored: runs, records of the benchmarks, calibration; and which records belong to which arm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from intervals import Group
from treespark.bench.results import Results

ARMS = {
    "dspark": "DSpark, trained and decoded as a chain, heads of the target's width",
    "control": "DSpark+Tree: wide heads, trained as a chain, decoded as a tree",
    "treespark": "TreeSpark: the control, trained under the tree with survival and coverage",
    "no_survival": "TreeSpark without survival",
    "no_coverage": "TreeSpark without coverage",
    "narrow": "TreeSpark with heads of the target's width",
    "control_equal_compute": "the control, trained for TreeSpark's wall clock",
    "retention": "the control with our own loss, retention",
    "survival_retention": "survival and retention",
    "coverage_retention": "coverage and retention",
    "treespark_retention": "survival, coverage and retention",
}
PLACES = ("general", "writing", "all")


@dataclass
class Evidence:
    """The stored results.

    Attributes:
        study: Plan, data and runs.
        test: Simulated rounds on the test suites.
        validation: The same on the validation prompts, or None.
        live: Rounds decoded live, or None.
        calibration: By run, or None.
        gradients: By loss term, or None.
        remarks: Hand-written Markdown, or None.
        earlier: Earlier rounds, by the name of their folder.
    """

    study: dict[str, Any]
    test: Results
    validation: Results | None = None
    live: Results | None = None
    calibration: dict[str, Any] | None = None
    gradients: dict[str, Any] | None = None
    remarks: str | None = None
    earlier: dict[str, Evidence] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: str | Path) -> Evidence:
        """Reads a folder of results, remarks.md beside it, and earlier rounds, `<round>/results` beside it.

        Raises:
            FileNotFoundError: Without study.json or test.json.
            ValueError: When a file holds something else, or records of another drafter than the run's.
        """
        path = Path(folder)
        for name, stage in (("study.json", "train"), ("test.json", "bench")):
            if not (path / name).is_file():
                message = f"{path / name}: no such file; `python studies/smollm2/study.py {stage}` writes it."
                raise FileNotFoundError(message)
        study = _read(path / "study.json")
        missing = [key for key in ("plan", "data", "runs") if key not in study]
        if missing:
            raise ValueError(f"{path / 'study.json'}: expected plan, data and runs, {', '.join(missing)} not found.")
        remarks = path.parent / "remarks.md"
        trained = [*study["runs"], *study.get("starts", []), *study.get("search", [])]
        records = {
            name: Results.load(path / f"{name}.json") if (path / f"{name}.json").is_file() else None
            for name in ("test", "validation", "live")
        }
        for name, results in records.items():
            _check_drafters(f"{name}.json", {} if results is None else results.drafters, trained)
        test = records.pop("test")
        assert test is not None
        others = {}
        for name in ("calibration", "gradients"):
            if (path / f"{name}.json").is_file():
                others[name] = _read(path / f"{name}.json")
                _check_drafters(f"{name}.json", others[name].get("drafters") or {}, trained)
        rounds = (file.parent for file in sorted(path.parent.glob("*/results/study.json")))
        return cls(
            study,
            test,
            **records,
            earlier={folder.parent.name: cls.load(folder) for folder in rounds},
            **others,
            remarks=remarks.read_text(encoding="utf-8") if remarks.is_file() else None,
        )

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All runs: arms in the order of the tables, then seeds."""
        order = list(ARMS)
        found = sorted(self.study["runs"], key=lambda run: (run["seed"], run["name"]))
        return sorted(found, key=lambda run: order.index(run["arm"]) if run["arm"] in order else len(order))

    def is_exploratory(self, run: dict[str, Any]) -> bool:
        """Whether a run was tried after the test suites were opened."""
        return not {run["name"], run["arm"]}.isdisjoint(self.study.get("exploratory") or [])

    def runs_of(self, arm: str) -> list[dict[str, Any]]:
        """The runs of an arm that belong to the protocol, by seed."""
        return [run for run in self.runs if run["arm"] == arm and not self.is_exploratory(run)]

    @property
    def arms(self) -> list[str]:
        """The arms that were trained under the protocol, in the order of the tables."""
        return list(dict.fromkeys(run["arm"] for run in self.runs if not self.is_exploratory(run)))

    def group(self, results: Results, arm: str, policy: dict[str, Any] | None = None) -> Group | None:
        """The runs of an arm under a policy (None: the one that each run was recorded with), or None without any."""
        return gather(results, arm, self.runs_of(arm), policy)

    def groups(self, results: Results, policy: dict[str, Any] | None = None) -> dict[str, Group]:
        """`group` of every arm that has one."""
        found = {arm: self.group(results, arm, policy) for arm in self.arms}
        return {arm: group for arm, group in found.items() if group is not None}

    def arm_of(self, name: str) -> str | None:
        """The arm of a run."""
        return next((run["arm"] for run in self.runs if run["name"] == name), None)


def gather(
    results: Results, label: str, runs: Sequence[dict[str, Any]], policy: dict[str, Any] | None = None
) -> Group | None:
    """Returns the arms of results that belong to runs under a policy (None: the recorded one), or None without any."""
    names, seeds = [], []
    for run in runs:
        for arm in results.arms:
            wanted = not arm["marked"] if policy is None else arm["policy"] == policy
            if arm["kind"] == "policy" and arm["drafter"] == run["name"] and wanted:
                names.append(arm["name"])
                seeds.append(int(run.get("seed", 0)))
                break
    return Group(label, tuple(names), tuple(seeds)) if names else None


def suites_at(results: Results, place: str) -> list[str]:
    """Suites of a category, or of all."""
    return results.suites_of("" if place == "all" else place)


def places(results: Results) -> list[str]:
    """The places that have suites: categories, and all suites last where no category is all of them."""
    found = [place for place in PLACES[:-1] if suites_at(results, place)]
    return found if found and suites_at(results, found[0]) == results.suite_names else [*found, "all"]


def policies(results: Results) -> list[dict[str, Any]]:
    """The different policies of all drafters, in order."""
    found: list[dict[str, Any]] = []
    for arm in results.arms:
        if arm["policy"] is not None and arm["policy"] not in found:
            found.append(arm["policy"])
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}.")
    return found


def _check_drafters(file: str, drafters: dict[str, dict[str, Any]], runs: Sequence[dict[str, Any]]) -> None:
    """Raises where records and runs are of different weights: one of them is stale."""
    for run in runs:
        measured = drafters.get(run["name"], {}).get("sha256")
        trained = run.get("drafter_sha256")
        if None not in (measured, trained) and measured != trained:
            raise ValueError(
                f"{file} measured {run['name']} with weights {measured[:12]}, study.json trained {trained[:12]}: "
                "bench it again."
            )
