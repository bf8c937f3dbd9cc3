"""Answers in this process: greedy, token-exact, the same with and without a drafter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.answering import PROMPTS, greedy, read, run, save_drafter, save_tiny_target, write
from treespark.data import ChatEncoder, DraftingData
from treespark.data.mixture import read_records
from treespark.data.prompts import Problems
from treespark.generation import Prompt, generate
from treespark.generation.local import LocalBackend
from treespark.target import Target


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_answers_equal_greedy_decoding_one_by_one(target: str, prompts: str, tmp_path: Path, batch_size: int) -> None:
    """float64: neighbours change no token; lines keep order and fields; both finish reasons occur."""
    summary = run(target, prompts, tmp_path / "out.jsonl", batch_size=batch_size)
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
    encoder = ChatEncoder(model.tokenizer)
    records = list(read_records(write(tmp_path / "in.jsonl", PROMPTS[:2]), Problems("stop")))
    rows = [encoder.prompt_ids(record.messages) for record in records]
    expected = [greedy(model, row, 8) for row in rows]
    config: Any = model.model.generation_config
    config.do_sample, config.temperature, config.top_k, config.repetition_penalty = True, 5.0, 0, 9.0
    config.no_repeat_ngram_size, config.suppress_tokens, config.min_new_tokens = 1, [expected[0][0]], 4
    backend = LocalBackend(model, encoder, max_new_tokens=8, batch_size=2)
    unit = [Prompt(i, record, row) for i, (record, row) in enumerate(zip(records, rows, strict=True))]
    (answers,) = backend.answers([unit], lambda answers, tokens: None)
    assert [getattr(answers[i], "ids", None) for i in range(2)] == expected


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


@pytest.fixture(scope="module")
def drafter(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_drafter(target, tmp_path_factory.mktemp("drafter"))


@pytest.mark.parametrize(
    ("policy", "batch_size"), [(None, 1), (None, 3), ("Chain", 4), ("Budgeted(k=3,num_draft_nodes=9)", 50)]
)
def test_a_drafter_changes_no_byte(
    target: str, drafter: str, prompts: str, tmp_path: Path, policy: str | None, batch_size: int
) -> None:
    """float64, where no two logits are so close that passes of different widths could order them differently.

    In lower precision such near-ties may go either way, which is why the drafter is part of the output's identity.
    """
    plain = run(target, prompts, tmp_path / "plain.jsonl")
    summary = run(
        target, prompts, tmp_path / "out.jsonl", drafter=drafter, policy=policy, batch_size=batch_size, limit=None
    )
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    assert math.isnan(plain.tau) and plain.num_rounds == 0
    # Every token but each answer's first comes from a round; a random drafter is still accepted now and then.
    assert 0 < summary.num_rounds < summary.num_tokens - summary.num_answers
    assert summary.tau == (summary.num_tokens - 23) / summary.num_rounds > 1


def test_the_summary_tells_speed_and_acceptance(
    target: str, drafter: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record keeps the rounds: a second call knows the acceptance length without decoding."""
    first = run(target, prompts, tmp_path / "out.jsonl", drafter=drafter)
    assert first.num_new_tokens == first.num_tokens and first.tokens_per_second == first.num_tokens / first.seconds
    shown = capsys.readouterr().out
    assert f"{first.tokens_per_second:.1f} tokens/s, acceptance length {first.tau:.2f}" in shown
    second = run(target, prompts, tmp_path / "out.jsonl", drafter=drafter)
    assert (second.tau, second.num_new_tokens, second.tokens_per_second) == (first.tau, 0, 0.0)
    assert f"23 of them from before, {first.num_tokens} tokens" in capsys.readouterr().out
    with pytest.raises(ValueError, match="drafter_sha256: .* there, None now"):
        run(target, prompts, tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="other arguments .policy: "):
        run(target, prompts, tmp_path / "out.jsonl", drafter=drafter, policy="Chain")


def test_a_drafter_on_a_base_model(tmp_path: Path) -> None:
    base = save_tiny_target(tmp_path / "base", chat_template=None)
    path = write(tmp_path / "in.jsonl", PROMPTS[:9])
    run(base, path, tmp_path / "plain.jsonl")
    run(base, path, tmp_path / "out.jsonl", drafter=save_drafter(base, tmp_path / "drafter"), batch_size=4)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()


def test_options_that_do_not_fit_together(target: str, drafter: str, prompts: str, tmp_path: Path) -> None:
    other = save_tiny_target(tmp_path / "other", seed=1)
    for options, words in (
        ({"policy": "Chain"}, "--policy needs --drafter"),
        ({"model": "m"}, "--model needs --server"),
        ({"endpoint": "chat", "api_key_env": "KEY"}, "--endpoint, --api_key_env needs --server"),
        ({"server": "http://localhost:1", "drafter": drafter}, "--drafter is for answers in this process"),
        ({"drafter": str(tmp_path / "absent")}, "no such drafter"),
        ({"drafter": drafter, "policy": "Budgetd"}, "Did you mean: Budgeted"),
        ({"drafter": drafter, "policy": "Budgeted(k=100)"}, "64"),
        ({"num_retries": -1}, "num_retries must be at least 0"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            run(target, prompts, tmp_path / "out.jsonl", **options)
    with pytest.raises(ValueError, match="No target: give --target, or --server and --model"):
        run(None, prompts, tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="made for the target"):
        run(other, prompts, tmp_path / "out.jsonl", drafter=drafter)
