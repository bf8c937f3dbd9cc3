"""The runner on tiny random models: counts, order of the arms, verdicts, simulated rounds, interruption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tiny import tiny_drafter, tiny_target
from treespark.bench import Arm, Results, make_arms, run, runner
from treespark.bench.suites import BenchPrompt, Suite
from treespark.bench.workload import Served, Times, decode_workload
from treespark.decoding import DecodeResult, Round
from treespark.drafters import Drafter
from treespark.policies import Budgeted, Chain
from treespark.target import Target

Pair = tuple[Target, Drafter]


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = tiny_target()
    return target, tiny_drafter(target)


def suite(name: str = "first", count: int = 3, start: int = 5) -> Suite:
    prompts = (BenchPrompt(str(i), tuple(range(start + i, start + i + 6)), f"{name}:{i + 1}") for i in range(count))
    return Suite(name, tuple(prompts))


def fake(tokens: list[int], gaps: list[float] | None = None) -> Served:
    timing = dict.fromkeys(("prefill", "draft", "build", "verify", "commit", "decode"), 0.25)
    result = DecodeResult(tokens, [Round(0, 1, True)] * (len(tokens) - 1), "length", timing, gaps=gaps)
    return Served(result, Times(0.25, 0.25, 0.5))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int], list[float], list[int]], list[str]]:
    """Replaces decoding by fixed answers and returns the log of calls."""

    def script(plain: list[int], gaps: list[float], drafted: list[int]) -> list[str]:
        calls: list[str] = []

        def decode_workload(target: Any, drafter: Any, arm: Arm, prompts: Any, **options: Any) -> list[Served]:
            calls.append(arm.name)
            return [fake(plain, gaps) if arm.kind == "plain" else fake(drafted) for _ in prompts]

        monkeypatch.setattr(runner, "decode_workload", decode_workload)
        return calls

    return script


def go(pair: Pair, suites: list[Suite], arms: list[Arm] | None = None, **options: Any) -> Results:
    options = {"max_new_tokens": 12, "progress": False, "warmup": 0} | options
    return run(*pair, suites, arms or make_arms(pair[1]), **options)


def test_counts(pair: Pair) -> None:
    """In float64 every output is plain decoding's: all identical, token counts equal, rounds make up the tokens."""
    results = go(pair, [suite(count=2), suite("second", 3, 20)])
    assert results.complete and results.ok and results.judged and not results.differences
    assert [(p.suite, p.index) for p in results.prompts] == [("first", 0), ("first", 1)] + [
        ("second", i) for i in range(3)
    ]
    for prompt in results.prompts:
        plain = prompt.trials["plain"]
        assert plain.committed == [1] * (plain.num_tokens - 1) and plain.identical is None
        for trial in prompt.trials.values():
            assert trial.num_tokens == plain.num_tokens == 1 + sum(trial.committed)
            assert trial.finish_reason == plain.finish_reason
        assert prompt.trials["tree"].identical and prompt.trials["tree"].num_compared == plain.num_tokens
    whole, parts = results.summary("tree"), [results.summary("tree", name) for name in ("first", "second")]
    assert whole.num_rounds == sum(part.num_rounds for part in parts) and whole.num_prompts == 5
    assert results.summary("plain").tau == 1.0 and results.summary("plain").speed_ratio == 1.0
    assert whole.single_throughput > 0 and sum(whole.time_shares.values()) == pytest.approx(1, abs=0.05)
    names = {f"{what} {arms}" for what in ("speed", "system") for arms in ("chain/plain", "tree/plain", "tree/chain")}
    assert set(results.intervals()) == names | {"tau tree/chain"}


def test_arms_take_turns(pair: Pair, scripted: Callable[..., list[str]]) -> None:
    """Three arms, prompt i starts with arm i mod 3; the warm-up comes first and is not recorded."""
    calls = scripted([3, 4], [1.0, 1.0], [3, 4])
    results = go(pair, [suite(count=4)], warmup=1)
    assert calls[:3] == ["plain", "chain", "tree"]
    assert calls[3:] == [
        *("plain", "chain", "tree"),
        *("chain", "tree", "plain"),
        *("tree", "plain", "chain"),
        *("plain", "chain", "tree"),
    ]
    assert len(results.prompts) == 4 and results.summary("chain").num_rounds == 4


@pytest.mark.parametrize(
    ("dtype", "gap", "ok"),
    [(torch.float32, 5e-4, True), (torch.float32, 2e-3, False), (torch.float64, 1e-9, False)],
)
def test_verdict(scripted: Callable[..., list[str]], dtype: torch.dtype, gap: float, ok: bool) -> None:
    """One difference at a gap below 1e-3 passes in float32; a wider one fails, and in float64 any fails."""
    target = tiny_target(dtype=dtype)
    scripted([3, 4, 5], [1.0, gap, 1.0], [3, 9, 5])
    results = go((target, tiny_drafter(target)), [suite(count=1)], [Arm("plain"), Arm("chain", Chain())])
    (difference,) = results.differences
    assert (difference.arm, difference.position, difference.gap) == ("chain", 1, gap)
    assert difference.near_tie is (ok or (dtype == torch.float32 and gap < 1e-3))
    assert (results.ok, results.exit_code) == (ok, 0 if ok else 1)
    assert results.num_compared_tokens == 2 and results.summary("chain").num_identical == 0


def test_too_many_near_ties_fail(scripted: Callable[..., list[str]]) -> None:
    """Two near-ties within 4 compared tokens exceed max(1, 4 / 10,000) = 1."""
    target = tiny_target(dtype=torch.float32)
    scripted([3, 4], [1.0, 1e-5], [3, 9])
    results = go((target, tiny_drafter(target)), [suite(count=2)], [Arm("plain"), Arm("chain", Chain())])
    assert all(difference.near_tie for difference in results.differences) and len(results.differences) == 2
    assert results.allowed_differences == 1 and not results.ok


@pytest.mark.parametrize(("count", "warned"), [(20, True), (19, False)])
def test_tau_of_one_is_a_warning(pair: Pair, scripted: Callable[..., list[str]], count: int, warned: bool) -> None:
    """No accepted token in 20 rounds is loud; plain decoding, whose tau is 1, never is."""
    tokens = [3] * (count + 1)
    scripted(tokens, [1.0] * len(tokens), tokens)
    warnings = go(pair, [suite(count=1)], [Arm("plain"), Arm("chain", Chain())]).warnings()
    assert len(warnings) == warned and (not warned or "chain: tau is exactly 1.0 over 20 rounds" in warnings[0])


def test_simulated_rounds_are_the_live_ones(pair: Pair) -> None:
    """Simulation gives the records of live decoding, leaves plain decoding out and times nothing."""
    arms = make_arms(pair[1], policies="Budgeted(k=2,num_draft_nodes=6)")
    live, simulated = (go(pair, [suite()], arms, simulated=flag) for flag in (False, True))
    assert simulated.arm_names == live.arm_names[1:] and simulated.simulated
    for a, b in zip(live.prompts, simulated.prompts, strict=True):
        for name in simulated.arm_names:
            one, other = a.trials[name], b.trials[name]
            assert (one.committed, one.num_accepted) == (other.committed, other.num_accepted)
            assert (one.num_tokens, one.finish_reason) == (other.num_tokens, other.finish_reason)
            assert other.timing == {} and other.identical is None
    assert all(name.startswith("tau") for name in simulated.intervals())


def test_interruption_keeps_whole_prompts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second prompt: the first one stays, the results are incomplete and the exit code says so."""
    seen: list[int] = []
    count = 0

    def interrupted(target: Any, drafter: Any, arm: Arm, *args: Any, **options: Any) -> list[Served]:
        nonlocal count
        count += arm.name == "plain"
        if count == 2:
            raise KeyboardInterrupt
        return decode_workload(target, drafter, arm, *args, **options)

    monkeypatch.setattr(runner, "decode_workload", interrupted)
    results = go(pair, [suite()], on_prompt=lambda current: seen.append(len(current.prompts)))
    assert not results.complete and len(results.prompts) == 1 and seen == [1]
    assert results.exit_code == 130 and "Interrupted" in results.warnings()[-1]
    count = 1
    with pytest.raises(KeyboardInterrupt):  # nothing to keep
        go(pair, [suite()])


def test_nothing_to_evaluate(pair: Pair) -> None:
    with pytest.raises(ValueError, match="Nothing to evaluate"):
        go(pair, [])
    with pytest.raises(ValueError, match="Nothing to evaluate"):
        go(pair, [Suite("empty", ())])
    with pytest.raises(ValueError, match="no arm with a policy to simulate"):
        go(pair, [suite()], [Arm("plain")], simulated=True)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        go(pair, [suite()], max_new_tokens=0)
    with pytest.raises(ValueError, match="Two suites are called 'first'"):
        go(pair, [suite(), suite()])


def described(arms: list[Arm]) -> list[tuple[str, str, bool]]:
    return [(arm.name, arm.description, arm.marked) for arm in arms]


def test_arms_of_a_tree_drafter(pair: Pair) -> None:
    """The recorded tree is `tree`; the chain and added policies are marked, and nothing is decoded twice."""
    drafter = tiny_drafter(pair[0])
    drafter.recorded_policy = Budgeted(k=3, num_draft_nodes=8).config()
    arms = make_arms(drafter, "plain,chain,tree", "Budgeted(k=2,num_draft_nodes=6),Budgeted(k=3,num_draft_nodes=8)")
    assert described(arms) == [
        ("plain", "", False),
        ("chain", "Chain()", True),
        ("tree", "Budgeted(k=3, num_draft_nodes=8)", False),
        ("Budgeted(k=2, num_draft_nodes=6)", "Budgeted(k=2, num_draft_nodes=6)", True),
    ]


def test_arms_of_a_chain_drafter(pair: Pair) -> None:
    """A chain drafter's tree is Budgeted(4, 32), marked, unless policies are named; without a record none is marked."""
    drafter = tiny_drafter(pair[0])
    drafter.recorded_policy = Chain().config()
    tree = "Budgeted(k=4, num_draft_nodes=32)"
    assert described(make_arms(drafter, ["chain", "tree"])) == [("chain", "Chain()", False), ("tree", tree, True)]
    other = "Budgeted(k=2, num_draft_nodes=4)"
    assert described(make_arms(drafter, "chain,tree", [other])) == [("chain", "Chain()", False), (other, other, True)]
    drafter.recorded_policy = None
    assert described(make_arms(drafter, "chain,tree")) == [("chain", "Chain()", False), ("tree", tree, False)]


@pytest.mark.parametrize(
    ("modes", "policies", "message"),
    [
        ("plain,tre", None, "Unknown mode 'tre'. Did you mean: tree"),
        ("", None, "no mode given"),
        ("plain", "Budgetd(k=2)", "Unknown policy 'Budgetd'. Did you mean: Budgeted"),
        ("plain", "Budgeted(k=1,num_draft_nodes=9)", "choose 1 to 4"),
        ("plain", "Budgeted(k=65)", "exceeds the vocabulary of 64"),
        ("plain", "Budgeted(width=2)", "Unknown option of Budgeted 'width'"),
    ],
)
def test_bad_arms(pair: Pair, modes: str, policies: str | None, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make_arms(pair[1], modes, policies)
    assert message in str(error.value)
