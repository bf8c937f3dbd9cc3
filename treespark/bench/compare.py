"""`treespark compare`: two results set against each other, suite by suite and prompt by prompt."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treespark.bench.arms import split_names
from treespark.bench.gains import pair_up
from treespark.bench.measures import MEASURES, speeds
from treespark.bench.results import Results, to_plain
from treespark.bench.statistics import Interval, compare_suites, mean_of_gains, ratio_of_means
from treespark.registry import unknown

if TYPE_CHECKING:
    from rich.table import Table

    from treespark.bench.records import PromptTrials

KINDS = ("target", "prompts", "max_new_tokens", "dtype", "template", "machine", "incomplete")
"""What two results must have in common, in words that `allow` takes."""


@dataclass(frozen=True)
class Gain:
    """The second results' arm over the first results' arm.

    Attributes:
        arms: Both arms' names, "tree" or "chain:tree".
        batch_size: Requests side by side.
        measure: tau, speed, system or per request.
        suite: Name of the suite; None over several.
        category: Category of the suites; empty for all.
        ratio: Second ÷ first, with its interval.
        method: How suites were combined: "mean of gains" or "ratio of means"; empty for one suite.
    """

    arms: str
    batch_size: int
    measure: str
    suite: str | None
    category: str
    ratio: Interval
    method: str = ""


@dataclass
class Comparison:
    """All gains of one file's arms over another's.

    Attributes:
        first: The first file.
        second: The second file.
        gains: In order of arms, batch sizes, suites and measures.
        allowed: What differs and was allowed to, in words.
        num_paired: Prompts that both files hold.
    """

    first: str
    second: str
    gains: list[Gain]
    allowed: list[str] = field(default_factory=list)
    num_paired: int = 0


def compare(
    first: str,
    second: str,
    arms: str | list[str] | None = None,
    allow: str | list[str] | None = None,
    output: str | None = None,
    seed: int = 0,
) -> Comparison:
    """Compares the results of two `treespark bench` runs on the same prompts: gains of the second over the first.

    Args:
        first: Results (JSON) of the one drafter.
        second: Results of the other.
        arms: Arms to compare, separated by commas: a name of both, or the first's and the second's, chain:tree. By
            default all arms with drafts that both have by name.
        allow: What may differ, separated by commas: target, prompts (those that both have are compared),
            max_new_tokens, dtype, template, machine (hardware or versions), incomplete (an interrupted run).
        output: File for the gains (JSON).
        seed: Of the resampling behind the intervals.

    Returns:
        The gains.

    Raises:
        FileNotFoundError: For a file that does not exist.
        ValueError: For results that are not comparable and were not allowed to differ, or have nothing in common.
    """
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}.")
    if output and Path(output).is_dir():
        raise ValueError(f"output: {output} is a folder; give the name of a file for the comparison.")
    allowed = split_names(allow or [])
    for kind in allowed:
        if kind not in KINDS:
            raise unknown("difference to allow", kind, KINDS)
    one, other = Results.load(first), Results.load(second)
    found = differences(one, other)
    for kind, what in found.items():
        if kind not in allowed:
            raise ValueError(
                f"{first} and {second} are not comparable: {what}. With --allow {kind} they are compared all the same."
            )
    pairs = _arms(one, other, arms)
    gains = [gain for pair in pairs for gain in _gains(one, other, *pair, seed)]
    if not gains:
        raise ValueError(f"{first} and {second} have no prompt in common that both decoded at the same batch size.")
    comparison = Comparison(
        first, second, gains, list(found.values()), len(_prompts(one).keys() & _prompts(other).keys())
    )
    _print(comparison, one, other)
    if output:
        file = Path(output)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.part")
        part.write_text(json.dumps(to_plain(dataclasses.asdict(comparison)), indent=1, allow_nan=False) + "\n")
        part.replace(file)
        print(f"Comparison: {output}")
    return comparison


def differences(one: Results, other: Results) -> dict[str, str]:
    """Returns what makes two results not comparable, in words, by kind; empty when nothing does."""
    found: dict[str, str] = {}
    if one.target.get("fingerprint") != other.target.get("fingerprint"):
        found["target"] = f"the targets are '{one.target.get('name')}' and '{other.target.get('name')}'"
    mine, theirs = _prompts(one), _prompts(other)
    if mine != theirs:
        missing = mine.keys() ^ theirs.keys()
        changed = {key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]}
        parts = [f"{len(missing)} only in one file"] if missing else []
        parts += [f"{len(changed)} with other tokens"] if changed else []
        suite, index = min(missing | changed)
        found["prompts"] = f"the prompts differ ({', '.join(parts)}, such as {suite}[{index}])"
    for key, kind, what in (
        ("max_new_tokens", "max_new_tokens", "max_new_tokens"),
        ("chat_template_kwargs", "template", "the chat template's options"),
    ):
        values = one.settings.get(key), other.settings.get(key)
        if values[0] != values[1]:
            found[kind] = f"{what}: {values[0]} and {values[1]}"
    if one.dtype != other.dtype:
        found["dtype"] = f"the precisions are {one.dtype} and {other.dtype}"
    if not (one.simulated and other.simulated):
        for name in ("hardware", "versions"):
            left, right = getattr(one, name), getattr(other, name)
            other_keys = [key for key in left.keys() | right.keys() if left.get(key) != right.get(key)]
            if other_keys:
                key = min(other_keys)
                found.setdefault("machine", f"{name}, {key}: {left.get(key)} and {right.get(key)}")
    for results in (one, other):
        if not results.complete:
            found["incomplete"] = "one of the runs was interrupted"
    return found


def _prompts(results: Results) -> dict[tuple[str, int], str]:
    """Hash of each prompt by suite and place."""
    return {(item.suite, item.index): item.sha256 for item in results.prompts}


def _arms(one: Results, other: Results, arms: str | Sequence[str] | None) -> list[tuple[str, str]]:
    """Returns pairs of arms: the first results' and the second's."""
    if arms is None or not split_names(arms):
        drafted = [arm["name"] for arm in one.arms if arm["kind"] in ("policy", "lookup")]
        found = [(name, name) for name in drafted if name in other.arm_names]
        if not found:
            raise ValueError(
                f"No arm with drafts has the same name in both files ({', '.join(one.arm_names)}; "
                f"{', '.join(other.arm_names)}): name a pair, such as --arms chain:tree."
            )
        return found
    pairs = []
    for entry in split_names(arms):
        left, _, right = entry.partition(":")
        pairs.append((left.strip(), right.strip() or left.strip()))
    for left, right in pairs:
        for name, results in ((left, one), (right, other)):
            if name not in results.arm_names:
                raise unknown("arm", name, results.arm_names)
    return pairs


def _gains(one: Results, other: Results, left: str, right: str, seed: int) -> list[Gain]:
    """Compares two arms at every batch size that both were decoded at."""
    # Same drafter shape, same tree: what is compared is the training alone.
    fixed = _shape(one, left) == _shape(other, right)
    label = left if left == right else f"{left}:{right}"
    found = []
    for size in [size for size in one.batch_sizes if size in other.batch_sizes]:
        names = [name for name in one.suite_names if name in other.suite_names]
        joint = {name: _join(one.select(name, size), other.select(name, size), left, right) for name in names}
        names = [name for name in names if joint[name]]
        categories = {item["name"]: item["category"] for item in one.suites}
        places: list[tuple[str | None, str, list[str]]] = [(name, categories[name], [name]) for name in names]
        if len(names) > 1:
            several = dict.fromkeys(categories[name] for name in names)
            for category in several if len(several) > 1 else ():
                places.append((None, category, [name for name in names if categories[name] == category]))
            places.append((None, "", names))
        timed = [] if one.simulated or other.simulated else speeds(size)
        for suite, category, chosen in places:
            for name in ["tau", *timed]:
                measure = MEASURES[name]
                means = fixed or not measure.is_speed
                streams = [names.index(item) for item in chosen]
                pairs = pair_up([joint[item] for item in chosen], streams, _SECOND, _FIRST, measure)
                ratio = compare_suites(pairs, ratio_of_means if means else mean_of_gains, seed=seed)
                method = "" if suite is not None else "ratio of means" if means else "mean of gains"
                found.append(Gain(label, size, name, suite, category, ratio, method))
    return found


def _shape(results: Results, name: str) -> tuple[Any, Any]:
    """An arm's policy, and the options of its drafter."""
    arm = next(arm for arm in results.arms if arm["name"] == name)
    return arm["policy"], results.drafters.get(arm["drafter"], {}).get("config")


_FIRST, _SECOND = "first", "second"


def _join(one: Sequence[PromptTrials], other: Sequence[PromptTrials], left: str, right: str) -> list[PromptTrials]:
    """Puts both files' trials of the same prompt and repeat into one record."""
    theirs = {(item.index, item.sha256, item.repeat): item for item in other if right in item.trials}
    joint = []
    for item in one:
        match = theirs.get((item.index, item.sha256, item.repeat))
        if match is not None and left in item.trials:
            trials = {_FIRST: item.trials[left], _SECOND: match.trials[right]}
            joint.append(dataclasses.replace(item, trials=trials))
    return joint


def _print(comparison: Comparison, one: Results, other: Results) -> None:
    from rich.console import Console

    from treespark.bench.report import WIDTH

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for name, results in (("first ", one), ("second", other)):
        path = comparison.first if results is one else comparison.second
        drafter = results.drafter_label
        console.print(f"{name}: {path}, drafter {drafter}", highlight=False, markup=False, soft_wrap=True)
    console.print(gain_table(comparison))
    for line in (
        f"Second over first on the same {comparison.num_paired} prompts; 95 % intervals by bootstrap over prompts.",
        "The runs were not interleaved: intervals of speeds leave out what the machine did in between.",
    ):
        console.print(line, highlight=False, markup=False)
    for what in comparison.allowed:
        console.print(f"WARNING: allowed to differ: {what}.", highlight=False, markup=False, style="bold yellow")


def gain_table(comparison: Comparison) -> Table:
    """Builds the table of gains: one row per arm, batch size, suite and measure."""
    from rich.table import Table

    table = Table(title="gains", title_justify="left")
    for column in ("arms", "batch", "suite", "measure", "ratio", "95 % interval", "gain", "prompts"):
        table.add_column(column, justify="right" if column in ("batch", "ratio", "gain", "prompts") else "left")
    former: Any = None
    for gain in comparison.gains:
        place = gain.suite or f"{gain.category or 'all suites'} ({gain.method})"
        key = (gain.arms, gain.batch_size, gain.suite, gain.category)
        if former is not None and key != former:
            table.add_section()
        former = key
        ratio = gain.ratio
        table.add_row(
            gain.arms,
            str(gain.batch_size),
            place,
            gain.measure,
            "-" if ratio.value != ratio.value else f"{ratio.value:.3f}",
            f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio.low == ratio.low else "-",
            "-" if ratio.value != ratio.value else f"{100 * (ratio.value - 1):+.1f} %",
            str(ratio.num_prompts),
        )
    return table
