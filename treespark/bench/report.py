"""The report: rich tables and plain sentences about what was measured."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from treespark.decoding.compare import NEAR_TIE_SPACINGS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from treespark.bench.results import Results
    from treespark.bench.statistics import Interval

WIDTH = 150  # of a report that does not go to a terminal
_MAX_LISTED = 20
_ERROR = "ERROR: this is not greedy decoding of the target. Do not trust the numbers above."


def print_report(results: Results, console: Console | None = None) -> None:
    """Prints the tables, comparisons, differences and warnings of a benchmark.

    Args:
        results: What was measured.
        console: Where to print; by default the standard output.
    """
    from rich.console import Console

    console = console or Console(width=None if sys.stdout.isatty() else WIDTH)
    for line in _heading(results):
        console.print(line, highlight=False, markup=False)
    for suite in results.suite_names:
        console.print(main_table(results, suite))
    if len(results.suite_names) > 1:
        for category in [*results.categories, ""]:
            console.print(main_table(results, category=category))
    console.print(position_table(results))
    if not results.simulated:
        console.print(time_table(results))
    for line in _notes(results):
        console.print(line, highlight=False, markup=False)
    for line in _verdict(results):
        console.print(line, highlight=False, markup=False, style=None if results.ok else "bold red")
    for message in results.warnings():
        console.print(f"WARNING: {message}", highlight=False, markup=False, style="bold yellow")


def main_table(results: Results, suite: str | None = None, category: str = "") -> Table:
    """Builds the table of a suite, or of the means over the suites of a category: one row per arm and batch size."""
    from rich.table import Table

    names = results.suites_of(category) if suite is None else [suite]
    title = suite or f"mean over {len(names)} suites" + (f", {category}" if category else "")
    count = sum(results.summary(results.arm_names[0], name).num_prompts for name in names)
    table = Table(title=f"{title} ({count} prompts)", title_justify="left")
    table.add_column("arm", overflow="fold", min_width=8, max_width=34)
    table.add_column("policy", overflow="fold", min_width=8, max_width=34)
    batched, also = results.batch_sizes != [1], bool(results.settings.get("also_simulate"))
    timed = ["single", "system", "request", "x plain", "first tok", "identical"]
    columns = ["batch"] if batched else []
    if results.narrow and results.judged:
        timed.append("near-ties")
    columns += ["tau", *(["sim. tau"] if also else []), "accepted", *([] if results.simulated else timed)]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for size in results.batch_sizes:
        for arm in results.arms:
            if not results.has(arm["name"], size):
                continue
            summary = results.summary(arm["name"], suite, category, size)
            cells = [str(size)] if batched else []
            cells += [_number(summary.tau, 2), *([_number(summary.simulated_tau, 2)] if also else [])]
            cells.append(_number(summary.mean_accepted, 2))
            if not results.simulated:
                first = summary.time_to_first_token
                cells += [
                    _number(summary.single_throughput, 1),
                    _number(summary.system_throughput, 1),
                    _number(summary.per_request_throughput, 1),
                    _number(summary.speed_ratio, 2),
                    "-" if math.isnan(first) else f"{1000 * first:.0f} ms",
                    f"{summary.num_identical}/{summary.num_compared}" if summary.num_compared else "-",
                ]
                cells += [str(summary.num_near_ties)] if "near-ties" in timed else []
            mark = " *" if arm["marked"] else ""
            policy = arm["description"] if arm["description"] != arm["name"] else ""
            table.add_row(f"{arm['name']}{mark}", policy, *cells)
        table.add_section()
    return table


def position_table(results: Results) -> Table:
    """Builds the table of acceptance by position: shares of rounds that accept at least so many draft tokens."""
    from rich.table import Table

    table = Table(title="acceptance by position (share of rounds, mean over suites)", title_justify="left")
    table.add_column("arm", overflow="fold")
    for depth in range(1, results.depths + 1):
        table.add_column(str(depth), justify="right", no_wrap=True)
    for arm in _drafted(results):
        if results.has(arm["name"], results.batch_sizes[0]):
            shares = results.summary(arm["name"]).acceptance_by_position
            table.add_row(arm["name"], *(_number(share, 3) for share in shares))
    return table


def time_table(results: Results) -> Table:
    """Builds the table of time shares."""
    from rich.table import Table

    from treespark.bench.summary import PARTS

    table = Table(title="share of the decoding time (mean over suites)", title_justify="left")
    table.add_column("arm", overflow="fold")
    table.add_column("batch", justify="right")
    parts = (*PARTS, "other")
    for part in parts:
        table.add_column(part, justify="right", no_wrap=True)
    for size in results.batch_sizes:
        for arm in _drafted(results):
            if arm["kind"] == "policy" and results.has(arm["name"], size):
                shares = results.summary(arm["name"], batch_size=size).time_shares
                cells = ("-" if part not in shares else f"{100 * shares[part]:.1f} %" for part in parts)
                table.add_row(arm["name"], str(size), *cells)
    return table


def _drafted(results: Results) -> list[dict[str, Any]]:
    return [arm for arm in results.arms if arm["kind"] in ("policy", "lookup")]


def _heading(results: Results) -> list[str]:
    hardware = results.hardware
    where = ", ".join([*hardware.get("accelerators", []), hardware.get("cpu", "unknown processor")])
    limit = results.settings.get("max_new_tokens")
    sizes = ", ".join(str(size) for size in results.batch_sizes)
    live = "greedy, one request at a time" if sizes == "1" else f"greedy, {sizes} requests side by side"
    repeats = results.settings.get("repeats", 1)
    live += f", {repeats} times" if repeats > 1 else ""
    how = "rounds simulated on the target's own answers" if results.simulated else live
    return [
        f"Drafter {results.drafter_label} for target {results.target.get('name', '')}; {how}, at most {limit} new "
        "tokens.",
        f"{where}, {results.dtype}.",
    ]


def _notes(results: Results) -> list[str]:
    lines = []
    if any(arm["marked"] for arm in results.arms):
        lines.append("* another policy than the one recorded with the drafter.")
    for name, drafter in results.drafters.items():
        if drafter.get("recorded_policy") is None:
            lines.append(f"No policy is recorded with {f'the drafter {name}' if name else 'this drafter'}.")
    lines.append("tau = tokens per round, the bonus token included; accepted = those of them that were drafted.")
    if not results.simulated:
        lines.append(
            "Tokens per second: single = of the decoding time; system = of the elapsed time; request = of a request "
            "after its first token."
        )
    places = [*results.categories, ""] if len(results.suite_names) > 1 else [""]
    for size in results.batch_sizes:
        for category in places:
            where = [f"batch size {size}"] if results.batch_sizes != [1] else []
            where += [category or "all suites"] if len(places) > 1 else []
            if where:
                lines.append(f"{', '.join(where)}:")
            for name, interval in results.intervals(category=category, batch_size=size).items():
                # tau is the same for all batch sizes, but for rounding.
                if size == results.batch_sizes[0] or not name.startswith("tau"):
                    lines.append(f"{'  ' if where else ''}{name}: {_interval(interval)}")
    return lines


def _verdict(results: Results) -> list[str]:
    if results.narrow:
        return _narrow_verdict(results)
    if not results.num_compared_tokens:
        return []
    differences = results.differences
    if not differences:
        return [f"Outputs: identical to plain decoding's ({results.num_compared_tokens} tokens compared)."]
    lines = [
        f"Outputs: {len(differences)} differ from plain decoding's ({results.num_compared_tokens} tokens compared, "
        f"allowed: {results.allowed_differences:g} at near-ties):"
    ]
    for item in differences[:_MAX_LISTED]:
        gap = "one output ended" if item.gap is None else f"logit gap {item.gap:.2g}"
        kind = "near-tie" if item.near_tie else "NOT a near-tie"
        lines.append(f"  {item.arm}, {item.suite}[{item.index}] id {item.id}, token {item.position}: {gap}, {kind}")
    if len(differences) > _MAX_LISTED:
        lines.append(f"  and {len(differences) - _MAX_LISTED} more.")
    return lines if results.ok else [*lines, _ERROR]


def _narrow_verdict(results: Results) -> list[str]:
    if not results.judged:
        return []
    lines = [
        f"Outputs: each of {results.num_judged_tokens} tokens was set against the target's logits, one row at a time. "
        f"{results.num_near_ties} near-ties: not the likeliest token, but at most {NEAR_TIE_SPACINGS} spacings of "
        f"{results.dtype} below it (largest distance: {_number(results.largest_margin, 1)})."
    ]
    for item in results.misses[:_MAX_LISTED]:
        what = "ends too early or too late" if item.spacings is None else f"{item.spacings:.1f} spacings below the best"
        lines.append(f"  {item.arm}, {item.suite}[{item.index}] id {item.id}, token {item.position}: {what}")
    if len(results.misses) > _MAX_LISTED:
        lines.append(f"  and {len(results.misses) - _MAX_LISTED} more.")
    return lines if results.ok else [*lines, _ERROR]


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _interval(interval: Interval) -> str:
    if math.isnan(interval.value):
        return "- (not measured: no answer went on behind its first token)"
    if math.isnan(interval.low):
        return f"{_number(interval.value, 3)} (too few prompts for an interval)"
    ends = f"{interval.low:.3f} to {interval.high:.3f}"
    return f"{interval.value:.3f} (95 % interval {ends}, {interval.num_prompts} prompts)"
