"""`treespark mix`, and broken lines through the real commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_text import save_tiny_target
from treespark.cli import dispatch

QUESTION = "which of the rivers that flow north is the longest of them all"


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """30 prompts of math with one that a suite holds and one repeat, 20 of code, and the suite."""
    monkeypatch.chdir(tmp_path)
    math = [{"prompt": f"add {i} to {i * i} and say what comes out of it at the end"} for i in range(28)]
    write(tmp_path / "math.jsonl", [*math, {"prompt": f"Say: {QUESTION}?", "id": "m"}, {"prompt": math[3]["prompt"]}])
    write(tmp_path / "code.jsonl", [{"prompt": f"write a loop over {i} things"} for i in range(20)])
    write(tmp_path / "rivers.jsonl", [{"turns": [QUESTION, "and the shortest"]}])
    write(tmp_path / "other.jsonl", [{"prompt": "nothing that resembles any of it"}])
    (tmp_path / "mix.yaml").write_text(
        "mixture:\n  - {dataset: math.jsonl, category: math, weight: 3}\n  - {dataset: code.jsonl, weight: 1}\n"
        "num_prompts: 24\nseed: 5\n"
    )
    return tmp_path


def mix(*words: str) -> int:
    return dispatch(["mix", "--sources", "mix.yaml", "--suites", "rivers.jsonl", "other.jsonl", *words])


def test_a_mixture_without_what_the_suites_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """36 prompts at 3 : 1 are 27 of the 28 usable ones of math, and 9 of code; what is left out is listed."""
    assert mix("--output", "out.jsonl", "--num_prompts", "36") == 0
    lines = read("out.jsonl")
    assert sum(line.get("category") == "math" for line in lines) == 27 and len(lines) == 36
    assert len({line["prompt"] for line in lines}) == 36 and not any(QUESTION in line["prompt"] for line in lines)
    assert all(re.fullmatch(r"(math|code)\.jsonl:\d+", line["origin"]) for line in lines)
    meta = json.loads(Path("out.jsonl.meta.json").read_text())
    removed = read("out.jsonl.removed.jsonl")
    held = {"prompt": "math.jsonl:29", "id": "m", "reason": "suite", "match": "rivers.jsonl:1", "overlap": 1.0}
    assert [row for row in removed if row["reason"] == "suite"] in ([], [held])
    assert meta["removed"] == {reason: sum(r["reason"] == reason for r in removed) for reason in meta["removed"]}
    assert meta["drawn"] == [
        {"source": "math", "weight": 3, "num_prompts": 27},
        {"source": "code.jsonl", "weight": 1, "num_prompts": 9},
    ]
    assert meta["identity"]["sources"]["seed"] == 5 and meta["identity"]["ngram"] == 8
    printed = capsys.readouterr().out
    assert "out.jsonl: 36 prompts" in printed and "27  75.00%  math" in printed
    assert re.search(r"\d left out for suite rivers\n +0 left out for suite other", printed)


def test_all_prompts_in_order_without_a_mixture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mix", "--sources", "math.jsonl", "code.jsonl", "--suites", "rivers.jsonl,other.jsonl"]
    assert dispatch([*words, "--output", "all.jsonl"]) == 0
    assert [line["origin"] for line in read("all.jsonl")] == [
        *(f"math.jsonl:{i}" for i in range(1, 29)),
        *(f"code.jsonl:{i}" for i in range(1, 21)),
    ]
    rows = read("all.jsonl.removed.jsonl")
    assert [(r["prompt"], r["reason"], r["match"]) for r in rows] == [
        ("math.jsonl:29", "suite", "rivers.jsonl:1"),
        ("math.jsonl:30", "exact", "math.jsonl:4"),
    ]
    assert "left out: 1 held by a suite, 1 repeated" in capsys.readouterr().out


def test_the_same_call_gives_the_same_file_and_other_options_are_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mix("--output", "a.jsonl") == mix("--output", "b.jsonl") == 0
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    assert mix("--output", "c.jsonl", "--seed", "6") == 0
    assert Path("c.jsonl").read_bytes() != Path("a.jsonl").read_bytes()
    capsys.readouterr()
    assert mix("--output", "a.jsonl") == 0
    assert "it was there already" in capsys.readouterr().out
    assert mix("--output", "a.jsonl", "--near", "0.9") == 1
    assert "was written with other arguments (near: 0.8 there, 0.9 now)" in capsys.readouterr().err
    assert mix("--output", "a.jsonl", "--near", "0.9", "--overwrite") == 0
    Path("mine.jsonl").write_text("x\n")
    assert mix("--output", "mine.jsonl") == 1
    assert "was not written by treespark mix" in capsys.readouterr().err
    assert mix("--output", "d.jsonl", "--num_prompts", "200") == 1
    assert "usable prompts, but its share of 75.00% of 200 needs 150" in capsys.readouterr().err


def test_a_prompt_file_of_2000_lines_with_20_broken_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`generate` through the real command: skip answers 1,980, names each of the 20 with its reason and exits with 0;
    stop exits with 1 at the first of them and writes nothing."""
    target = save_tiny_target(tmp_path / "target")
    broken = ["{", '{"prompt": 3}', '{"id": 1}', '{"messages": []}']
    reasons = ["not valid JSON", "'prompt' must be text", "expected exactly one of", "'messages' must be a non-empty"]
    lines: list[Any] = [{"prompt": f"say {i}"} for i in range(2000)]
    numbers = range(50, 2001, 100)
    for j, number in enumerate(numbers):
        lines[number - 1] = broken[j % 4]
    path = write(tmp_path / "in.jsonl", lines)
    words = ["generate", "--target", target, "--prompts", path, "--max_new_tokens", "1", "--batch_size", "256"]
    words += ["--on_error", "skip", "--output", str(tmp_path / "skip.jsonl")]
    command, root = [sys.executable, "-m", "treespark", *words], Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert dispatch([*words[:-3], "stop", "--output", str(tmp_path / "stop.jsonl")]) == 1
    answers = read(tmp_path / "skip.jsonl")
    assert [line["prompt"] for line in answers] == [line["prompt"] for line in lines if isinstance(line, dict)]
    assert len(answers) == 1980
    assert "in.jsonl: 1980 lines used, 20 skipped" in done.stderr and "20 lines skipped" in done.stdout
    reported = dict(re.findall(r"in\.jsonl:(\d+): (.*)", done.stderr))
    assert list(map(int, reported)) == list(numbers)
    assert all(text.startswith(reasons[j % 4]) for j, text in enumerate(reported.values()))
    assert "in.jsonl:50: not valid JSON" in capsys.readouterr().err and not (tmp_path / "stop.jsonl").exists()
