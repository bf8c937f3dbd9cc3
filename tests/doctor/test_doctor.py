"""Each thing that would ruin a run is found and said in a sentence; a sound run is found sound."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from tests.tiny import tiny_drafter
from tests.tiny_text import CHAT_TEMPLATE, GENERATION_TEMPLATE, save_tiny_target
from treespark.cli import dispatch
from treespark.commands.doctor import linked_rooms
from treespark.data import DraftingData, Sample
from treespark.doctor import Report, Surroundings, examine
from treespark.doctor.documents import examine_coverage
from treespark.doctor.models import decoded_features
from treespark.doctor.report import highlighted
from treespark.drafters import DSparkDrafter
from treespark.features import Hybrid
from treespark.generation import generate
from treespark.losses import CrossEntropy, Survival
from treespark.module import DraftingModule
from treespark.policies import Budgeted
from treespark.target import Target, TargetFeatures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and its answers."""
    made = tmp_path_factory.mktemp("doctor")
    save_tiny_target(made / "target", num_hidden_layers=4)
    prompts = [{"prompt": f"what is {i} + {i + 1}?"} for i in range(6)]
    (made / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    generate(str(made / "target"), str(made / "prompts.jsonl"), str(made / "answers.jsonl"), max_new_tokens=24)
    return made


def report() -> Report:
    return Report(Console(file=StringIO(), width=500))


def examined(
    folder: Path,
    target: str = "target",
    drafter: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **options: Any,
) -> Report:
    """The report on a run that is sound but for what is given."""
    name = str(folder / target)
    files = {role: str(folder / "answers.jsonl") for role in ("train", "val", "test")}
    sizes = {"num_layers": 1, "block_size": 3, "markov_rank": 4, "target_layer_ids": [0, 2]} | (drafter or {})
    module = DraftingModule(
        name, partial(DSparkDrafter, **sizes), Budgeted(2, 6), [CrossEntropy(), Survival()], **options
    )
    found = report()
    examine(found, module, DraftingData(name, **files | {"num_anchors": 4} | (data or {})), Surroundings(folder=folder))
    return found


def texts(found: Report, topic: str) -> str:
    return " ".join(finding.text for finding in found.findings if finding.topic == topic)


def errors(found: Report) -> dict[str, str]:
    return {finding.topic: finding.text for finding in found.errors}


def lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("options", [{}, {"features": Hybrid(memory=0.1, disk=0.0)}], ids=["online", "memory"])
def test_a_sound_run(folder: Path, options: dict[str, Any]) -> None:
    """Everything is said, nothing is wrong, packed or not; figures follow from the six answers."""
    found = examined(folder, data={"packing": True, "max_length": 128, "batch_size": 1}, **options)
    assert found.errors == [] and found.exit_code == 0
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    answered = sum(len(row["response_ids"]) for row in rows)
    tokens = sum(
        len(sample) for sample in DraftingData(str(folder / "target"), str(folder / "answers.jsonl")).samples("train")
    )
    assert f"6 documents, {tokens:,} tokens, {answered / tokens:.1%} of them supervised" in texts(found, "train")
    assert "float32" in texts(found, "target") and "quantisation none, device map none" in texts(found, "target")
    assert texts(found, "layers") == "taps [0, 2] of 0 to 2; 3 depths"
    assert "3, '<|mask|>'" in texts(found, "mask token")
    assert "no {% generation %}" in texts(found, "template")
    assert f"{(answered - 6) / 6:.1f} places per document" in texts(found, "anchors")
    assert "6 documents in" in texts(found, "packing")
    assert "are the target's own text" in texts(found, "simulation")
    for topic in ("versions", "machine", "disk", "logits", "features", "step", "memory"):
        assert texts(found, topic), topic
    assert torch.__version__ in texts(found, "versions")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_features_that_were_stored_in_half_precision(folder: Path, dtype: str) -> None:
    """Rounded once in a store, the numbers of a float32 target are still its own, and a training may use them."""
    found = examined(folder, features=Hybrid(memory=0.1, disk=0.0, dtype=dtype))
    assert errors(found) == {} and "relative difference" in texts(found, "features")


def test_template_marks_and_dtype(folder: Path, tmp_path: Path) -> None:
    """A template with {% generation %} is told from one without; bfloat16 passes its own, wider limits."""
    save_tiny_target(tmp_path / "target", GENERATION_TEMPLATE, num_hidden_layers=4)
    shutil.copy(folder / "answers.jsonl", tmp_path)
    found = examined(tmp_path, target_dtype="bfloat16", simulate=False)
    assert found.errors == []
    assert "marks the answers itself" in texts(found, "template") and "bfloat16" in texts(found, "target")


@pytest.mark.parametrize(
    ("options", "topic", "words"),
    [
        ({"drafter": {"mask_token_id": 2}}, "drafter", "mask_token_id 2 is an end token of the target"),
        ({"drafter": {"mask_token_id": 9}}, "mask token", "is the ordinary token"),
        ({"drafter": {"target_layer_ids": [0, 3]}}, "drafter", "must be distinct decoder layers from 0 to 2"),
        ({"data": {"train": "absent.jsonl"}}, "train", "absent.jsonl: no such data file"),
        ({"data": {"val": "absent.jsonl"}}, "val", "absent.jsonl: no such data file"),
        ({"target": "absent"}, "target", "absent does not exist"),
        ({"init_from": "absent"}, "drafter", "absent"),
        ({"target_dtype": "float31"}, "target", "Unknown dtype"),
    ],
)
def test_options_that_ruin_a_run(folder: Path, options: dict[str, Any], topic: str, words: str) -> None:
    """One sentence for the one thing that is wrong (an absent target has no tokenizer either), and exit code 1."""
    found = examined(folder, **options)
    assert words in errors(found)[topic] and found.exit_code == 1
    assert len(found.errors) == 1 or options == {"target": "absent"}


def test_a_start_for_another_target_is_told_beside_the_rest(folder: Path, tmp_path: Path) -> None:
    """`init_from` names a drafter of a target with other weights; a wrong mask token is told as well."""
    other = Target.load(save_tiny_target(tmp_path / "other", num_hidden_layers=4, seed=9))
    drafter = tiny_drafter(other, target_layer_ids=[0, 2])
    drafter.save_pretrained(tmp_path / "drafter")
    start = str(tmp_path / "drafter")
    assert "was made for the target" in errors(examined(folder, init_from=start))["drafter"]
    both = errors(examined(folder, init_from=start, drafter={"mask_token_id": 9}))
    assert "ordinary token" in both["mask token"] and "was made for the target" in both["init_from"]


@pytest.mark.parametrize(
    ("span", "words"), [((3, 3), "nothing would be trained"), ((0, 5), "prompts would be trained")]
)
def test_a_coverage_of_none_or_all(span: tuple[int, int], words: str) -> None:
    """0 of 10 tokens, and 10 of 10."""
    found = report()
    examine_coverage(found, "train", 2 * [Sample(torch.arange(5, dtype=torch.int32), (span,), True, "x:1")])
    assert words in errors(found)["train"]


def test_answers_that_cannot_be_supervised(folder: Path, tmp_path: Path) -> None:
    """Empty answers leave nothing; the line is named."""
    path = lines(tmp_path / "empty.jsonl", {"prompt": "hi", "response": ""})
    assert "answer is empty" in errors(examined(folder, data={"train": path}))["train"]


def test_answers_that_cannot_be_simulated(folder: Path, tmp_path: Path) -> None:
    """Text without token ids, and ids that the target would not have written; without simulation both are fine."""
    foreign = lines(tmp_path / "foreign.jsonl", {"prompt": "hi", "response": "the cat sat"})
    wrong = lines(tmp_path / "wrong.jsonl", {"prompt": "hi", "response_ids": [30, 31, 32, 33, 34, 2]})
    assert (
        "1 of 1 validation answers carry no token ids" in errors(examined(folder, data={"val": foreign}))["simulation"]
    )
    assert "is not the greedy text" in errors(examined(folder, data={"val": wrong}))["simulation"]
    for path in (foreign, wrong):
        assert examined(folder, data={"val": path}, simulate=False).errors == []


def test_no_anchor_anywhere(folder: Path, tmp_path: Path) -> None:
    """An anchor and its successor are both supervised: answers of one token have none; a few such are a warning."""
    short = {"prompt": "hi", "response_ids": [9]}
    alone = lines(tmp_path / "short.jsonl", short)
    assert "no document has an anchor" in errors(examined(folder, data={"train": alone}))["anchors"]
    mixed = lines(tmp_path / "mixed.jsonl", short, {"prompt": "hi", "response_ids": [9, 10, 11, 12]})
    found = examined(folder, data={"train": mixed})
    assert found.errors == [] and "1 of 2 documents have none" in texts(found, "anchors")


def test_too_little_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand bytes do not hold a checkpoint."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("treespark.doctor.costs.shutil.disk_usage", lambda place: usage(1000, 0, 1000))
    assert "0.977 KiB free" in errors(examined(folder))["disk"]


def test_documents_longer_than_the_targets_positions(folder: Path, tmp_path: Path) -> None:
    """A target of 32 positions and documents of more than 40 tokens."""
    save_tiny_target(tmp_path / "target", CHAT_TEMPLATE, num_hidden_layers=4, max_position_embeddings=32)
    shutil.copy(folder / "answers.jsonl", tmp_path)
    assert "the target knows 32 positions" in errors(examined(tmp_path))["lengths"]


def test_features_that_decoding_does_not_see(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of other tokens, as from a cache of another template: both comparisons say so."""
    inner = DraftingModule._features

    def shifted(self: DraftingModule, batch: Any) -> TargetFeatures:
        return TargetFeatures(*(part.roll(1, 1) for part in inner(self, batch)))

    monkeypatch.setattr(DraftingModule, "_features", shifted)
    assert {"logits", "features"} <= errors(examined(folder)).keys()


def test_a_packed_rows_last_document_is_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the boundary between documents, the second one of a row would see the first: that is found."""
    inner = Target.features

    def unbounded(self: Target, ids: Any, layers: Any, mask: Any = None, positions: Any = None) -> TargetFeatures:
        return inner(self, ids, layers, mask)

    monkeypatch.setattr(Target, "features", unbounded)
    assert "features" in errors(examined(folder, data={"packing": True, "max_length": 128}))
    assert examined(folder).errors == []  # one document a row needs none


def test_decoded_features_are_those_of_the_whole_text(folder: Path) -> None:
    """Float64: prefill of 4 tokens, then 7 one by one, against one forward."""
    target = Target.load(str(folder / "target"), dtype="float64")
    ids = torch.randint(4, 60, (1, 11), generator=torch.Generator().manual_seed(0))
    for one, other in zip(decoded_features(target, ids, [0, 2], 4), target.features(ids, [0, 2]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_the_supervised_text_is_marked(folder: Path) -> None:
    """Exactly the answer stands between the marks, with its end token."""
    data = DraftingData(str(folder / "target"), str(folder / "answers.jsonl"))
    sample, tokenizer = data.samples("train")[0], data.encoder.tokenizer
    shown = highlighted(sample, tokenizer, marks=True).plain
    inside = shown.split("«")[1].split("»")[0]
    assert inside == tokenizer.decode(sample.ids[sample.prompt_length :].tolist())
    assert highlighted(sample, tokenizer, marks=False).plain == shown.replace("«", "").replace("»", "")


def test_a_checkout_without_links(tmp_path: Path) -> None:
    """Git on Windows may write a link as a file that holds its target's name."""
    (tmp_path / "losses").write_text("../losses")
    (tmp_path / "policies").mkdir()
    (said,) = linked_rooms(tmp_path)
    assert "losses is no folder" in said and "core.symlinks=true" in said


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`treespark doctor --config R`: 0 for a sound recipe; 1 and all sentences at the end for one with two faults."""
    monkeypatch.chdir(folder)
    recipe = {
        "trainer": {"accelerator": "cpu", "max_steps": 2, "logger": False, "default_root_dir": "run"},
        "model": {
            "target": "target",
            "drafter": {"class_path": "DSparkDrafter", "init_args": {"num_layers": 1, "markov_rank": 4}},
            "policy": {"class_path": "Budgeted", "init_args": {"k": 2, "num_draft_nodes": 6}},
            "losses": [{"class_path": "CrossEntropy"}],
        },
        "data": {"train": "answers.jsonl", "val": "answers.jsonl", "max_length": 128},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert dispatch(["doctor", "--config", "recipe.yaml"]) == 0
    out = capsys.readouterr().out
    assert "Nothing found that would ruin this run." in out and "2 steps take" in out and "«" in out
    assert not Path("run").exists()
    wrong = ["--trainer.accelerator", "cuda", "--trainer.accumulate_grad_batches", "2", "--data.val", "absent.jsonl"]
    if torch.cuda.is_available():
        wrong[1] = "cpu"
    assert dispatch(["doctor", "--config", "recipe.yaml", *wrong]) == 1
    conclusion = capsys.readouterr().out.split("2 things would ruin this run:")[1]
    assert "trainer: " in conclusion and "val: absent.jsonl: no such data file" in conclusion
    assert dispatch(["doctor", "--config", "recipe.yaml", "--trainer.accumulate_grad_batches", "2"]) == 1
    assert "data.micro_batches" in capsys.readouterr().out
