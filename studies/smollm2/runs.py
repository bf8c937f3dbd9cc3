"""The study's training runs: what a plan says, composed into recipes of `treespark fit`."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from treespark.drafters import Drafter
from treespark.drafters.source import weights_hash

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: The arm's name and the seed, or that of a start or a search candidate.
        arm: What the plan calls it.
        seed: Of weights, order and anchors.
        steps: Optimiser steps.
        options: What the plan gives: head_dim_ratio, policy, losses, base, learning_rate, start.
        folder: Where it is kept.
        data: Folder of the study's data.
        parent: The run that it continues.
    """

    name: str
    arm: str
    seed: int
    steps: int
    options: dict[str, Any]
    folder: Path
    data: Path
    parent: Run | None = None

    @property
    def drafter(self) -> Path:
        """Folder of the trained drafter."""
        return self.folder / "drafter"

    @property
    def record(self) -> dict[str, Any] | None:
        """What was kept of the finished run, or None."""
        return read_json(self.folder / "run.json") or None

    def recipe(self) -> dict[str, Any]:
        """Composes the recipe: recipe.yaml with what the plan changes.

        Raises:
            ValueError: For a key, a policy or a base loss that the plan may not give.
        """
        known = {"start", "head_dim_ratio", "policy", "base", "losses", "learning_rate", "steps", "seeds"}
        if unknown := self.options.keys() - known:
            raise ValueError(f"plan: {self.arm} has the keys {sorted(unknown)}; expected some of {sorted(known)}.")
        recipe: dict[str, Any] = yaml.safe_load((HERE / "recipe.yaml").read_text(encoding="utf-8"))
        model, data, trainer = recipe["model"], recipe["data"], recipe["trainer"]
        recipe["seed_everything"] = data["seed"] = self.seed
        model["drafter"]["init_args"]["head_dim_ratio"] = self.options.get("head_dim_ratio", 1.5)
        policy, base = self.options.get("policy", "tree"), {term["class_path"] for term in model["losses"]}
        if policy not in ("chain", "tree"):
            raise ValueError(f"plan: {self.arm} has the policy {policy!r}; expected chain or tree.")
        if unknown := self.options.get("base", {}).keys() - base:
            expected = f"expected some of {sorted(base)}"
            raise ValueError(f"plan: {self.arm} has the base losses {sorted(unknown)}; {expected}.")
        if policy == "chain":
            model["policy"] = {"class_path": "Chain"}
        for term in model["losses"]:
            term["init_args"] |= self.options.get("base", {}).get(term["class_path"], {})
        for name, options in self.options.get("losses", {}).items():
            model["losses"].append({"class_path": name, "init_args": copy.deepcopy(options)})
        model["learning_rate"] = self.options.get("learning_rate", model["learning_rate"])
        if self.parent is not None:
            model["init_from"] = str(self.parent.drafter)
        model["features"]["init_args"]["folder"] = str(self.data / "features")
        data["train"], data["val"] = str(self.data / "train.jsonl"), str(self.data / "validation.jsonl")
        trainer["default_root_dir"], trainer["max_steps"] = str(self.folder), self.steps
        trainer["logger"] = {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": str(self.folder), "name": "", "version": "log"},
        }
        # Nothing is validated on the way, so the last checkpoint is the only one; one in between lets a run go on.
        recipe["checkpoint"] = {"monitor": None, "save_top_k": 0, "every_n_train_steps": 200, "save_last": True}
        return recipe

    def recipe_sha256(self) -> str:
        """Identity of the composed recipe, of the training data, and of the drafter that it continues."""
        start = None if self.parent is None else self.parent.record
        data = read_json(self.data / "data.json").get("train_sha256")
        text = f"{yaml.safe_dump(self.recipe())}{data} {start and start['drafter_sha256']}"
        return hashlib.sha256(text.encode()).hexdigest()

    def is_done(self) -> bool:
        """Whether the run, and the one that it continues, were finished under the same recipe and data."""
        if self.parent is not None and not self.parent.is_done():
            return False
        return self.record is not None and self.record["recipe_sha256"] == self.recipe_sha256()

    def train(self, threads: int) -> None:
        """Trains in a process of its own; a run that was cut off goes on from its last checkpoint.

        Raises:
            RuntimeError: When the run that it continues is not trained, or the training fails; its log is named.
        """
        if self.parent is not None and not self.parent.is_done():
            parent = self.parent.name
            raise RuntimeError(f"{self.name} continues {parent}, which is not trained: `train --part starts` first.")
        self.folder.mkdir(parents=True, exist_ok=True)
        text, recipe = yaml.safe_dump(self.recipe(), sort_keys=False), self.folder / "recipe.yaml"
        checkpoint, identity = self.folder / "checkpoints" / "last.ckpt", self.folder / "recipe.sha256"
        sha256 = self.recipe_sha256()  # now: the files that it is of may change while the training runs
        resumed = checkpoint.is_file() and identity.is_file() and identity.read_text() == sha256
        if not resumed:
            checkpoint.unlink(missing_ok=True)
        recipe.write_text(text, encoding="utf-8")
        identity.write_text(sha256, encoding="utf-8")
        command = [sys.executable, "-m", "treespark", "fit", "--config", str(recipe)]
        if resumed:
            command += ["--ckpt_path", str(checkpoint)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        started = time.monotonic()
        with open(self.folder / "fit.log", "a" if resumed else "w", encoding="utf-8") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: the training ended with exit status {done.returncode}; see {log.name}.")
        trained: Drafter = Drafter.from_pretrained(self.drafter)
        provenance = trained.extra.get("provenance", {})
        write_json(
            self.folder / "run.json",
            {
                "name": self.name,
                "arm": self.arm,
                "seed": self.seed,
                "start": None if self.parent is None else self.parent.name,
                "steps": self.steps,
                "options": self.options,
                "losses": self.options.get("losses", {}),
                "seconds": None if resumed else round(time.monotonic() - started, 1),  # of a part would mislead
                "threads": threads,
                "num_parameters": sum(p.numel() for p in trained.parameters() if p.requires_grad),
                "drafter_sha256": weights_hash(trained),
                "recipe_sha256": sha256,
                "versions": provenance.get("versions"),
                "hardware": {key: provenance.get(key) for key in ("cpu", "platform")},
            },
        )


def treespark(*words: str) -> None:
    """Runs a treespark command; its output is shown.

    Raises:
        SystemExit: With the command's exit status, when that is not 0.
    """
    print("$ treespark " + " ".join(words), flush=True)
    done = subprocess.run([sys.executable, "-m", "treespark", *words])
    if done.returncode:
        raise SystemExit(done.returncode)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file's content; empty where there is none."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def write_json(file: Path, content: Any) -> None:
    """Writes a JSON file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(file)


def train_all(runs: list[Run], jobs: int) -> None:
    """Trains what is not trained yet, `jobs` at a time, a run after the one that it continues.

    Args:
        runs: The runs.
        jobs: Trainings side by side; each has its share of the processors.

    Raises:
        RuntimeError: When a training fails, or a start is not trained; the others that run are waited for.
    """
    waiting = [run for run in runs if not run.is_done()]
    threads = max(1, (os.cpu_count() or 1) // jobs)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console()) as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("Training", total=len(runs), completed=len(runs) - len(waiting))
        running: dict[Any, Run] = {}
        while waiting or running:
            names = {run.name for run in [*waiting, *running.values()]}
            ready = [run for run in waiting if run.parent is None or run.parent.name not in names]
            ready = ready[: jobs - len(running)]
            for run in ready:
                waiting.remove(run)
                if run.is_done():  # what it continues was not trained when that was asked first
                    bar.advance(task)
                else:
                    running[pool.submit(run.train, threads)] = run
            bar.update(task, description="Training " + ", ".join(run.name for run in running.values()))
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                run = running.pop(future)
                try:
                    future.result()
                except BaseException:
                    waiting.clear()
                    raise
                bar.console.print(
                    f"{run.name}: {run.steps} steps in {(run.record or {}).get('seconds')} s", highlight=False
                )
                bar.advance(task)
