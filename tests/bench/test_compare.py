"""`treespark compare`: gains by hand, what is refused, and the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from treespark.bench.compare import compare, differences
from treespark.bench.records import PromptTrials, Trial
from treespark.bench.results import Results
from treespark.cli import dispatch

TREE = {"class_path": "Budgeted", "init_args": {"k": 2, "num_draft_nodes": 4}}


def trial(accepted: int, seconds: float) -> Trial:
    """Two rounds that accept so many tokens each, in so many seconds."""
    committed = [accepted + 1] * 2
    timing = {"decode": seconds, "share": seconds + 1, "first_token": 1.0, "rest": seconds}
    return Trial(1 + sum(committed), "length", [accepted] * 2, committed, timing)


def results(seconds: dict[str, float], accepted: int = 1, width: int = 8, **changes: Any) -> Results:
    """One arm `tree` on suites of two equal prompts each, which decode in so many seconds."""
    prompts = [
        PromptTrials(name, index, str(index), 3, {"tree": trial(accepted, took)}, sha256=f"{name}{index}")
        for name, took in seconds.items()
        for index in range(2)
    ]
    found = Results(
        arms=[{"name": "tree", "kind": "policy", "policy": TREE, "description": "", "marked": False, "drafter": ""}],
        suites=[{"name": n, "category": c, "num_prompts": 2} for n, c in (("a", "general"), ("b", "writing"))],
        depths=3,
        prompts=prompts,
        settings={"max_new_tokens": 8, "batch_sizes": [1]},
        target={"name": "t", "fingerprint": "f"},
        drafters={"": {"config": {"head_dim": width}, "path": "d"}},
        hardware={"cpu": "c"},
    )
    return dataclasses.replace(found, **changes)


@pytest.fixture
def two(tmp_path: Path) -> Any:
    """Saves two results and returns their paths."""

    def save(one: Results, other: Results) -> list[str]:
        paths = [str(tmp_path / name) for name in ("one.json", "other.json")]
        for path, item in zip(paths, (one, other), strict=True):
            item.save(path, computed=False)
        return paths

    return save


def test_gains_by_hand(two: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The second accepts 2 instead of 1 a round: tau 3 over 2 = 1.5 everywhere.

    Suite a: 2 tokens/round x 2 in 4 s = 1/s; then 6 tokens in 2 s = 3/s: 3. Suite b: 4 in 1 s = 4/s; then 6 in 1 s
    = 6/s: 1.5. Other widths: mean of gains 2.25. The same width and tree: ratio of means 4.5 / 2.5 = 1.8.
    """
    one, other = results({"a": 4.0, "b": 1.0}), results({"a": 2.0, "b": 1.0}, accepted=2, width=12)
    found = {(g.suite, g.category, g.measure): g for g in compare(*two(one, other)).gains}
    assert {key for key in found if key[0] is None} == {
        (None, category, measure) for category in ("general", "writing", "") for measure in ("tau", "speed", "system")
    }
    assert all(gain.ratio.value == pytest.approx(1.5) for key, gain in found.items() if key[2] == "tau")
    assert found[("a", "general", "speed")].ratio.value == 3.0
    assert found[("b", "writing", "speed")].ratio.value == 1.5
    whole = found[(None, "", "speed")]
    assert whole.ratio.value == pytest.approx(2.25) and whole.method == "mean of gains"
    # System: 5 + 5 tokens in 5 + 5 s = 1/s and 7/3 /s; 5/2 and 7/2.
    assert found[("a", "general", "system")].ratio.value == pytest.approx(7 / 3)
    shown = capsys.readouterr().out
    assert "+125.0 %" in shown and "not interleaved" in shown
    same = results({"a": 2.0, "b": 1.0}, accepted=2)
    (fixed,) = [g for g in compare(*two(one, same)).gains if (g.suite, g.category, g.measure) == (None, "", "speed")]
    assert fixed.ratio.value == pytest.approx(1.8) and fixed.method == "ratio of means"


BASE = {"a": 1.0, "b": 1.0}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"target": {"name": "u", "fingerprint": "g"}}, "target", "the targets are 't' and 'u'"),
    ({"settings": {"max_new_tokens": 9, "batch_sizes": [1]}}, "max_new_tokens", "max_new_tokens: 8 and 9"),
    ({"dtype": "bfloat16"}, "dtype", "float32 and bfloat16"),
    ({"hardware": {"cpu": "other"}}, "machine", "hardware, cpu: c and other"),
    ({"complete": False}, "incomplete", "interrupted"),
    (
        {"settings": {"max_new_tokens": 8, "batch_sizes": [1], "chat_template_kwargs": {"x": 1}}},
        "template",
        "chat template",
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), REFUSED)
def test_what_is_not_comparable_is_refused(two: Any, changes: dict[str, Any], kind: str, message: str) -> None:
    """The error says what differs and which word allows it; allowed, it is listed."""
    one, other = results(BASE), results(BASE, **changes)
    with pytest.raises(ValueError, match=f"not comparable: .*{message}.*--allow {kind}"):
        compare(*two(one, other))
    assert any(message in line for line in compare(*two(one, other), allow=kind).allowed)
    assert differences(one, results(BASE)) == {}


def test_other_prompts(two: Any) -> None:
    """A missing suite and a changed prompt are refused; allowed, the prompts that both hold are compared."""
    one, other = results(BASE), results({"a": 0.5})
    with pytest.raises(ValueError, match=r"2 only in one file, such as b\[0\].*--allow prompts"):
        compare(*two(one, other))
    found = compare(*two(one, other), allow="prompts")
    assert found.num_paired == 2 and {gain.suite for gain in found.gains} == {"a"}
    other = results(BASE)
    other.prompts[0] = dataclasses.replace(other.prompts[0], sha256="else")
    with pytest.raises(ValueError, match=r"1 with other tokens, such as a\[0\]"):
        compare(*two(one, other))
    (gain,) = [g for g in compare(*two(one, other), allow="prompts").gains if (g.suite, g.measure) == ("a", "tau")]
    assert gain.ratio.num_prompts == 1
    elsewhere = results({"a": 1.0})
    elsewhere.prompts = [dataclasses.replace(item, sha256="x") for item in elsewhere.prompts]
    with pytest.raises(ValueError, match="no prompt in common"):
        compare(*two(results({"a": 1.0}), elsewhere), allow="prompts")


def test_arms(two: Any) -> None:
    """Arms of different names are paired by hand; unknown ones and none in common are errors."""
    one, other = results(BASE), results(BASE)
    other.arms[0] = other.arms[0] | {"name": "wide"}
    other.prompts = [dataclasses.replace(item, trials={"wide": item.trials["tree"]}) for item in other.prompts]
    paths = two(one, other)
    with pytest.raises(ValueError, match="No arm with drafts has the same name"):
        compare(*paths)
    assert {gain.arms for gain in compare(*paths, arms="tree:wide").gains} == {"tree:wide"}
    with pytest.raises(ValueError, match="Unknown arm 'tre'. Did you mean: tree"):
        compare(*paths, arms="tre:wide")
    with pytest.raises(ValueError, match="Unknown difference to allow 'promts'. Did you mean: prompts"):
        compare(*paths, allow="promts")


def test_command_line(two: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`treespark compare a.json b.json --output`: a table, a file; a refusal is one line and status 1."""
    paths = two(results(BASE), results({"a": 0.5, "b": 0.5}))
    output = tmp_path / "gains.json"
    assert dispatch(["compare", *paths, "--arms", "tree", "--output", str(output)]) == 0
    assert "+100.0 %" in capsys.readouterr().out
    record = json.loads(output.read_text())
    assert record["num_paired"] == 4 and record["gains"][0]["ratio"]["value"] == 1.0  # tau
    paths = two(results(BASE), results(BASE, dtype="bfloat16"))
    assert dispatch(["compare", *paths]) == 1
    assert "treespark compare: " in (said := capsys.readouterr().err) and "--allow dtype" in said
    assert dispatch(["compare", paths[0], "absent.json"]) == 1
    assert (
        "absent.json: no such file of results; `treespark bench --output absent.json` writes one."
        in capsys.readouterr().err
    )
