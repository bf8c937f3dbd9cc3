"""Files of answers: resumable after any interruption, and never mixed up with other arguments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.answering import PROMPTS, read, run, write
from treespark.data.answers import AnswerStore
from treespark.generation.local import LocalBackend
from treespark.target import Target


def test_a_complete_output_is_reused_and_other_arguments_are_an_error(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    first = run(target, prompts, output)
    before = output.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "answers", None)
        second = run(target, prompts, output)
    assert second.num_reused == second.num_answers == first.num_answers and second.num_tokens == first.num_tokens
    with pytest.raises(ValueError, match=r"other arguments \(max_new_tokens: 12 there, 5 now\).*--overwrite"):
        run(target, prompts, output, max_new_tokens=5)
    assert output.read_bytes() == before
    assert run(target, prompts, output, max_new_tokens=5, overwrite=True).num_reused == 0
    assert max(len(line["response_ids"]) for line in read(output)) == 5
    write(Path(prompts), PROMPTS[1:])
    with pytest.raises(ValueError, match="prompts_sha256"):
        run(target, prompts, output, max_new_tokens=5)


def test_foreign_and_edited_outputs_are_not_touched(target: str, prompts: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("mine\n")
    with pytest.raises(ValueError, match="was not written by treespark generate"):
        run(target, prompts, output)
    run(target, prompts, output, overwrite=True)
    output.write_text(output.read_text().replace("tell", "say"))
    with pytest.raises(ValueError, match="was changed after it was written"):
        run(target, prompts, output)
    with pytest.raises(ValueError, match="the same file"):
        run(target, prompts, Path(prompts))


def test_answers_of_a_fine_tuned_target_are_not_mixed_in(target: str, prompts: str, tmp_path: Path) -> None:
    """Same name, sizes and head, but one weight of a layer is another: refused, neither kept nor continued."""
    other, output = tmp_path / "target", tmp_path / "out.jsonl"
    shutil.copytree(target, other)
    run(str(other), prompts, output, limit=2)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"written with other arguments \(weights: "):
        run(str(other), prompts, output, limit=2)


def test_the_record_beside_the_output(target: str, prompts: str, tmp_path: Path) -> None:
    run(target, prompts, tmp_path / "out.jsonl", limit=5)
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["identity"]["fingerprint"] == Target.load(target).spec.fingerprint
    assert meta["num_answers"] == 5 and meta["identity"]["limit"] == 5 and "torch" in meta["versions"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.meta.json", "prompts.jsonl"]


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_an_exception_costs_one_unit(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Stopped in unit `calls` + 1 of 3, a restart redoes 3 - `calls` units and writes the same bytes."""
    run(target, prompts, tmp_path / "whole.jsonl")
    real, done = LocalBackend._decode, []

    def failing(*args: Any) -> Any:
        done.append(1)
        if len(done) == calls + 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(LocalBackend, "_decode", failing)
    with pytest.raises(KeyboardInterrupt):
        run(target, prompts, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    done[:] = [1] * 10
    summary = run(target, prompts, tmp_path / "out.jsonl")
    assert len(done) - 10 == 3 - calls and summary.num_reused == 8 * calls
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.999])
def test_a_partial_file_torn_anywhere_is_continued(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Any prefix of the partial file, and a tail of foreign bytes, leads to the same output."""
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(AnswerStore, "finish", lambda *args: None)
    run(target, prompts, output)
    monkeypatch.undo()
    partial = tmp_path / "out.jsonl.partial"
    whole = partial.read_bytes()
    partial.write_bytes(whole[: int(share * len(whole))] + (b"\x00\xff" if share < 1 else b""))
    run(target, prompts, output)
    run(target, prompts, tmp_path / "whole.jsonl")
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes() and not partial.exists()


def test_a_partial_file_of_other_arguments(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(AnswerStore, "finish", lambda *args: None)
    run(target, prompts, output)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"out.jsonl.partial was written with other arguments \(batch_size: 1"):
        run(target, prompts, output, batch_size=4)
    assert run(target, prompts, output, batch_size=4, overwrite=True).num_reused == 0


@pytest.mark.parametrize("step", ["meta", "output"])
def test_killed_between_the_last_writes(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Dead before the record, or between the record and the output: the partial file still has every answer."""
    output, real = tmp_path / "out.jsonl", Path.replace

    def replace(self: Path, to: Path) -> Path:
        if (step == "meta") == to.name.endswith("meta.json"):
            raise KeyboardInterrupt
        return real(self, to)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        run(target, prompts, output)
    monkeypatch.undo()
    assert run(target, prompts, output).num_reused == 23 and len(read(output)) == 23
