"""The first study's stages: split, composed recipes, rounds of many drafters, path mass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.study_results import FOLDER, scripts
from tests.tiny import tiny_drafter, tiny_target
from tests.tiny_text import tiny_tokenizer
from treespark.bench import Suite, make_arms, run
from treespark.bench.suites import BenchPrompt
from treespark.data.template import ChatEncoder
from treespark.policies import Budgeted


@pytest.fixture(scope="module")
def study() -> Iterator[Any]:
    """The study's scripts."""
    with scripts("runs", "split", "evaluation", "study") as found:
        yield SimpleNamespace(**found)


def lines(counts: dict[str, int], **fields: Any) -> list[str]:
    return [
        json.dumps({"category": name, "prompt": f"{name} {i}", "response": "yes"} | fields)
        for name, count in counts.items()
        for i in range(count)
    ]


def test_split(study: Any, tmp_path: Path) -> None:
    """Of 60 and 20 lines 8 are set apart: 6 and 2. Nothing is lost or twice; the seed decides; too long ones go."""
    file, train, validation = (tmp_path / f"{name}.jsonl" for name in ("answers", "train", "validation"))
    written = lines({"a": 60, "b": 20})
    longer = json.dumps({"category": "a", "prompt": "long " * 50, "response": "yes"})
    file.write_text("\n".join([*written[:7], longer, *written[7:]]) + "\n")
    options = {"num_validation": 8, "longest": 100, "encoder": ChatEncoder(tiny_tokenizer())}
    assert study.split.split(file, train, validation, seed=3, **options) == 1
    first = validation.read_text()
    held = [json.loads(line)["category"] for line in first.splitlines()]
    assert held == ["a"] * 6 + ["b"] * 2
    assert sorted(train.read_text().splitlines() + first.splitlines()) == sorted(written)
    study.split.split(file, train, validation, seed=3, **options)
    assert validation.read_text() == first
    study.split.split(file, train, validation, seed=4, **options)
    assert validation.read_text() != first
    with pytest.raises(ValueError, match="80 lines of at most 100 tokens: 80 cannot be set apart"):
        study.split.split(file, train, validation, seed=3, **options | {"num_validation": 80})


def make_run(study: Any, folder: Path, parent: Any = None, **options: Any) -> Any:
    return study.runs.Run("x-2", "x", 2, 30, options, folder / "runs" / "x-2", folder, parent)


def test_composed_recipe(study: Any, tmp_path: Path) -> None:
    """The plan's changes and nothing else; the start is part of the identity, so is its drafter."""
    plain = make_run(study, tmp_path, policy="chain", head_dim_ratio=1.0).recipe()
    assert plain["model"]["policy"] == {"class_path": "Chain"} and plain["trainer"]["max_steps"] == 30
    assert plain["seed_everything"] == plain["data"]["seed"] == 2 and "init_from" not in plain["model"]
    start = study.runs.Run("s", "s", 0, 30, {}, tmp_path / "runs" / "s", tmp_path)
    run = make_run(study, tmp_path, start, losses={"Survival": {"coefficient": 0.5}}, base={"L1": {"coefficient": 0.9}})
    recipe = run.recipe()
    assert recipe["model"]["init_from"] == str(tmp_path / "runs" / "s" / "drafter")
    assert recipe["model"]["losses"][-1] == {"class_path": "Survival", "init_args": {"coefficient": 0.5}}
    assert recipe["model"]["losses"][1]["init_args"] == {"coefficient": 0.9, "gamma": 4.0}
    shared = yaml.safe_load((FOLDER / "recipe.yaml").read_text())
    assert (
        recipe["model"]["drafter"] == shared["model"]["drafter"]
        and recipe["model"]["policy"] == shared["model"]["policy"]
    )
    before = run.recipe_sha256()
    record = {"recipe_sha256": start.recipe_sha256(), "drafter_sha256": "a"}
    study.runs.write_json(start.folder / "run.json", record)
    after = run.recipe_sha256()
    study.runs.write_json(run.folder / "run.json", {"recipe_sha256": after})
    assert before != after and run.is_done()
    study.runs.write_json(start.folder / "run.json", record | {"drafter_sha256": "b"})
    assert not run.is_done()
    study.runs.write_json(start.folder / "run.json", record)
    study.runs.write_json(tmp_path / "data.json", {"train_sha256": "other data"})
    assert not start.is_done() and not run.is_done()
    study.runs.write_json(run.folder / "run.json", {"recipe_sha256": run.recipe_sha256()})
    assert not run.is_done()  # its start is not
    with pytest.raises(RuntimeError, match="x-2 continues s, which is not trained: `train --part starts` first"):
        run.train(1)
    for options, words in (({"policy": "Chain"}, "expected chain or tree"), ({"base": {"L2": {}}}, "CrossEntropy")):
        with pytest.raises(ValueError, match=words):
            make_run(study, tmp_path, **options).recipe()
    with pytest.raises(ValueError, match=r"x has the keys \['looses'\]"):
        make_run(study, tmp_path, looses={}).recipe()


def test_the_plan(study: Any, tmp_path: Path) -> None:
    """Every run of the plan composes, starts exist, and equal compute follows from the measured step times."""
    content = yaml.safe_load((FOLDER / "plan.yaml").read_text()) | {"folder": str(tmp_path)}
    content["arms"] = {
        "control": {"start": "chain-wide", "steps": 100, "seeds": [0, 1]},
        "treespark": {"start": "chain-wide", "steps": 100},
        "longer": {"start": "chain-wide", "steps": {"of": "control", "compute_of": "treespark"}},
    }
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(content))
    assert [run.name for run in study.study.Plan(str(file)).runs("arms")] == ["control-0", "control-1", "treespark-1"]
    recipes = {run.arm: run.recipe_sha256() for run in study.study.Plan(str(file)).timed()}
    times = {"recipes": recipes, "seconds": {"control": 0.5, "treespark": 0.8}}
    study.runs.write_json(tmp_path / "step_times.json", times)
    plan = study.study.Plan(str(file))
    assert ("longer-1", 160) in [(run.name, run.steps) for run in plan.runs("arms")]
    every = [run for part in ("starts", "search", "arms") for run in plan.runs(part)]
    assert all(run.recipe() for run in every) and len({run.name for run in every}) == len(every)
    seeds = {part: {run.seed for run in plan.runs(part)} for part in ("starts", "search")}
    assert seeds == {"starts": {0}, "search": {1}}
    content["arms"]["treespark"]["learning_rate"] = 1.0  # then the time is of another recipe
    file.write_text(yaml.safe_dump(content))
    assert not study.study.Plan(str(file)).step_times()
    content["search"]["control-0"] = content["search"]["control-lr-0.001"]
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="two runs are called control-0, and would share a folder"):
        study.study.Plan(str(file)).runs("arms")
    del content["search"]["control-0"]
    content["arms"]["control"]["start"] = "nowhere"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"control continues 'nowhere'; expected one of the starts chain-narrow, "):
        study.study.Plan(str(file)).runs("arms")


def test_the_small_plan(study: Any) -> None:
    """Its runs compose, from starts that it has; it stays apart from the study's own folder."""
    plan = study.study.Plan(str(FOLDER / "small.yaml"))
    arms = plan.runs("arms")
    assert {run.parent.name for run in arms} == {run.name for run in plan.runs("starts")}
    assert all(run.recipe() for run in arms) and plan.folder != study.study.Plan(str(FOLDER / "plan.yaml")).folder


def test_rounds_are_those_of_bench(study: Any, tmp_path: Path) -> None:
    """In float64 the rounds of texts side by side are those of `treespark bench`; arms are added, not redone."""
    target = tiny_target(dtype=torch.float64)
    drafters = {name: tiny_drafter(target, seed=seed) for seed, name in enumerate(("one", "two"))}
    for drafter in drafters.values():
        drafter.recorded_policy = Budgeted(k=2, num_draft_nodes=6).config()
    prompts = [BenchPrompt(str(i), tuple(range(5 + i, 9 + 2 * i)), f"s:{i}") for i in range(19)]
    suites = [Suite("a", tuple(prompts[:4])), Suite("b", tuple(prompts[4:]))]
    expected = run(
        target, drafters, suites, make_arms(drafters, "chain,tree"), max_new_tokens=12, simulated=True, progress=False
    )
    texts = study.evaluation.answer(target, suites, 12, tmp_path / "answers.json")
    assert study.evaluation.answer(target, suites, 12, tmp_path / "answers.json") == texts
    layers = drafters["one"].layer_ids
    held = study.evaluation.Texts(target, suites, texts, layers, tmp_path / "features.pt")
    file = tmp_path / "results.json"
    held.evaluate(drafters, make_arms(drafters, "chain"), file, {"max_new_tokens": 12})
    simulated = []
    original = held.simulate
    held.simulate = lambda drafter, arm, *rest: simulated.append(arm.name) or original(drafter, arm, *rest)
    found = held.evaluate(drafters, make_arms(drafters, "chain,tree"), file, {"max_new_tokens": 12})
    assert simulated == ["one/tree", "two/tree"] and found.complete
    assert found.prompts == expected.prompts
    assert found.summary("two/tree").tau == expected.summary("two/tree").tau
    answers = [replace(text, answer=text.answer[:-1]) for text in texts]
    other = study.evaluation.Texts(target, suites, answers, layers, tmp_path / "features.pt")
    shutil.copy(file, tmp_path / "copy.json")
    simulate = other.simulate
    other.simulate = lambda drafter, arm, *rest: simulated.append(arm.name) or simulate(drafter, arm, *rest)
    simulated.clear()
    other.evaluate(drafters, make_arms(drafters, "chain"), tmp_path / "copy.json", {})
    assert simulated == ["one/chain", "two/chain"]  # other answers are not those that the file is of
    drafters["two"] = tiny_drafter(target, seed=5)
    simulated.clear()
    held.evaluate(drafters, make_arms(drafters, "chain"), file, {"max_new_tokens": 12})
    assert simulated == ["two/chain"]


def test_path_mass(study: Any) -> None:
    """A chain of probabilities 0.5 and 0.25 on a text that takes the first alone: two bins, hits 1 and 0."""
    packed = SimpleNamespace(
        depths=torch.tensor([[0, 1, 2]]),
        exists=torch.ones(1, 3, dtype=torch.bool),
        scores=torch.tensor([[0.5, 0.25]]).log().cumsum(1),
        on_path=lambda tokens: torch.tensor([[True, int(tokens[0, 0]) == 7, False]]),
    )
    packed.scores = torch.cat([torch.zeros(1, 1), packed.scores], 1)
    measure = study.evaluation.PathMass()
    ids = torch.tensor([[3, 7, 8, 9]])
    measure(ids, torch.tensor([4]), torch.tensor([0]), torch.tensor([0]), packed)
    assert measure.reliability() == [[pytest.approx(0.125), 0.0, 1], [pytest.approx(0.5), 1.0, 1]]
    measure(ids, torch.tensor([2]), torch.tensor([0]), torch.tensor([0]), packed)  # the second token is not known
    assert [row[2] for row in measure.reliability()] == [1, 2]


def test_trainings_follow_their_starts(study: Any, tmp_path: Path) -> None:
    """Two at a time: an arm waits for its start, what is done is left alone, and a failure ends the stage."""
    events: list[tuple[str, int]] = []

    class Fake(study.runs.Run):  # type: ignore[misc, name-defined]
        def train(self, threads: int) -> None:
            if self.name == "broken":
                raise RuntimeError("broken: the training ended")
            assert self.parent is None or self.parent.record
            events.append((self.name, threads))
            self.folder.mkdir()
            study.runs.write_json(
                self.folder / "run.json", {"recipe_sha256": self.recipe_sha256(), "drafter_sha256": self.name}
            )

    def fake(name: str, parent: Any = None, **options: Any) -> Any:
        return Fake(name, name, 0, 5, options, tmp_path / name, tmp_path, parent)

    wide = fake("wide", policy="chain")
    runs = [fake("arm", wide), wide, fake("other")]
    study.runs.train_all(runs, jobs=2)
    assert {name for name, _ in events} == {"arm", "wide", "other"} and events[-1][0] == "arm"
    study.runs.train_all(runs, jobs=2)
    assert len(events) == 3
    with pytest.raises(RuntimeError, match="broken"):
        study.runs.train_all([fake("broken"), fake("later", fake("broken"))], jobs=1)
    assert len(events) == 3


def test_unknown_parts(study: Any) -> None:
    """A part that no stage has is named, with those that it has."""
    plan = str(FOLDER / "small.yaml")
    with pytest.raises(SystemExit, match="unknown part 'arm'; expected some of starts, search, times, arms"):
        study.study.train(plan, "starts, arm")
    with pytest.raises(SystemExit, match="unknown part 'tests'; expected some of validation, "):
        study.study.bench(plan, "tests")
    with pytest.raises(FileNotFoundError, match="none.yaml: no such plan"):
        study.study.plan("none.yaml")
