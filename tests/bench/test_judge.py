"""Outputs in bfloat16 and float16: judged by the target's own logits, counted, told, and an error where they miss."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.bench.test_command import Files
from tests.tiny import tiny_drafter, tiny_model, tiny_target
from treespark.bench import Miss, Results, Trial, bench, make_arms, print_report, run
from treespark.bench.judge import Judge, Place
from treespark.bench.suites import BenchPrompt, Suite
from treespark.decoding import DecodeResult, decode_plain, text_margins
from treespark.drafters import Drafter
from treespark.policies import Budgeted
from treespark.target import Target

PROMPTS = tuple(BenchPrompt(str(i), tuple(range(3 + i, 9 + 2 * i)), f"some:{i + 1}") for i in range(4))
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "progress": False, "warmup": 0}


def narrow(dtype: torch.dtype = torch.bfloat16) -> tuple[Target, Drafter]:
    target = Target(tiny_model("llama", dtype, vocab=16, initializer_range=0.5), name="tiny")
    return target, tiny_drafter(target)


def printed(results: Results) -> str:
    console = Console(file=io.StringIO(), width=150)
    print_report(results, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("modes", ["plain,chain,tree,generate,lookup", "tree"])
def test_every_text_is_judged(dtype: torch.dtype, modes: str, tmp_path: Path) -> None:
    """Every token of every arm is set against the target, plain decoding in the run or not, at each batch size."""
    target, drafter = narrow(dtype)
    arms = make_arms(drafter, modes, policies="Budgeted(k=2,num_draft_nodes=6)")
    results = run(target, drafter, [Suite("some", PROMPTS)], arms, batch_sizes=(1, 3), **OPTIONS)
    trials = [trial for prompt in results.prompts for trial in prompt.trials.values()]
    assert all(trial.num_judged == trial.num_tokens for trial in trials)
    assert results.judged and results.ok and not results.differences and not results.warnings()
    assert results.num_judged_tokens == sum(trial.num_tokens for trial in trials) and results.largest_margin <= 4
    shown = " ".join(printed(results).split())
    assert "Budgeted(k=2" in shown and "near-ties" in shown and "ERROR" not in shown
    assert f"{results.num_judged_tokens} tokens" in shown
    results.save(tmp_path / "out.json")
    outputs = json.loads((tmp_path / "out.json").read_text())["outputs"]
    assert outputs["judged"] and outputs["ok"] and outputs["num_misses"] == 0
    assert outputs["num_near_ties"] == results.num_near_ties == sum(trial.num_near_ties for trial in trials)
    assert Results.load(tmp_path / "out.json").to_dict() == results.to_dict()


def test_near_ties_are_counted_and_pass() -> None:
    """A head of equal rows ties all 16 tokens: all of a text but its zeros, the argmax, are near-ties, 0 below."""
    target = Target(tiny_model("llama", torch.bfloat16, vocab=16), name="tied")
    target.output_head().weight.data.copy_(target.output_head().weight.data[:1].expand(16, -1).clone())
    judge = Judge(target, 4, [])
    text = DecodeResult([0, 5, 0, 7], [], "length")
    plain = DecodeResult([0, 0, 0, 0], [], "length", gaps=[0.0] * 4)
    trial = judge.judge(Trial(4, "length", [], []), text, plain, PROMPTS[0], Place("some", 0, 1, 0, "tree"))
    assert (trial.num_judged, trial.num_near_ties, trial.margin) == (4, 2, 0.0)
    assert trial.identical is False and trial.num_compared == 2 and judge.take() == ([], [])


@pytest.mark.parametrize("modes", ["plain,tree", "tree"])
def test_a_wrong_text_is_an_error(modes: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A decoder that writes the least likely token at place 3 fails with that place and its distance, in words."""
    from treespark.bench import runner

    target, drafter = narrow()
    whole = runner.decode_workload

    def spoiled(*given: Any, **options: Any) -> Any:
        found = whole(*given, **options)
        if given[2].kind == "policy":
            tokens = found[0].result.tokens
            ids = torch.tensor([[*PROMPTS[0].ids, *tokens[:3]]])
            tokens[3] = int(target.logits(target.features(ids, ()).final)[0, -1].argmin())
        return found

    monkeypatch.setattr(runner, "decode_workload", spoiled)
    drafter.recorded_policy = Budgeted(k=2, num_draft_nodes=6).config()
    results = run(target, drafter, [Suite("some", PROMPTS[:1])], make_arms(drafter, modes), end_token_ids=[], **OPTIONS)
    (miss,) = results.misses
    assert (miss.suite, miss.index, miss.arm, miss.position) == ("some", 0, "tree", 3)
    assert miss.spacings is not None and miss.spacings > 4
    assert not results.ok and results.exit_code == 1
    assert f"tree, some[0] id 0, token 3: {miss.spacings:.1f} spacings below" in printed(results)
    assert "ERROR: this is not greedy decoding of the target" in printed(results)
    results.save(tmp_path / "out.json")
    assert Results.load(tmp_path / "out.json").misses == results.misses


def test_where_a_text_ends() -> None:
    """16 tokens are asked for: fewer without an end token are wrong, and so are more behind one."""
    target, _ = narrow()
    text = decode_plain(target, PROMPTS[1].ids, max_new_tokens=16, end_token_ids=[]).tokens
    end = text[5]
    behind = text.index(end) + 1  # where an answer that `end` ends is over
    for ends, tokens, position in (
        ([], text, None),
        ([], text[:5], 5),
        ([end], text[:behind], None),
        ([end], text, behind),
    ):
        judge = Judge(target, 16, ends)
        trial = Trial(len(tokens), "length", [], [])
        judge.judge(trial, DecodeResult(tokens, [], "length"), None, PROMPTS[1], Place("some", 1, 1, 0, "tree"))
        assert judge.take()[1] == ([] if position is None else [Miss("some", 1, "1", "tree", position, None)])


def test_logits_that_are_no_numbers_miss() -> None:
    """With NaN in the head no text is the target's."""
    target, _ = narrow()
    target.output_head().weight.data[:, 0] = torch.nan
    margins = text_margins(target, [4, 2], [3, 3])
    assert margins.first_miss == 0


def test_each_text_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arms, batch sizes and repeats have in common costs one reading; a wider dtype costs none."""
    from treespark.bench import judge

    texts: list[tuple[Any, ...]] = []

    def spy(target: Target, prompt: Any, tokens: Any) -> Any:
        texts.append((tuple(prompt), tuple(tokens)))
        return text_margins(target, prompt, tokens)

    monkeypatch.setattr(judge, "text_margins", spy)
    target, drafter = narrow()
    arms = make_arms(drafter, "plain,chain")
    run(target, drafter, [Suite("some", PROMPTS)], arms, batch_sizes=(1, 2), repeats=2, **OPTIONS)
    assert len(texts) == len(set(texts)) >= len(PROMPTS)
    texts.clear()
    wide = tiny_target(dtype=torch.float32)
    run(wide, tiny_drafter(wide), [Suite("some", PROMPTS)], arms, **OPTIONS)
    assert not texts


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--dtype bfloat16` ends with 0, says how it judged, and its results load."""
    files = Files(tmp_path)
    output = str(tmp_path / "out.json")
    results = bench(files.drafter, files.suite, dtype="bfloat16", max_new_tokens=8, output=output, figures=False)
    assert results.exit_code == 0 and results.num_judged_tokens > 0
    assert "spacings of bfloat16" in " ".join(capsys.readouterr().out.split())
