"""What the study measures of its drafters: on validation prompts, on the test suites, calibration, live speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation import PathMass, Texts, answer, answered
from gradients import term_gradients
from runs import Run, treespark, write_json
from treespark.bench import Suite, load_suite, make_arms
from treespark.bench.arms import Arm
from treespark.bench.sources import find_sources
from treespark.drafters import Drafter
from treespark.drafters.source import open_drafter
from treespark.target import Target

if TYPE_CHECKING:
    from study import Plan


def validation(plan: Plan, results: Path) -> None:
    """Simulated rounds of starts, search candidates and arms on the validation prompts."""
    runs = _done(plan, "starts", "search", "arms")
    target = Target.load(plan.content["target"])
    drafters = load(target, runs)
    texts = validation_texts(plan, target, drafters)
    arms = make_arms(drafters, "recorded,tree")
    texts.evaluate(drafters, arms, results / "validation.json", {"max_new_tokens": plan.data["max_new_tokens"]})


def test(plan: Plan, results: Path) -> None:
    """Simulated rounds of the arms on the test suites; some of them under other budgets and policies too."""
    settings, limit = plan.content["bench"], plan.data["max_new_tokens"]
    runs = _done(plan, "arms")
    target = Target.load(plan.content["target"])
    drafters = load(target, runs)
    opened = settings.get("opened", 0)
    suites = [
        load_suite(source, target, num_prompts=opened + settings["num_prompts"], max_new_tokens=limit)
        for source in find_sources([plan.data["suites"]])
    ]
    used_up = [suite.name for suite in suites if opened and len(suite.prompts) <= opened]
    suites = [suite if suite.name in used_up else unopened(suite, opened) for suite in suites]
    texts = answer(target, suites, limit, plan.folder / "test_answers.json")
    held = Texts(target, suites, texts, layers(drafters), plan.folder / "test_features.pt")
    arms = make_arms(drafters, "recorded")
    chosen = {run.name: drafters[run.name] for run in _named(plan, settings["budget_runs"], "arms")}
    if chosen:
        more = make_arms(chosen, "chain,tree", None, settings["budgets"])
        more += make_arms(chosen, "recorded", settings["policies"])
        arms += [arm for arm in more if not any(_same(arm, other) for other in arms)]
    options = {"max_new_tokens": limit, "num_prompts": settings["num_prompts"], "opened_suites": used_up}
    held.evaluate(drafters, arms, results / "test.json", options)


def calibration(plan: Plan, results: Path) -> None:
    """Confidence head, path mass and packed-tree diagnostics on the validation prompts."""
    from lightning.pytorch import Trainer

    from treespark.commands.recipe import read_recipe

    runs = _named(plan, plan.content["bench"]["calibration"], "starts", "arms")
    found: dict[str, Any] = {"drafters": {run.name: {"sha256": _sha256(run)} for run in runs}, "reliability": {}}
    target = Target.load(plan.content["target"])
    drafters = load(target, runs)
    texts = validation_texts(plan, target, drafters)
    for run in runs:
        words = ["--config", str(run.folder / "recipe.yaml"), "--model.policy", "Budgeted", "--model.init_from", "null"]
        words += ["--model.policy.k", "4", "--model.policy.num_draft_nodes", "32", "--model.simulate", "false"]
        module, data, _ = read_recipe(words, {})
        trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        trainer.validate(module, data, ckpt_path=str(run.folder / "checkpoints" / "last.ckpt"), verbose=False)
        mass, (arm,) = PathMass(), make_arms(drafters[run.name], "tree")
        texts.simulate(drafters[run.name], arm, mass)
        metrics = {key.removeprefix("val/"): float(value) for key, value in trainer.callback_metrics.items()}
        found[run.name] = metrics
        assert module.metrics.confidence is not None
        bins = zip(*(column.tolist() for column in module.metrics.confidence.reliability()), strict=True)
        found["reliability"][run.name] = {
            "confidence": [list(item) for item in bins if item[2]],
            "path_mass": mass.reliability(),
        }
        write_json(results / "calibration.json", found)


def gradients(plan: Plan, results: Path) -> None:
    """Norms of the loss terms' gradients, and their cosines with the base losses', where the arms start."""
    arms = {run.arm: run for run in reversed(plan.runs("arms"))}  # the first seed of each
    recipe = arms["control"].recipe()
    count = len(recipe["model"]["losses"])
    terms = {item["class_path"]: [item] for item in recipe["model"]["losses"]}
    for run in arms.values():
        terms |= {item["class_path"]: [item] for item in run.recipe()["model"]["losses"][count:]}
    found = term_gradients(recipe, terms, plan.content["bench"]["gradient_steps"], plan.folder / "gradients")
    parent = arms["control"].parent
    drafters = {} if parent is None else {parent.name: {"sha256": _sha256(parent)}}
    write_json(results / "gradients.json", {"drafters": drafters, "terms": found})


def live(plan: Plan, results: Path) -> None:
    """Live decoding of the final arms at batch 1, by turns with plain decoding."""
    settings = plan.content["bench"]
    runs = _named(plan, settings["live"], "arms")
    words = ["--figures", "false", "--drafter", ",".join(f"{run.name}={run.drafter}" for run in runs)]
    words += ["--suites", settings["live_suites"], "--num_prompts", str(settings["live_prompts"])]
    words += ["--max_new_tokens", str(plan.data["max_new_tokens"]), "--modes", "plain,recorded"]
    words += ["--policies", ", ".join(dict.fromkeys(settings["live_pair"].values()))]
    words += ["--output", str(results / "live.json")]
    treespark("bench", *words)


PARTS: dict[str, Callable[[Plan, Path], None]] = {
    "validation": validation,
    "calibration": calibration,
    "gradients": gradients,
    "test": test,
    "live": live,
}


def load(target: Target, runs: Sequence[Run]) -> dict[str, Drafter]:
    """Loads the runs' drafters, by name."""
    return {run.name: open_drafter(run.drafter).load(target).eval() for run in runs}


def validation_texts(plan: Plan, target: Target, drafters: dict[str, Drafter]) -> Texts:
    """The validation prompts with the answers that the study generated."""
    file = plan.folder / "validation.jsonl"
    suite = load_suite(file, target, max_new_tokens=plan.data["max_new_tokens"])
    return Texts(target, [suite], answered(suite, file), layers(drafters), plan.folder / "validation_features.pt")


def unopened(suite: Suite, opened: int) -> Suite:
    """A suite without its first prompts, which an earlier round has measured on."""
    return replace(suite, prompts=suite.prompts[opened:])


def layers(drafters: dict[str, Drafter]) -> list[int]:
    """The tapped layers, which the study's drafters have in common."""
    return list(next(iter(drafters.values())).layer_ids)


def _done(plan: Plan, *parts: str) -> list[Run]:
    runs = [run for part in parts for run in plan.runs(part) if run.is_done()]
    if not runs:
        raise SystemExit(f"bench: nothing of {', '.join(parts)} is trained; run `study.py train` first.")
    return runs


def _named(plan: Plan, names: Sequence[str], *parts: str) -> list[Run]:
    """Runs by name.

    Raises:
        SystemExit: When one of them is not trained.
    """
    runs = {run.name: run for run in _done(plan, *parts)}
    if missing := [name for name in names if name not in runs]:
        raise SystemExit(f"bench: the plan names {', '.join(missing)}; trained are {', '.join(runs)}.")
    return [runs[name] for name in names]


def _sha256(run: Run) -> str | None:
    return None if run.record is None else run.record["drafter_sha256"]


def _same(arm: Arm, other: Arm) -> bool:
    if arm.policy is None or other.policy is None:
        return False
    return arm.drafter == other.drafter and arm.policy.config() == other.policy.config()
