"""Several drafters in one run: their arms, their records, and rounds that are simulated side by side."""

from __future__ import annotations

import pytest

from tests.bench.test_runner import Pair, go, suite
from tests.tiny import tiny_drafter, tiny_target
from treespark.bench import Results, make_arms
from treespark.bench.command import name_drafters
from treespark.drafters import Drafter
from treespark.policies import Budgeted, Chain
from treespark.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def two(target: Target) -> dict[str, Drafter]:
    """A drafter that was trained under the chain, and a deeper one of other weights and layers under a tree."""
    chain, tree = tiny_drafter(target, seed=1), tiny_drafter(target, seed=2, block_size=5)
    chain.recorded_policy, tree.recorded_policy = Chain().config(), Budgeted(k=2, num_draft_nodes=6).config()
    return {"chain": chain, "tree": tree}


def test_arms_of_each(target: Target) -> None:
    """Plain decoding once and first; behind it every drafter's own arms, each policy once, marked by its own record."""
    drafters = two(target)
    arms = make_arms(drafters, "recorded,plain,chain", budgets=(), policies="Budgeted(k=2,num_draft_nodes=3)")
    named = [(arm.name, arm.drafter, arm.marked) for arm in arms]
    other = "Budgeted(k=2, num_draft_nodes=3)"
    assert named == [
        ("plain", "", False),
        ("chain/recorded", "chain", False),
        (f"chain/{other}", "chain", True),
        ("tree/recorded", "tree", False),
        ("tree/chain", "tree", True),
        (f"tree/{other}", "tree", True),
    ]
    drafters["tree"].recorded_policy = None
    with pytest.raises(ValueError, match="No policy is recorded with the drafter 'tree'"):
        make_arms(drafters, "recorded")


@pytest.mark.parametrize("simulated", [False, True])
def test_records_are_those_of_single_runs(target: Target, simulated: bool) -> None:
    """In float64 each drafter's trials are those of a run with it alone; what it was is described."""
    drafters = two(target)
    suites = [suite(count=19), suite("second", 2, 30)]  # more than are simulated together
    arms = make_arms(drafters, "plain,chain,tree")
    together = go((target, drafters), suites, arms, simulated=simulated)  # type: ignore[arg-type]
    assert together.depths == 5 and together.drafters.keys() == drafters.keys()
    for name, drafter in drafters.items():
        pair: Pair = (target, drafter)
        alone = go(pair, suites, simulated=simulated)
        assert together.drafters[name]["sha256"] == alone.drafter["sha256"]
        for one, other in zip(together.prompts, alone.prompts, strict=True):
            assert (one.suite, one.index) == (other.suite, other.index)
            for mode in ("chain", "tree"):
                mine, theirs = one.trials[f"{name}/{mode}"], other.trials[mode]
                assert (mine.committed, mine.num_accepted) == (theirs.committed, theirs.num_accepted)
                assert (mine.num_tokens, mine.finish_reason) == (theirs.num_tokens, theirs.finish_reason)


def test_comparisons(target: Target) -> None:
    """Each arm against its drafter's chain and against the first drafter's arm of its kind."""
    drafters = two(target)
    results = go((target, drafters), [suite()], make_arms(drafters, "chain,tree"), simulated=True)  # type: ignore[arg-type]
    assert set(results.intervals()) == {
        "tau chain/tree/chain/chain",
        "tau tree/chain/chain/chain",
        "tau tree/tree/tree/chain",
        "tau tree/tree/chain/tree",
    }
    both = results.intervals()["tau tree/tree/chain/tree"]
    tau = [results.summary(f"{name}/tree").tau for name in ("tree", "chain")]
    assert both.value == pytest.approx(tau[0] / tau[1])


def test_another_drafter_is_another_run(target: Target) -> None:
    """Unfinished results of other weights are not gone on with."""
    drafters = two(target)
    arms = make_arms(drafters, "chain")
    results: Results = go((target, drafters), [suite()], arms, simulated=True)  # type: ignore[arg-type]
    other = drafters | {"tree": tiny_drafter(target, seed=3, block_size=5)}
    with pytest.raises(ValueError, match="its drafters differ"):
        go((target, other), [suite()], arms, simulated=True, unfinished=results)  # type: ignore[arg-type]


def test_names() -> None:
    """One drafter needs no name; several need different ones."""
    assert name_drafters("runs/a") == {"": "runs/a"} == name_drafters("b=runs/a")
    for text in ("runs/a,runs/b", "a=runs/a,a=runs/b", "", "a=runs/a,runs/b"):
        with pytest.raises(ValueError, match="several as name=folder with different names"):
            name_drafters(text)
