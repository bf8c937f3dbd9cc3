"""Generated answers: greedy, token-exact, resumable after any kill, and never mixed up with other arguments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_text import save_tiny_target
from treespark import generation
from treespark.data import ChatEncoder, DraftingData
from treespark.data.answers import AnswerStore
from treespark.generation import GenerationSummary, answer_batch, generate
from treespark.target import Target

PROMPTS = [{"prompt": f"tell {'me ' * (i % 5)}about {i}", "id": i, "category": "x"} for i in range(23)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_target(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write(tmp_path / "prompts.jsonl", PROMPTS)


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def run(target: str, prompts: str, output: Path, **options: Any) -> GenerationSummary:
    defaults: dict[str, Any] = {"max_new_tokens": 12, "batch_size": 3, "dtype": "float64"}
    return generate(target, prompts, str(output), **(defaults | options))


def greedy(model: Target, ids: list[int], limit: int) -> list[int]:
    """Plain greedy decoding by whole forward passes, one token at a time."""
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < limit and not (answer and answer[-1] in model.spec.eos_token_ids):
            logits = model.model(input_ids=torch.tensor([ids + answer])).logits[0, -1]
            answer.append(int(logits.argmax()))
    return answer


def test_answers_equal_greedy_decoding_one_by_one(target: str, prompts: str, tmp_path: Path) -> None:
    """float64: left padding and batching change no token; lines keep order and fields; both finish reasons occur."""
    summary = run(target, prompts, tmp_path / "out.jsonl")
    model = Target.load(target, dtype="float64")
    encoder = ChatEncoder(model.tokenizer)
    lines = read(tmp_path / "out.jsonl")
    assert [{key: line[key] for key in PROMPTS[0]} for line in lines] == PROMPTS
    for line in lines:
        expected = greedy(model, encoder.prompt_ids([{"role": "user", "content": line["prompt"]}]), 12)
        assert line["response_ids"] == expected
        assert line["finish_reason"] == ("stop" if expected[-1] == 2 else "length")
        assert line["response"] == encoder.answer_text(expected)
    assert {line["finish_reason"] for line in lines} == {"stop", "length"}
    assert summary.num_answers == 23 and summary.num_tokens == sum(len(line["response_ids"]) for line in lines)
    assert summary.num_stopped == sum(line["finish_reason"] == "stop" for line in lines) and summary.num_reused == 0


def test_the_generation_config_of_the_target_is_not_applied(target: str, tmp_path: Path) -> None:
    """A target that samples, penalises repetition and bans tokens by default still answers greedily, and keeps it."""
    model = Target.load(target, dtype="float64")
    ids = [[1, 5, 6, 7], [1, 9]]
    expected = [greedy(model, row, 8) for row in ids]
    config: Any = model.model.generation_config
    config.do_sample, config.temperature, config.top_k, config.repetition_penalty = True, 5.0, 0, 9.0
    config.no_repeat_ngram_size, config.suppress_tokens, config.min_new_tokens = 1, [expected[0][0]], 4
    assert answer_batch(model, ids, 8) == expected
    assert model.model.generation_config is config


def test_output_is_training_data(target: str, prompts: str, tmp_path: Path) -> None:
    """The datamodule takes the tokens exactly and knows the text as the target's own."""
    run(target, prompts, tmp_path / "out.jsonl")
    samples = DraftingData(target, train=str(tmp_path / "out.jsonl")).samples("train")
    for sample, line in zip(samples, read(tmp_path / "out.jsonl"), strict=True):
        assert sample.ids[sample.prompt_length :].tolist() == line["response_ids"] and sample.own_text


def test_messages_lose_the_answer_that_is_replaced(target: str, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "old"}]
    more = [*talk, {"role": "user", "content": "more"}]
    path = write(tmp_path / "in.jsonl", [{"messages": talk}, {"messages": more}])
    run(target, path, tmp_path / "out.jsonl")
    lines = read(tmp_path / "out.jsonl")
    assert [line["messages"] for line in lines] == [talk[:1], more]
    assert len(DraftingData(target, train=str(tmp_path / "out.jsonl")).samples("train")) == 2


def test_a_complete_output_is_reused_and_other_arguments_are_an_error(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    first = run(target, prompts, output)
    before = output.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(generation, "answer_batch", None)
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


def test_the_record_beside_the_output(target: str, prompts: str, tmp_path: Path) -> None:
    run(target, prompts, tmp_path / "out.jsonl", limit=5)
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["identity"]["fingerprint"] == Target.load(target).spec.fingerprint
    assert meta["num_answers"] == 5 and meta["identity"]["limit"] == 5 and "torch" in meta["versions"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.meta.json", "prompts.jsonl"]


@pytest.mark.parametrize("calls", [0, 4, 7])
def test_an_exception_costs_one_batch(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Stopped in batch `calls` + 1 of 8, a restart redoes 8 - `calls` batches and writes the same bytes."""
    run(target, prompts, tmp_path / "whole.jsonl")
    real, count = answer_batch, 0

    def failing(*args: Any) -> list[list[int]]:
        nonlocal count
        count += 1
        if count == calls + 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(generation, "answer_batch", failing)
    with pytest.raises(KeyboardInterrupt):
        run(target, prompts, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    redone: list[int] = []

    def counting(*args: Any) -> list[list[int]]:
        redone.append(1)
        return real(*args)

    monkeypatch.setattr(generation, "answer_batch", counting)
    summary = run(target, prompts, tmp_path / "out.jsonl")
    assert len(redone) == 8 - calls and summary.num_reused == 3 * calls
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
    with pytest.raises(ValueError, match=r"out.jsonl.partial was written with other arguments \(batch_size: 3"):
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


_SLOW = """
import sys, time
from treespark import generation
real = generation.answer_batch
def slow(*args):
    out = real(*args)
    time.sleep(0.2)
    return out
generation.answer_batch = slow
generation.generate(sys.argv[1], sys.argv[2], sys.argv[3], max_new_tokens=12, batch_size=3, dtype="float64")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_kill_9_loses_one_batch_at_most(target: str, prompts: str, tmp_path: Path) -> None:
    """A real process, killed once two batches are safe; another one may not write the file meanwhile."""
    output = tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", _SLOW, target, prompts, str(output)], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not partial.exists() or partial.read_bytes().count(b"\n") < 7:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(ValueError, match="is being written by another process"):
            run(target, prompts, output)
    finally:
        process.kill()
        process.wait()
    assert not output.exists()
    assert 6 <= run(target, prompts, output).num_reused < 23
    run(target, prompts, tmp_path / "whole.jsonl")
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_unusable_prompts(target: str, tmp_path: Path) -> None:
    """The context of 512 less 12 new tokens leaves room for 500; a longer prompt is an error or skipped."""
    path = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b" * 490}, "{", {"prompt": "c"}])
    with pytest.raises(ValueError, match="in.jsonl:3: not valid JSON"):
        run(target, path, tmp_path / "out.jsonl")
    summary = run(target, path, tmp_path / "out.jsonl", on_error="skip")
    assert summary.num_answers == 2 and summary.num_skipped == 2
    assert [line["prompt"] for line in read(tmp_path / "out.jsonl")] == ["a", "c"]
    long = write(tmp_path / "long.jsonl", [{"prompt": "b" * 490}])
    with pytest.raises(ValueError, match=r"long.jsonl:1: the prompt has \d+ tokens.*leaves room for 500"):
        run(target, long, tmp_path / "out2.jsonl")
    with pytest.raises(ValueError, match="no usable line"):
        run(target, long, tmp_path / "out2.jsonl", on_error="skip")


def test_clear_errors_come_before_the_target_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent.jsonl"):
        generate("no/such/target", str(tmp_path / "absent.jsonl"), "out.jsonl")
    with pytest.raises(ValueError, match="no usable line"):
        generate("no/such/target", write(tmp_path / "empty.jsonl", []), "out.jsonl")
    for options in ({"max_new_tokens": 0}, {"batch_size": 0}, {"limit": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            generate("t", "p", "o", **options)  # type: ignore[arg-type]


def test_a_base_model_without_template(tmp_path: Path) -> None:
    """The prompt continues as plain text; the file trains without a template, too."""
    base = save_tiny_target(tmp_path / "base", chat_template=None)
    path = write(tmp_path / "in.jsonl", PROMPTS[:4])
    run(base, path, tmp_path / "out.jsonl")
    samples = DraftingData(base, train=str(tmp_path / "out.jsonl")).samples("train")
    tokenizer = Target.load(base).tokenizer
    assert [tokenizer.decode(s.ids[: s.prompt_length]) for s in samples] == [line["prompt"] for line in PROMPTS[:4]]
