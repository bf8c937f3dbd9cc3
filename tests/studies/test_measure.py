"""What the first study measures: untouched prompts, budgets, and gradients of single loss terms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.study_results import FOLDER, scripts
from tests.tiny import tiny_drafter
from tests.tiny_text import save_tiny_target
from treespark.bench.results import Results
from treespark.generation import generate
from treespark.policies import Budgeted, Chain
from treespark.target import Target

PROMPTS = ["red fox", "blue sea", "two hills", "an old tree", "a road"]


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    """The study's scripts."""
    with scripts("runs", "study", "measure", "gradients") as found:
        yield SimpleNamespace(**found)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target of six layers, on disk."""
    return save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=6)


def make_plan(study: Any, target: str, folder: Path, **bench: Any) -> Any:
    """A plan with a chain and a tree run that are done, and two suites: of five prompts and of two."""
    model = Target.load(target)
    suites = folder / "suites"
    suites.mkdir()
    for name, count in (("long", 5), ("short", 2)):
        (suites / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS[:count]))

    class Done(study.runs.Run):  # type: ignore[misc, name-defined]
        def is_done(self) -> bool:
            return True

    runs = []
    for seed, (arm, policy) in enumerate({"dspark": Chain(), "control": Budgeted(k=2, num_draft_nodes=6)}.items()):
        run = Done(f"{arm}-0", arm, 0, 1, {}, folder / arm, folder)
        drafter = tiny_drafter(model, seed=seed)
        drafter.recorded_policy = policy.config()
        drafter.save_pretrained(run.drafter)
        runs.append(run)
    content = {"target": target, "bench": {"num_prompts": 2, "budgets": [], "policies": [], "budget_runs": []} | bench}
    data = {"suites": str(suites), "max_new_tokens": 8}
    return SimpleNamespace(content=content, data=data, folder=folder, runs=lambda part: runs if part == "arms" else [])


def test_prompts_that_a_round_opened_are_left_out(study: Any, target: str, tmp_path: Path) -> None:
    """Of five prompts the third and fourth are measured; a suite that is used up is taken whole, and named."""
    plan = make_plan(study, target, tmp_path, opened=2)
    study.measure.test(plan, tmp_path / "results")
    found = Results.load(tmp_path / "results" / "test.json")
    whole = Target.load(target)
    from treespark.bench import load_suite

    hashes = {
        name: [prompt.sha256 for prompt in load_suite(tmp_path / "suites" / f"{name}.jsonl", whole).prompts]
        for name in ("long", "short")
    }
    measured = {name: [item.sha256 for item in found.prompts if item.suite == name] for name in hashes}
    assert measured == {"long": hashes["long"][2:4], "short": hashes["short"]}
    assert found.settings["opened_suites"] == ["short"] and found.complete
    assert [arm["name"] for arm in found.arms] == ["dspark-0/recorded", "control-0/recorded"]


def test_budgets_and_policies_of_chosen_runs(study: Any, target: str, tmp_path: Path) -> None:
    """A run of `budget_runs` is simulated under each policy once: what it was recorded with is not done again."""
    options = {"budgets": [3], "policies": ["DDTree(num_draft_nodes=6)"], "budget_runs": ["control-0"]}
    study.measure.test(make_plan(study, target, tmp_path, **options), tmp_path / "results")
    found = Results.load(tmp_path / "results" / "test.json")
    names = [arm["name"].split("/", 1)[1] for arm in found.arms if arm["drafter"] == "control-0"]
    policies = [json.dumps(arm["policy"], sort_keys=True) for arm in found.arms if arm["drafter"] == "control-0"]
    assert len(policies) == len(set(policies)) and names[0] == "recorded" and "chain" in names
    assert (
        sum("DDTree" in name for name in names) == sum("=3" in name for name in names) == 1
        and found.settings["opened_suites"] == []
    )


def test_gradients_of_the_plan(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control's losses are the base; every term of an arm is taken alone, with its coefficient."""
    asked: list[Any] = []
    monkeypatch.setattr(study.measure, "term_gradients", lambda *given: asked.extend(given) or {"base": {}})
    plan = study.study.Plan(str(FOLDER / "small.yaml"))
    plan.folder = tmp_path / "study"
    study.measure.gradients(plan, tmp_path)
    recipe, terms, steps, _ = asked
    assert [item["class_path"] for item in recipe["model"]["losses"]] == ["CrossEntropy", "L1", "Confidence"]
    assert terms.keys() == {"CrossEntropy", "L1", "Confidence", "Survival", "Coverage"} and steps == 2
    assert terms["Survival"] == [{"class_path": "Survival", "init_args": {"coefficient": 0.5}}]
    assert recipe["model"]["init_from"].endswith("chain-wide/drafter")
    assert json.loads((tmp_path / "gradients.json").read_text()) == {
        "drafters": {"chain-wide": {"sha256": None}},
        "terms": {"base": {}},
    }


def test_gradients_of_terms(study: Any, target: str, tmp_path: Path) -> None:
    """The base is its own direction, twice the coefficient twice the norm, terms add up, and no weight changes."""
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "train.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": words}) + "\n" for words in PROMPTS))
    generate(target, str(prompts), str(answers), max_new_tokens=24, batch_size=4)
    model = Target.load(target)
    start = tiny_drafter(model, seed=3)
    start.save_pretrained(tmp_path / "start")
    terms = [{"class_path": name, "init_args": {"coefficient": 0.5}} for name in ("CrossEntropy", "L1")]
    recipe = {
        "model": {
            "target": target,
            "drafter": {"class_path": "DSparkDrafter", "init_args": start.config()["init_args"]},
            "policy": {"class_path": "Budgeted", "init_args": {"k": 2, "num_draft_nodes": 6}},
            "init_from": str(tmp_path / "start"),
            "losses": terms,
        },
        "data": {"train": str(answers), "num_anchors": 6, "batch_size": 2, "max_length": 64},
    }
    twice = {"class_path": "CrossEntropy", "init_args": {"coefficient": 1.0}}
    asked = {"CrossEntropy": terms[:1], "L1": terms[1:], "twice": [twice], "again": terms}
    found = study.gradients.term_gradients(recipe, asked, 3, tmp_path / "recipes")
    assert list(found) == ["base", "CrossEntropy", "L1", "twice", "again"]
    assert found["base"]["cosine"] == found["again"]["cosine"] == pytest.approx(1.0)
    assert found["again"]["norm"] == pytest.approx(found["base"]["norm"], rel=1e-5)
    assert found["twice"]["norm"] == pytest.approx(2 * found["CrossEntropy"]["norm"], rel=1e-4)
    # What two terms add along the base's direction is the base itself.
    along = sum(found[name]["cosine"] * found[name]["norm"] for name in ("CrossEntropy", "L1"))
    assert along == pytest.approx(found["base"]["norm"], rel=1e-4)
