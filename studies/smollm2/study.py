"""The study of treespark on SmolLM2, stage by stage; each stage goes on where it was interrupted.

    python studies/smollm2/study.py plan        # hours and bytes of the stages
    python studies/smollm2/study.py generate    # prompts, answers, split, cached features
    python studies/smollm2/study.py train       # the chain-trained starts, the search, the arms
    python studies/smollm2/study.py bench       # validation, test suites, live decoding
    python studies/smollm2/study.py report      # docs/study-smollm2.md from the stored results

Run it from the repository's root. README.md beside this file has the protocol, plan.yaml the numbers.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table

from runs import HERE, Run, read_json, train_all, treespark, write_json

_PLAN = os.path.relpath(HERE / "plan.yaml")


class Plan:
    """A plan file and the runs that it asks for.

    Args:
        file: plan.yaml, or one like it.
    """

    def __init__(self, file: str) -> None:
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file}: no such plan; run this from the repository's root, or give --plan FILE.")
        self.content: dict[str, Any] = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        self.folder = Path(self.content["folder"])
        own = Path(file).samefile(HERE / "plan.yaml")  # what another plan gives stays in its folder
        self.results = Path(os.path.relpath(HERE / "results")) if own else self.folder / "results"
        self.report = Path("docs/study-smollm2.md") if own else self.folder / "report.md"
        self.data: dict[str, Any] = self.content["data"]

    def runs(self, part: str) -> list[Run]:
        """The runs of a part of the plan: starts, search or arms; one for each seed.

        An arm whose steps follow from step times is left out until these were taken.

        Raises:
            ValueError: For a run that continues one that is no start of the plan, or has the name of another one.
        """
        found: list[Run] = []
        taken = {name for other in ("starts", "search") if other != part for name in self.content.get(other) or {}}
        starts = {} if part == "starts" else {run.name: run for run in self.runs("starts")}
        for arm, options in (self.content.get(part) or {}).items():
            start = options.get("start")
            known = {run.name: run for run in found} if part == "starts" else starts
            if start is not None and start not in known:
                raise ValueError(f"plan: {arm} continues {start!r}; expected one of the starts {', '.join(known)}.")
            # A start's seed is no other run's: the same order of data would be trained on twice.
            for seed in options.get("seeds", [0 if part == "starts" else 1]):
                name = arm if part != "arms" else f"{arm}-{seed}"
                if name in taken:
                    raise ValueError(f"plan: two runs are called {name}, and would share a folder; rename one.")
                taken.add(name)
                steps = self._steps(options["steps"])
                if steps is not None:
                    folder = self.folder / "runs" / name
                    parent = known[start] if start is not None else None
                    found.append(Run(name, arm, seed, steps, options, folder, self.folder, parent))
        return found

    def timed(self) -> list[Run]:
        """The arms whose step is timed, as runs of their own."""
        starts, found = {run.name: run for run in self.runs("starts")}, []
        for arm in self.content["timed"]:
            options = self.content["arms"][arm]
            parent = starts.get(options.get("start"))
            found.append(Run(arm, arm, 1, options["steps"], options, self.folder / "timing" / arm, self.folder, parent))
        return found

    def step_times(self) -> dict[str, float]:
        """Seconds per step by arm, alone on the machine; nothing until those of these very recipes were taken."""
        held = read_json(self.folder / "step_times.json")
        if not held or held.get("recipes") != {run.arm: run.recipe_sha256() for run in self.timed()}:
            return {}
        seconds: dict[str, float] = held["seconds"]
        return seconds

    def _steps(self, steps: int | dict[str, Any]) -> int | None:
        """A number of steps; `{of: a, compute_of: b}` gives a's steps times how much longer a step of b takes."""
        if isinstance(steps, int):
            return steps
        times = self.step_times()
        if steps["of"] not in times or steps["compute_of"] not in times:
            return None
        base = self.content["arms"][steps["of"]]["steps"]
        return round(base * times[steps["compute_of"]] / times[steps["of"]])


def plan(plan: str = _PLAN) -> None:
    """Prints what the stages will cost.

    Args:
        plan: The plan file.
    """
    wanted = Plan(plan)
    times = wanted.step_times()
    known = read_json(wanted.folder / "data.json")
    table = Table("stage", "what", "hours", "bytes", title="The study's plan", title_justify="left")
    tokens = known.get("num_tokens")
    features = tokens * 6 * 576 * 2 if tokens else None
    rate = wanted.content["rates"]
    prompts = known.get("num_prompts") or wanted.data["num_prompts"] or 1100
    answers = prompts * wanted.data["max_new_tokens"]
    seconds = answers / rate["answer_tokens"] + (tokens or 300 * prompts) / rate["feature_tokens"]
    table.add_row(
        "generate", f"{prompts} prompts, features of {tokens or 300 * prompts} tokens", f"{seconds / 3600:.2f}",
        f"{(features or 300 * prompts * 6 * 576 * 2) / 2**30:.1f} GiB",
    )  # fmt: skip
    total = seconds
    for part in ("starts", "search", "arms"):
        runs = wanted.runs(part)
        seconds = 0.0
        for run in runs:
            kind = "chain" if not run.options.get("losses") else "tree"
            seconds += run.steps * times.get("control" if kind == "chain" else "treespark", rate[f"{kind}_step"]) + 15
        table.add_row("train", f"{part}: {len(runs)} runs", f"{seconds / 3600:.2f}", f"{len(runs) * 70 / 1024:.1f} GiB")
        total += seconds
    table.add_row("bench", "simulated rounds of all arms, live decoding of three", f"{rate['bench'] / 3600:.2f}", "")
    table.add_row("", "in all, one job at a time", f"{(total + rate['bench']) / 3600:.2f}", "")
    Console().print(table)


def generate(plan: str = _PLAN) -> None:
    """Draws the prompts, lets the target answer them, sets validation apart, and caches the target's features.

    Args:
        plan: The plan file.
    """
    from split import split
    from treespark.data.template import ChatEncoder
    from treespark.target.loading import load_tokenizer

    wanted = Plan(plan)
    data, folder = wanted.data, wanted.folder
    folder.mkdir(parents=True, exist_ok=True)
    sources: list[dict[str, Any]] = [
        {"dataset": data["prompts"], "where": {"category": [category]}, "weight": share}
        for category, share in data["shares"].items()
    ]
    sources.append({"dataset": os.path.relpath(HERE / "writing.jsonl"), "weight": data["own_writing"]})
    mixture = folder / "mix.yaml"
    content = {"num_prompts": data["num_prompts"], "seed": data["seed"], "mixture": sources}
    mixture.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    suites = [str(file) for file in sorted(Path(data["suites"]).rglob("*.jsonl"))]
    treespark("mix", "--sources", str(mixture), "--suites", *suites, "--output", str(prompts))
    treespark(
        "generate", "--target", wanted.content["target"], "--prompts", str(prompts), "--output", str(answers),
        "--max_new_tokens", str(data["max_new_tokens"]), "--batch_size", str(data["generate_batch_size"]),
    )  # fmt: skip
    train, validation = folder / "train.jsonl", folder / "validation.jsonl"
    encoder = ChatEncoder(load_tokenizer(wanted.content["target"]))
    options = {"num_validation": data["num_validation"], "seed": data["seed"], "longest": data["longest_prompt"]}
    too_long = split(answers, train, validation, encoder=encoder, **options)
    features = folder / "features"
    treespark(
        "cache", "build", "--config", str(HERE / "recipe.yaml"), "--data.train", str(train), "--data.val",
        str(validation), "--trainer.default_root_dir", str(folder), "--model.features.init_args.folder", str(features),
        "--output", str(features), "--dtype", data["feature_dtype"],
    )  # fmt: skip
    describe_data(wanted, too_long)


def describe_data(plan: Plan, num_too_long: int) -> None:
    """Writes data.json: counts and hashes of the study's data."""
    import hashlib

    folder = plan.folder
    mixed = read_json(folder / "prompts.jsonl.meta.json")
    rows = {
        part: [json.loads(line) for line in (folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]
        for part in ("train", "validation")
    }
    every = rows["train"] + rows["validation"]
    counts = {part: Counter(token for row in rows[part] for token in row["response_ids"]) for part in rows}
    size = yaml.safe_load((HERE / "recipe.yaml").read_text())["model"]["drafter"]["init_args"]["draft_vocab_size"]
    kept = {token for token, _ in counts["train"].most_common(size)}
    covered = sum(count for token, count in counts["validation"].items() if token in kept)
    write_json(
        folder / "data.json",
        {
            "num_prompts": mixed["num_prompts"],
            "by_category": dict(Counter(row["category"] for row in every)),
            "num_own_writing": sum(row["source"] == "own" for row in every),
            "num_removed": sum(mixed["removed"].values()),
            "removed": mixed["removed"] | {"too_long": num_too_long},
            "num_train": len(rows["train"]),
            "num_validation": len(rows["validation"]),
            "num_tokens": json.loads((folder / "features" / "index.json").read_text())["content"]["num_tokens"],
            "num_answer_tokens": counts["train"].total(),
            "draft_vocab_share": covered / counts["validation"].total(),  # of the validation answers' tokens
            **{
                f"{part}_sha256": hashlib.sha256((folder / f"{part}.jsonl").read_bytes()).hexdigest()
                for part in ("prompts", "train", "validation")
            },
            "train_prompt_hashes": [hashlib.sha256(row["prompt"].encode()).hexdigest()[:16] for row in rows["train"]],
        },
    )


def train(plan: str = _PLAN, part: str = "starts,search,arms", jobs: int = 1) -> None:
    """Trains the starts, the search candidates and the arms.

    Args:
        plan: The plan file.
        part: Which of starts, search, arms and times (of a step, timed alone); separated by commas.
        jobs: Trainings side by side.
    """
    parts = [name.strip() for name in part.split(",")]
    known = ("starts", "search", "times", "arms")
    if unknown := [name for name in parts if name not in known]:
        raise SystemExit(f"train: unknown part {unknown[0]!r}; expected some of {', '.join(known)}.")
    for name in parts:
        wanted = Plan(plan)
        if name == "times":
            time_steps(wanted)
            continue
        runs = wanted.runs(name)
        train_all(runs, jobs)
        for arm in wanted.content[name].keys() - {run.arm for run in runs}:
            print(f"{arm} was not trained: its steps follow from step times; run `train --part times,arms`.")


def time_steps(plan: Plan) -> None:
    """Times a step of the arms that the equal-compute control needs: two short trainings each, by turns, alone."""
    if plan.step_times():
        return
    lengths, seconds = (4, 34), {}
    arms = {run.arm: run for run in plan.timed()}
    for steps in lengths:
        for arm, run in arms.items():
            short = replace(run, steps=steps)
            recipe = short.recipe() | {"checkpoint": {"monitor": None, "save_top_k": 0}}
            recipe["trainer"]["enable_checkpointing"] = False
            recipe["trainer"]["logger"] = False
            short.folder.mkdir(parents=True, exist_ok=True)
            (short.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
            started = time.monotonic()
            treespark("fit", "--config", str(short.folder / "recipe.yaml"))
            seconds[arm, steps] = time.monotonic() - started
    write_json(
        plan.folder / "step_times.json",
        {
            "recipes": {arm: run.recipe_sha256() for arm, run in arms.items()},
            "seconds": {arm: (seconds[arm, lengths[1]] - seconds[arm, lengths[0]]) / 30 for arm in arms},
        },
    )


def bench(plan: str = _PLAN, part: str = "validation") -> None:
    """Measures: validation prompts and test suites by simulated rounds, calibration, and the final arms live.

    Args:
        plan: The plan file.
        part: Which of validation, calibration, gradients, test and live; separated by commas.
    """
    from measure import PARTS

    wanted = Plan(plan)
    folder = wanted.results
    parts = [name.strip() for name in part.split(",")]
    if unknown := [name for name in parts if name not in PARTS]:
        raise SystemExit(f"bench: unknown part {unknown[0]!r}; expected some of {', '.join(PARTS)}.")
    for name in parts:
        PARTS[name](wanted, folder)
        describe(wanted, folder)


def describe(plan: Plan, results: Path) -> None:
    """Writes study.json: the plan, the data and the runs, as the report reads them."""
    times = plan.step_times()
    found: dict[str, list[dict[str, Any]]] = {}
    for part in ("starts", "search", "arms"):
        found[part] = [dict(run.record or {}) for run in plan.runs(part) if run.is_done()]
    for record in found["arms"]:
        record["seconds_per_step"] = times.get(record["arm"])
    search = [
        {
            "name": record["name"],
            "group": record["name"].split("-")[0],
            "options": {key: value for key, value in record["options"].items() if key not in ("start", "steps")},
            "steps": record["steps"],
            "drafter_sha256": record["drafter_sha256"],
        }
        for record in found["search"]
    ]
    content = {
        "plan": plan.content,
        "data": read_json(plan.folder / "data.json"),
        "starts": found["starts"],
        "search": search,
        "runs": found["arms"],
        "exploratory": plan.content.get("exploratory", []),
    }
    write_json(results / "study.json", content)


def report(plan: str = _PLAN) -> None:
    """Makes the report from the stored results: docs/study-smollm2.md, or report.md in the folder of another plan.

    Args:
        plan: The plan file.
    """
    from report import report as make

    wanted = Plan(plan)
    make(wanted.results, wanted.report)


if __name__ == "__main__":
    auto_cli([plan, generate, train, bench, report])
