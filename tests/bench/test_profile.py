"""The cost profile and the calibration that `treespark bench --profile` makes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.bench.test_command import Files
from tests.decoding.test_loop import target_of
from tests.tiny import tiny_drafter
from treespark.bench import bench
from treespark.bench.profile import fit_calibration, predictions, profile, profile_costs
from treespark.bench.records import PromptTrials, Trial
from treespark.bench.results import Results
from treespark.bench.stopwatch import PRODUCTS, product_times
from treespark.bench.suites import BenchPrompt, Suite
from treespark.cost import CostModel
from treespark.decoding import BatchDecoding, Request, decode, judged_edges
from treespark.policies import BestFirst, Budgeted, Chain, TreePolicy, fit_edges, parse


def test_costs_are_measured_on_the_whole_grid() -> None:
    """N = 6: 1, 2 and 4 tokens, and the root with all nodes, 7; every figure is a time."""
    target = target_of("llama")
    costs = profile_costs(
        target, tiny_drafter(target), Budgeted(2, 6), batch_sizes=(3, 1), context_lengths=(8, 16), repeats=2
    )
    assert (costs.batch_sizes, costs.tokens, costs.context_lengths) == ((1, 3), (1, 2, 4, 7), (8, 16))
    assert all(value > 0 for rows in costs.target for row in rows for value in row)
    assert all(value > 0 for row in costs.draft for value in row)
    assert costs.settings["policy"] == Budgeted(2, 6).config()
    with pytest.raises(ValueError, match="at least 1"):
        profile_costs(target, tiny_drafter(target), batch_sizes=(0,))


def test_calibration_is_the_fit_of_the_edges_that_decoding_judged() -> None:
    """Two prompts one at a time: the edges collected by hand from every round, fitted in one go."""
    target = target_of("qwen3")
    drafter, prompts = tiny_drafter(target), [[1, 2, 3], [7, 5]]
    judged: list[tuple[torch.Tensor, torch.Tensor]] = []
    for prompt in prompts:
        batch = BatchDecoding(
            target,
            drafter=drafter,
            policy=Budgeted(3, 12),
            max_batch_size=1,
            on_verified=lambda packed, accepted: judged.append(judged_edges(packed, accepted)),
        )
        batch.run([Request(target, prompt, max_new_tokens=20, end_token_ids=[])])
    log_probs, accepted = (torch.cat(parts) for parts in zip(*judged, strict=True))
    a, b, edges = fit_calibration(
        target, drafter, prompts, Budgeted(3, 12), max_new_tokens=20, max_batch_size=1, end_token_ids=[]
    )
    assert edges == len(log_probs) and (a, b) == pytest.approx(fit_edges(log_probs, accepted))
    with pytest.raises(ValueError, match="No edge was judged"):
        fit_calibration(target, drafter, prompts, max_new_tokens=1)


def test_profile_saves_and_names_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints can be given to --policies as it stands, and decodes."""
    target = target_of("llama")
    drafter, path = tiny_drafter(target), str(tmp_path / "costs.json")
    suite = Suite("one", (BenchPrompt("1", (1, 2, 3), "one:1"), BenchPrompt("2", (5,), "one:2")))
    costs = profile(target, drafter, [suite], path, policy=Budgeted(2, 6), batch_sizes=(1, 2))
    assert CostModel.load(path) == costs and costs.settings["calibration"]["num_edges"] > 0
    printed = capsys.readouterr().out
    policy = parse(printed.split('--policies "', 1)[1].split('"', 1)[0])
    assert isinstance(policy, BestFirst) and policy.cost == path
    assert policy.a == pytest.approx(costs.settings["calibration"]["a"], abs=1e-4)
    assert len(decode(target, drafter, [1, 2], policy=policy, max_new_tokens=5, end_token_ids=[]).tokens) == 5


def test_costs_outlive_a_calibration_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of one token judge no edge: that is said, no policy is named, and the costs are in their file."""
    monkeypatch.setattr("treespark.bench.profile.fit_calibration", partial(fit_calibration, max_new_tokens=1))
    target = target_of("llama")
    suite = Suite("one", (BenchPrompt("1", (1, 2, 3), "one:1"),))
    path = str(tmp_path / "new" / "costs.json")
    costs = profile(target, tiny_drafter(target), [suite], path, policy=Chain(), batch_sizes=(1,))
    assert CostModel.load(path) == costs and "calibration" not in costs.settings
    printed = capsys.readouterr().out
    assert "Not calibrated" in printed and "No edge was judged" in printed and "--policies" not in printed


def test_prediction_beside_measurement() -> None:
    """Chain of 4: t(1) = 1, t(5) = 2, drafting 0.5, tau 2: predicted 2 / 2.5. Measured: 10 tokens in 4 s, not 8 s."""
    costs = CostModel.fit((1,), (1, 5), (64,), [[[1.0], [2.0]]], [[0.5]])
    trials = {
        "plain": Trial(11, "length", [0] * 10, [1] * 10, _timing(8.0)),
        "chain": Trial(11, "length", [1] * 5, [2] * 5, _timing(4.0)),
    }
    results = Results(
        arms=[
            {"name": "plain", "kind": "plain", "policy": None},
            {"name": "chain", "kind": "chain", "policy": Chain().config()},
        ],
        suites=[{"name": "one", "category": ""}],
        depths=4,
        prompts=[PromptTrials("one", 0, "1", 3, trials)],
    )
    (row,) = predictions(costs, results)
    assert (row["arm"], row["num_nodes"], row["tau"]) == ("chain", 4, 2.0)
    assert row["predicted"] == pytest.approx(0.8) and row["measured"] == pytest.approx(2.0)


@pytest.mark.parametrize("policy", [Chain(), Budgeted(2, 8)], ids=repr)
def test_products_are_timed_and_put_back(policy: TreePolicy) -> None:
    """Each product takes some of a round's time, together less than all of it; afterwards nothing is wrapped."""
    target = target_of("llama")
    drafter = tiny_drafter(target)
    batch = BatchDecoding(target, drafter=drafter, policy=policy, max_batch_size=1)
    request = Request(target, [1, 2, 3], max_new_tokens=12, end_token_ids=[])
    batch.add(request)
    before = request.timing["decode"]
    with product_times(target, drafter) as seconds:
        batch.step()
    assert all(seconds[part] > 0 for part in PRODUCTS)
    assert sum(seconds.values()) <= request.timing["decode"] - before
    kept = dict(seconds)
    batch.step()
    assert seconds == kept and "forward" not in target.__dict__ and "draft" not in drafter.__dict__


def _timing(seconds: float) -> dict[str, float]:
    return dict.fromkeys(("prefill", "draft", "head", "build", "verify", "commit"), 0.1) | {"decode": seconds}


def test_the_command_measures_first_and_compares_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`treespark bench --profile FILE`: the file, the policy that follows the load, and the table of speeds."""
    path = tmp_path / "costs.json"
    files = Files(tmp_path)
    bench(files.drafter, files.suite, profile=str(path), num_prompts=2, max_new_tokens=6, dtype="float64")
    printed = capsys.readouterr().out
    assert CostModel.load(path).batch_sizes == (1, 4, 12)
    assert "--policies" in printed and "predicted" in printed and "measured" in printed
