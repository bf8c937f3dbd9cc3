"""Runs over batch sizes, repeats, budgets and baselines: what is recorded, resumed, averaged and drawn."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.tiny import tiny_drafter, tiny_target
from treespark.bench import Results, make_arms, print_report, run, runner
from treespark.bench.figures import budget_lines, draw_figures, speed_lines
from treespark.bench.runner import OtherRunError
from treespark.bench.suites import BenchPrompt, Suite
from treespark.bench.workload import Served, decode_workload
from treespark.drafters import Drafter
from treespark.policies import Budgeted
from treespark.target import Target

Pair = tuple[Target, Drafter]


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.recorded_policy = Budgeted(k=2, num_draft_nodes=6).config()
    return target, drafter


def suite(name: str, count: int, start: int = 5, category: str = "general") -> Suite:
    prompts = (BenchPrompt(str(i), tuple(range(start + i, start + i + 4)), f"{name}:{i + 1}") for i in range(count))
    return Suite(name, tuple(prompts), category=category)


SUITES = [suite("first", 3), suite("second", 2, 30, "writing")]
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "progress": False, "warmup": 0, "batch_sizes": (1, 2), "repeats": 2}


@pytest.fixture(scope="module")
def whole(pair: Pair) -> Results:
    arms = make_arms(pair[1], "plain,chain,tree,generate,lookup", budgets=[2, 4, 6])
    return run(*pair, SUITES, arms, also_simulate=True, **OPTIONS)


def keys(results: Results) -> list[tuple[str, int, int, int]]:
    return [(item.suite, item.index, item.batch_size, item.repeat) for item in results.prompts]


def test_everything_is_decoded_once(whole: Results) -> None:
    """2 repeats of 2 batch sizes of 5 prompts, repeat by repeat; what `transformers` does at batch size 1 only.

    In float64 all of it is plain decoding's text, and repeats do the same rounds.
    """
    assert whole.complete and whole.ok and not whole.differences and not whole.warnings()
    places = [("first", i) for i in range(3)] + [("second", i) for i in range(2)]
    assert keys(whole) == [(*place, size, repeat) for repeat in (0, 1) for size in (1, 2) for place in places]
    for item in whole.prompts:
        assert ("generate" in item.trials, "lookup" in item.trials) == (item.batch_size == 1,) * 2
        assert item.sha256 and len({trial.num_tokens for trial in item.trials.values()}) == 1
    committed: dict[tuple[str, int, str], set[tuple[int, ...]]] = {}
    for item in whole.prompts:
        for name, trial in item.trials.items():
            committed.setdefault((item.suite, item.index, name), set()).add(tuple(trial.committed))
    assert all(len(found) == 1 for found in committed.values())


def test_simulated_rounds_are_the_live_ones(whole: Results) -> None:
    """They are recorded once per prompt, for policies, and give the live tau."""
    for item in whole.prompts:
        for name, trial in item.trials.items():
            drafted = name not in ("plain", "generate", "lookup")
            first = item.repeat == 0 and item.batch_size == 1
            assert trial.simulated == (trial.committed if drafted and first else None)
    summary = whole.summary("tree", "first")
    assert summary.simulated_tau == pytest.approx(summary.tau)


def test_budgets_are_arms(whole: Results) -> None:
    """The recorded budget of 6 is `tree` already; 2 and 4 are marked arms of their own. More nodes accept no less."""
    names = ["plain", "chain", "tree", "generate", "lookup"]
    swept = [f"Budgeted(k=2, num_draft_nodes={n})" for n in (2, 4)]
    assert whole.arm_names == [*names, *swept]
    assert [arm["marked"] for arm in whole.arms[-2:]] == [True, True]
    ((family, (xs, ys)),) = budget_lines(whole).items()
    assert family == "Budgeted(k=2)" and xs == [2.0, 4.0, 6.0]
    assert ys == [whole.summary(name).tau for name in (*swept, "tree")] and ys == sorted(ys)


def test_sweeps_need_a_budget(pair: Pair) -> None:
    with pytest.raises(ValueError, match="budgets needs a tree"):
        make_arms(pair[1], "plain,chain", budgets=[4])
    with pytest.raises(ValueError, match="choose 1 to 14"):
        make_arms(pair[1], "tree", budgets=[99])
    with pytest.raises(ValueError, match="lookup_tokens must be at least 1"):
        make_arms(pair[1], "lookup", lookup_tokens=0)


def test_comparisons_and_means(whole: Results) -> None:
    """Throughputs by batch size with plain decoding's and the chain's; categories apart and together."""
    at_two = whole.intervals(batch_size=2)
    assert "system tree/plain" in at_two and "per request tree/chain" in at_two
    assert not any(name.startswith("speed") or "lookup" in name for name in at_two)
    at_one = whole.intervals()
    assert {"speed generate/plain", "speed lookup/plain", "tau lookup/chain", "speed tree/chain"} <= at_one.keys()
    assert not any(name.startswith("tau generate") for name in at_one)
    assert whole.categories == ["general", "writing"] and whole.suites_of("writing") == ["second"]
    first, second = (whole.intervals(name)["speed tree/plain"].value for name in ("first", "second"))
    assert at_one["speed tree/plain"].value == pytest.approx((first + second) / 2)
    assert whole.intervals(category="writing")["speed tree/plain"].value == pytest.approx(second)
    taus = {arm: [whole.summary(arm, name).tau for name in whole.suite_names] for arm in ("tree", "chain")}
    assert at_one["tau tree/chain"].value == pytest.approx(sum(taus["tree"]) / sum(taus["chain"]))
    assert at_one["tau tree/chain"].num_prompts == 5


def test_report_and_pictures(whole: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables name batch sizes, categories and means; three pictures are written; without matplotlib a sentence."""
    console = Console(file=io.StringIO(), width=160)
    print_report(whole, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "mean over 1 suites, writing (2 prompts)",
        "mean over 2 suites (5 prompts)",
        "sim. tau",
        "batch size 2",
    ):
        assert part in text, part
    said = draw_figures(whole, tmp_path / "out.json")
    for name in ("acceptance", "speed", "budget"):
        file = tmp_path / f"out.{name}.png"
        assert str(file) in said and file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size > 5000
    lines = speed_lines(whole)
    assert lines["plain"][0] == [1.0, 2.0] and lines["lookup"][0] == [1.0] and min(lines["tree"][1]) > 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib is not installed" in draw_figures(whole, tmp_path / "other.json")


def test_few_prompts_for_many_requests(pair: Pair) -> None:
    """Two prompts cannot keep four rows busy: the results say so."""
    results = run(*pair, [SUITES[1]], make_arms(pair[1], "plain,tree"), **OPTIONS | {"batch_sizes": (4,), "repeats": 1})
    assert "Batch size 4: second hold fewer prompts" in results.warnings()[0] and results.ok


def test_groups_keep_rows_busy(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """17 prompts at batch size 2: two workloads of 8 and 9, arms in turns; the warm-up of both sizes comes first."""
    calls: list[tuple[str, int, int]] = []

    def spy(target: Any, drafter: Any, arm: Any, prompts: Any, **options: Any) -> list[Served]:
        calls.append((arm.name, len(prompts), options["batch_size"]))
        return decode_workload(target, drafter, arm, prompts, **options | {"max_new_tokens": 2})

    monkeypatch.setattr(runner, "decode_workload", spy)
    run(
        *pair,
        [suite("s", 17)],
        make_arms(pair[1], "plain,tree"),
        **OPTIONS | {"batch_sizes": (2,), "repeats": 1, "warmup": 1},
    )
    assert calls == [("plain", 2, 2), ("tree", 2, 2), ("plain", 8, 2), ("tree", 8, 2), ("tree", 9, 2), ("plain", 9, 2)]


def test_a_run_goes_on_where_it_stopped(pair: Pair, whole: Results, tmp_path: Path, monkeypatch: Any) -> None:
    """Ctrl-C in the third group; saved, loaded, continued: the same records in the same order, none decoded twice."""
    arms = make_arms(pair[1], "plain,tree")
    calls: list[int] = []

    def stopping(*args: Any, **options: Any) -> list[Served]:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return decode_workload(*args, **options)

    monkeypatch.setattr(runner, "decode_workload", stopping)
    stopped = run(*pair, SUITES, arms, **OPTIONS)
    assert not stopped.complete and len(stopped.prompts) == 2
    stopped.save(tmp_path / "out.json", computed=False)
    kept = Results.load(tmp_path / "out.json")
    calls[:] = [1] * 100
    finished = run(*pair, SUITES, arms, unfinished=kept, **OPTIONS)
    assert finished.complete and keys(finished) == keys(whole) and finished.prompts[:2] == stopped.prompts
    assert len(calls) - 100 == 2 * (2 * (5 + 2) - 2)  # two arms; 5 groups at batch size 1 and 2 at 2, twice, less two
    assert len(kept.prompts) == 2  # what was handed in stays as it was
    done = run(*pair, SUITES, arms, unfinished=finished, **OPTIONS)
    assert done.complete and done.prompts == finished.prompts


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_new_tokens": 5}, r"its max_new_tokens \(there 6, now 5\) differ"),
        ({"repeats": 3}, r"its repeats \(there 2, now 3\) differ"),
        ({"seed": 1}, "its seed differ"),
        ({"suites": [SUITES[0]]}, "its suites differ"),
        ({"arms": "plain,chain"}, "its arms differ"),
    ],
)
def test_a_run_does_not_go_on_in_another(pair: Pair, whole: Results, changed: dict[str, Any], message: str) -> None:
    """Other arguments than those of the unfinished results are an error that names the first difference."""
    arms = make_arms(
        pair[1],
        changed.pop("arms", "plain,chain,tree,generate,lookup"),
        budgets=[] if "arms" in str(message) else [2, 4, 6],
    )
    suites = changed.pop("suites", SUITES)
    with pytest.raises(OtherRunError, match=message):
        run(*pair, suites, arms, unfinished=whole, also_simulate=True, **OPTIONS | changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": (0,)}, "different batch sizes and repeats of at least 1"),
        ({"batch_sizes": ()}, "different batch sizes"),
        ({"batch_sizes": (2, 2)}, "different batch sizes"),
        ({"repeats": 0}, "repeats of at least 1"),
        ({"simulated": True}, "neither batched nor timed"),
    ],
)
def test_bad_options(pair: Pair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*pair, SUITES, make_arms(pair[1]), **OPTIONS | options)
    with pytest.raises(ValueError, match="one request at a time"):
        run(*pair, SUITES, make_arms(pair[1], "generate"), **OPTIONS)


def test_answers_of_one_token(pair: Pair) -> None:
    """Nothing follows the first token: no rate is 0, none has an interval, and the report says why."""
    arms = make_arms(pair[1], "plain,chain,generate,lookup")
    results = run(*pair, SUITES, arms, **OPTIONS | {"max_new_tokens": 1, "batch_sizes": (1,), "repeats": 1})
    assert results.ok and results.exit_code == 0
    for name in results.arm_names:
        summary = results.summary(name)
        figures = (summary.tau, summary.single_throughput, summary.per_request_throughput)
        assert all(math.isnan(figure) for figure in figures) and summary.system_throughput > 0
    console = Console(file=io.StringIO(), width=160)
    print_report(results, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tau lookup/chain: - (not measured: no answer went on behind its first token)" in text


def test_wrong_numbers_are_refused_before_decoding(pair: Pair) -> None:
    """A negative seed would fail in the intervals, after everything was decoded; an open bracket would be dropped."""
    arms = make_arms(pair[1], "plain")
    for wrong in ({"seed": -1}, {"warmup": -1}):
        with pytest.raises(ValueError, match="seed and warmup must be at least 0"):
            run(*pair, SUITES, arms, **OPTIONS | wrong)
    with pytest.raises(ValueError, match="Cannot read the policy"):
        make_arms(pair[1], "plain", policies="Budgeted(k=2")
