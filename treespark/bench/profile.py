"""The cost of a round, measured on this machine, and the calibration of edges: what `BestFirst` sizes its trees by.

Shapes: B requests, n tokens of each in a target pass, L context positions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treespark.cost import CostModel
from treespark.decoding import BatchDecoding, Request, judged_edges
from treespark.decoding.policy import resolve_policy
from treespark.policies import BestFirst, TreePolicy, fit_edges

if TYPE_CHECKING:
    from treespark.bench.results import Results
    from treespark.bench.suites import Suite
    from treespark.drafters import Drafter
    from treespark.target import Target
    from treespark.tree import PackedTree

_STEPS = (1, 2, 4, 8, 16, 32, 64, 128)
_CALIBRATION_PROMPTS, _CALIBRATION_TOKENS = 8, 48


@torch.no_grad()
def profile_costs(
    target: Target,
    drafter: Drafter,
    policy: TreePolicy | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    context_lengths: Sequence[int] = (64, 256),
    repeats: int = 3,
) -> CostModel:
    """Times the target's pass over more and more tokens, and the drafting of a tree.

    Sizes take turns, so that a slow moment of the machine meets all of them; medians count.

    Args:
        target: The target.
        drafter: A drafter bound to it.
        policy: Whose trees are drafted; its N is the most nodes that are timed. None takes the recorded one.
        batch_sizes: B.
        context_lengths: L.
        repeats: Times that each size is measured, after one time that does not count.

    Raises:
        ValueError: For sizes below 1, or a policy out of range for the drafter.
    """
    chosen, _ = resolve_policy(drafter, policy)
    if min(*batch_sizes, *context_lengths, repeats) < 1:
        raise ValueError("Batch sizes, context lengths and repeats must be at least 1.")
    most = chosen.num_nodes(drafter.block_size) + 1
    tokens = [*(size for size in _STEPS if size <= 0.75 * most), most]
    sizes, lengths = sorted(set(batch_sizes)), sorted(set(context_lengths))
    table, drafts = [], []
    for rows in sizes:
        columns = []
        for length in lengths:
            runs = [_verification(target, drafter, rows, count, length) for count in tokens]
            columns.append(_medians(target, [*runs, _drafting(target, drafter, chosen, rows, length)], repeats))
        table.append([[column[place] for column in columns] for place in range(len(tokens))])
        drafts.append([column[-1] for column in columns])
    settings = {
        "target": target.spec.name,
        "policy": chosen.config(),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "repeats": repeats,
    }
    return CostModel.fit(sizes, tokens, lengths, table, drafts, settings)


def fit_calibration(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    policy: TreePolicy | None = None,
    *,
    max_new_tokens: int = _CALIBRATION_TOKENS,
    max_batch_size: int = 8,
    end_token_ids: Sequence[int] | None = None,
) -> tuple[float, float, int]:
    """Decodes prompts and fits `BestFirst`'s a and b on the edges that verification judged; returns (a, b, edges).

    Args:
        target: The target.
        drafter: A drafter bound to it.
        prompts: Prompt tokens. Other ones than those that are measured later.
        policy: Whose trees are judged; None takes the recorded one.
        max_new_tokens: Most new tokens of an answer.
        max_batch_size: The most requests that decode side by side.
        end_token_ids: Tokens that end an answer; None takes the target's own.

    Raises:
        ValueError: When no edge was judged, or likelier edges are accepted less often.
    """
    judged: list[tuple[Tensor, Tensor]] = []

    def collect(packed: PackedTree, accepted: Tensor) -> None:
        judged.append(judged_edges(packed, accepted))

    batch = BatchDecoding(
        target,
        drafter=drafter,
        policy=policy,
        allow_other_policy=True,
        max_batch_size=max_batch_size,
        on_verified=collect,
    )
    batch.run(Request(target, prompt, max_new_tokens=max_new_tokens, end_token_ids=end_token_ids) for prompt in prompts)
    if not judged:
        raise ValueError("No edge was judged: calibration needs prompts whose answers have more than one token.")
    log_probs, accepted = (torch.cat(parts) for parts in zip(*judged, strict=True))
    return *fit_edges(log_probs, accepted), len(log_probs)


def profile(
    target: Target,
    drafter: Drafter,
    suites: Sequence[Suite],
    path: str,
    *,
    policy: TreePolicy | None = None,
    batch_sizes: Sequence[int] = (1, 4, 12),
) -> CostModel:
    """What `treespark bench --profile` does before it decodes: measures, calibrates, saves, and names the policy.

    The calibration decodes the last prompts of each suite, briefly. Where it fails, which a drafter that knows
    nothing may cause, that is said and the costs are kept.

    Args:
        target: The target.
        drafter: A drafter bound to it.
        suites: Their prompts calibrate.
        path: File of the profile (JSON).
        policy: Whose trees are drafted; None takes the recorded one.
        batch_sizes: Requests side by side.
    """
    chosen, _ = resolve_policy(drafter, policy)
    costs = profile_costs(target, drafter, chosen, batch_sizes=batch_sizes)
    share = max(1, _CALIBRATION_PROMPTS // len(suites))
    prompts = [prompt.ids for suite in suites for prompt in suite.prompts[-share:]]
    costs.save(path)
    try:
        a, b, edges = fit_calibration(target, drafter, prompts, chosen)
    except ValueError as error:  # the costs stand, and what was asked for besides them is worth decoding
        print(f"Cost profile: {path}\nNot calibrated, so BestFirst cannot size trees by it. {error}")
        return costs
    costs.settings["calibration"] = {"a": a, "b": b, "num_edges": edges}
    costs.save(path)
    nodes = chosen.num_nodes(drafter.block_size)
    k = getattr(chosen, "k", None) or min(4, target.spec.vocab_size)
    sized = BestFirst(k, nodes, a=round(a, 4), b=round(b, 4), cost=path)
    print(f'Cost profile: {path}\nCalibrated on {edges} edges; trees that follow the load: --policies "{sized!r}"')
    return costs


def predictions(costs: CostModel, results: Results) -> list[dict[str, Any]]:
    """Returns, for each drafted arm and batch size that was timed, the speed-up that the costs predict.

    The measured one stands beside it. A policy whose trees adapt is taken at its largest tree.
    """
    found = []
    for arm in results.arms:
        if arm["policy"] is None or results.simulated:
            continue
        nodes = TreePolicy.from_config(arm["policy"]).num_nodes(results.depths)
        for batch_size in results.batch_sizes:
            if not results.has(arm["name"], batch_size):
                continue
            summary = results.summary(arm["name"], batch_size=batch_size)
            found.append(
                {
                    "arm": arm["name"],
                    "batch_size": batch_size,
                    "num_nodes": nodes,
                    "tau": summary.tau,
                    "predicted": costs.speedup(summary.tau, batch_size, nodes),
                    "measured": summary.speed_ratio,
                }
            )
    return found


def print_predictions(costs: CostModel, results: Results) -> None:
    """Prints predicted and measured speed-ups over plain decoding side by side."""
    from rich.console import Console
    from rich.table import Table

    rows = predictions(costs, results)
    if not rows:
        return
    table = Table("arm", "requests", "nodes", "tau", "× plain, predicted", "× plain, measured", title="Cost model")
    for row in rows:
        figures = ("-" if row[key] != row[key] else f"{row[key]:.2f}" for key in ("tau", "predicted", "measured"))
        table.add_row(row["arm"], str(row["batch_size"]), str(row["num_nodes"]), *figures)
    Console().print(table)


def _verification(target: Target, drafter: Drafter, rows: int, count: int, length: int) -> Callable[[], None]:
    """Returns a pass over `count` new tokens in each row behind `length` cached positions, as a round makes it."""
    ids = torch.zeros(rows, count, dtype=torch.long, device=target.device)
    positions = torch.arange(length, length + count, device=target.device).expand(rows, -1)
    mask = torch.ones(rows, count, length + count, dtype=torch.bool, device=target.device).tril(length)

    def run() -> None:
        cache = target.new_cache(length + count, rows)
        cache.select(0, rows, length)  # zeros: what is attended to does not change the time
        layer_ids = tuple(drafter.layer_ids) if count > 1 else ()
        target(ids, cache, layer_ids, positions, mask if count > 1 else None)

    return run


def _drafting(target: Target, drafter: Drafter, policy: TreePolicy, rows: int, length: int) -> Callable[[], None]:
    """Returns the drafting of one round: slots, output head, tree, and the encoding of two new positions a row."""
    size = len(drafter.layer_ids) * target.spec.hidden_size
    features = torch.randn(rows, length, size, device=target.device).to(target.dtype)
    context = drafter.encode(features, torch.arange(length, device=target.device).expand(rows, -1))
    anchors = torch.zeros(rows, 1, dtype=torch.long, device=target.device)
    positions = torch.full_like(anchors, length)

    def run() -> None:
        hidden = drafter.draft(context, anchors, positions)
        policy.build(drafter.propose(hidden.flatten(0, 1), anchors[:, 0])).pack()
        drafter.encode(features[:, :2], positions + torch.arange(2, device=target.device))

    return run


def _medians(target: Target, runs: list[Callable[[], None]], repeats: int) -> list[float]:
    """Returns the median seconds of each; all once without counting, then in turns."""
    wait: Callable[[], None] = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for run, kept in zip(runs, seconds, strict=True):
            wait()
            begin = time.perf_counter()
            run()
            wait()
            if turn:
                kept.append(time.perf_counter() - begin)
    return [statistics.median(kept) for kept in seconds]
