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
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table

from runs import HERE, Run, train_all, treespark, write_json

_PLAN = os.path.relpath(HERE / "plan.yaml")
_RESULTS = os.path.relpath(HERE / "results")


class Plan:
    """A plan file and the runs that it asks for.

    Args:
        file: plan.yaml, or one like it.
    """

    def __init__(self, file: str) -> None:
        self.content: dict[str, Any] = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        self.folder = Path(self.content["folder"])
        self.data: dict[str, Any] = self.content["data"]

    def runs(self, part: str) -> list[Run]:
        """The runs of a part of the plan: starts, search or arms; one for each seed."""
        found = []
        for arm, options in self.content.get(part, {}).items():
            for seed in options.get("seeds", [0]):
                name = arm if part != "arms" else f"{arm}-{seed}"
                steps = self._steps(options["steps"])
                if steps is not None:
                    found.append(Run(name, arm, seed, steps, options, self.folder / "runs" / name, self.folder))
        return found

    def _steps(self, steps: int | dict[str, Any]) -> int | None:
        """A number of steps; `{of: a, compute_of: b}` gives a's steps times how much longer a step of b takes."""
        if isinstance(steps, int):
            return steps
        times = read_json(self.folder / "step_times.json")
        if steps["of"] not in times or steps["compute_of"] not in times:
            return None  # timed by `train`, before the arms
        base = self.content["arms"][steps["of"]]["steps"]
        return round(base * times[steps["compute_of"]] / times[steps["of"]])


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file's content; empty where there is none."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def plan(plan: str = _PLAN) -> None:
    """Prints what the stages will cost.

    Args:
        plan: The plan file.
    """
    wanted = Plan(plan)
    times = read_json(wanted.folder / "step_times.json")
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
    from treespark.data.template import ChatEncoder
    from treespark.target.loading import load_tokenizer

    from split import split

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
    if not prompts.is_file():
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
    for name in part.split(","):
        if name == "times":
            time_steps(Plan(plan))
        else:
            train_all(Plan(plan).runs(name), jobs)


def time_steps(plan: Plan) -> None:
    """Times a step of the arms that the equal-compute control needs: two short trainings each, by turns, alone."""
    file = plan.folder / "step_times.json"
    if file.is_file():
        return
    lengths, seconds = (4, 34), {}
    arms = {run.arm: run for run in plan.runs("arms") if run.arm in plan.content["timed"]}
    for steps in lengths:
        for arm, run in arms.items():
            short = Run(f"timing-{arm}", arm, 0, steps, run.options, plan.folder / "timing" / arm, plan.folder)
            recipe = short.recipe() | {"checkpoint": {"monitor": None, "save_top_k": 0}}
            recipe["model"]["init_from"] = run.recipe()["model"].get("init_from")
            recipe["trainer"]["enable_checkpointing"] = False
            recipe["trainer"]["logger"] = False
            short.folder.mkdir(parents=True, exist_ok=True)
            (short.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
            started = time.monotonic()
            treespark("fit", "--config", str(short.folder / "recipe.yaml"))
            seconds[arm, steps] = time.monotonic() - started
    write_json(file, {arm: (seconds[arm, lengths[1]] - seconds[arm, lengths[0]]) / 30 for arm in arms})


def bench(plan: str = _PLAN, part: str = "validation", results: str = _RESULTS) -> None:
    """Measures: validation prompts and test suites by simulated rounds, calibration, and the final arms live.

    Args:
        plan: The plan file.
        part: Which of validation, calibration, gradients, test and live; separated by commas.
        results: Folder for the results.
    """
    from measure import PARTS

    wanted, folder = Plan(plan), Path(results)
    for name in part.split(","):
        if name not in PARTS:
            raise SystemExit(f"bench: unknown part {name!r}; expected some of {', '.join(PARTS)}.")
        PARTS[name](wanted, folder)
    describe(wanted, folder)


def describe(plan: Plan, results: Path) -> None:
    """Writes study.json: the plan, the data and the runs, as the report reads them."""
    times = read_json(plan.folder / "step_times.json")
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


def report(results: str = _RESULTS, output: str = "docs/study-smollm2.md") -> None:
    """Makes the report from the stored results.

    Args:
        results: Folder of the results.
        output: The Markdown file; its pictures get its name.
    """
    from report import report as make

    make(results, output)


if __name__ == "__main__":
    auto_cli([plan, generate, train, bench, report])
