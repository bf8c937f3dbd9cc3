"""The report's tables on tau: suites by arms, pairs, positions, budgets and other policies, the search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evidence import Evidence, gather, places, policies, suites_at
from findings import COMPARISONS, POSITIONS_PAPER, Found, compare_all, gain, judge, ratio
from intervals import TAU, Group, accepts, compare, paired, rates
from pictures import draw
from treespark.bench.arms import policy_name
from treespark.bench.results import Results

SHOWN = ("dspark", "control", "treespark")
BUDGET = "num_draft_nodes"
_NUMERIC = ("", *"0123456789-+*(")

Picture = Callable[[str], Path]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table: columns of numbers to the right, of words to the left."""
    numeric = [all(cell[:1] in _NUMERIC for cell in column) for column in zip(*rows, strict=True)]
    lines = [head, ["---:" if right else "---" for right in numeric or [False] * len(head)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many decimals, a dash where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def mean_tau(results: Results, group: Group, place: str) -> float:
    """Tau pooled within each suite, averaged over runs, then over suites."""
    return float(rates(results, suites_at(results, place), group, TAU).mean())


def labels(groups: dict[str, Group]) -> list[str]:
    """Names of arms, with the number of runs where there are several."""
    return [f"{arm} ({len(group.names)})" if len(group.names) > 1 else arm for arm, group in groups.items()]


def main_table(evidence: Evidence) -> list[str]:
    """Suites by arms."""
    test, groups = evidence.test, evidence.groups(evidence.test)
    rows = []
    for suite in test.suite_names:
        rows.append([suite, *(number(float(rates(test, [suite], group).mean())) for group in groups.values())])
    for place in places(test):
        name = f"**mean, {place}** ({len(suites_at(test, place))})"
        rows.append([name, *(f"**{number(mean_tau(test, group, place))}**" for group in groups.values())])
    return [*table(["tau", *labels(groups)], rows), "", *_exploratory(evidence)]


def _exploratory(evidence: Evidence) -> list[str]:
    runs = [run for run in evidence.runs if evidence.is_exploratory(run)]
    control, test = evidence.group(evidence.test, "control"), evidence.test
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        group = gather(test, arm, [run for run in runs if run["arm"] == arm])
        if group is not None:
            against = ratio(compare(test, suites_at(test, "all"), group, control)) if control else "-"
            rows.append([arm, *(number(mean_tau(test, group, place)) for place in places(test)), against])
    if not rows:
        return []
    return [
        "Exploratory, tried after the test suites had been opened; no part of the protocol:",
        "",
        *table(["tau", *places(test), "tau arm/control, all"], rows),
        "",
    ]


def pair_table(evidence: Evidence, found: Found) -> list[str]:
    """The comparisons with their intervals, the paper's figures and verdicts."""
    shown = places(evidence.test)
    groups = evidence.groups(evidence.test)
    rows = []
    for item in COMPARISONS:
        intervals = found.get((item.first, item.second))
        if intervals is None:
            continue
        pair = paired(groups[item.first], groups[item.second])
        runs = "/".join(str(len(group.names)) for group in pair)
        paper = ", ".join(f"{gain(value)} {place}" for place, value in item.paper.items()) or "-"
        cells = [ratio(intervals[place]) for place in shown]
        rows.append([f"tau {item.name}", runs, *cells, paper, judge(evidence, item, intervals)])
    if not rows:
        return ["No two arms of a comparison were measured."]
    return table(["ratio", "runs", *shown, "paper", "verdict"], rows)


def earlier_table(evidence: Evidence, found: Found) -> list[str]:
    """The comparisons of earlier rounds beside this one's; nothing without an earlier round."""
    if not evidence.earlier:
        return []
    every = evidence.earlier | {"this round": evidence}
    rounds = {name: found if other is evidence else compare_all(other, other.test) for name, other in every.items()}
    rows = []
    for item in COMPARISONS:
        for name, intervals in rounds.items():
            if held := intervals.get((item.first, item.second)):
                rows.append([f"tau {item.name}", name, *(ratio(held.get(place)) for place in places(evidence.test))])
    taus = []
    for name, other in every.items():
        groups = {arm: group for arm, group in other.groups(other.test).items() if arm in SHOWN}
        shown = (f"{arm} {number(mean_tau(other.test, group, 'all'))}" for arm, group in groups.items())
        taus.append(f"{name}: {', '.join(shown)}")
    return [
        "Rounds differ in their starts, their constants and their test prompts; each is reported as it came out. The "
        "plan, the results and the remarks of an earlier round lie in its folder. tau over all suites: "
        f"{'; '.join(taus)}.",
        "",
        *table(["ratio", "round", *places(evidence.test)], rows),
    ]


def position_table(evidence: Evidence, picture: Picture) -> list[str]:
    """Acceptance by position, and its picture."""
    test = evidence.test
    suites, depths = suites_at(test, "all"), range(1, test.depths + 1)
    groups = {arm: group for arm, group in evidence.groups(test).items() if arm in SHOWN}
    if not groups:
        return ["None of dspark, control and treespark was measured."]
    rows, lines = [], {}
    for arm, group in groups.items():
        shares = [float(rates(test, suites, group, accepts(depth)).mean()) for depth in depths]
        rows.append([arm, *(number(share) for share in shares)])
        lines[arm] = ([float(depth) for depth in depths], shares)
    for other in ("control", "dspark"):
        if {other, "treespark"} <= groups.keys():
            found = [compare(test, suites, groups["treespark"], groups[other], accepts(depth)) for depth in depths]
            rows.append([f"treespark/{other}", *map(ratio, found)])
    axes = {"xlabel": "position in the block", "ylabel": "share of rounds that accept it", "ylim": (0, 1)}
    draw({"all suites": lines}, picture("acceptance"), **axes)
    paper = ", ".join(f"position {depth}: {text}" for depth, text in POSITIONS_PAPER.items())
    return [
        f"Share of rounds that accept at least so many draft tokens. The paper, DSpark → TreeSpark: {paper}.",
        "",
        *table(["position", *map(str, depths)], rows),
        "",
        f"![Acceptance by position]({picture('acceptance').name})",
    ]


def budget_tables(evidence: Evidence, picture: Picture) -> list[str]:
    """Tau against the budget for the sweeps, and one column for each other policy."""
    test = evidence.test
    families: dict[str, dict[int, dict[str, Any]]] = {}
    others: dict[str, dict[str, Any]] = {}
    for policy in policies(test):
        budget = policy.get("init_args", {}).get(BUDGET)
        if budget is None:
            others[policy_name(policy)] = policy
        else:
            families.setdefault(policy_name(policy, [BUDGET]), {})[int(budget)] = policy
    for name in [name for name, members in families.items() if len(members) == 1]:
        (policy,) = families.pop(name).values()
        others[policy_name(policy)] = policy
    lines, text = {}, []
    for family, members in families.items():
        text += [f"`{family}` by budget N:", "", *_sweep(evidence, members, len(families) > 1, family, lines), ""]
    if families:
        draw({"all suites": lines}, picture("budget"), xlabel="budget N (packed nodes)", ylabel="tau")
        text += [f"![tau against the budget]({picture('budget').name})", ""]
    else:
        text += ["No policy was measured under several budgets.", ""]
    if others:
        text += ["The same drafters under other policies:", "", *_policies(evidence, others)]
    return text


def _sweep(
    evidence: Evidence, members: dict[int, dict[str, Any]], several: bool, family: str, lines: dict[str, Any]
) -> list[str]:
    test, budgets = evidence.test, sorted(members)
    found = {budget: evidence.groups(test, members[budget]) for budget in budgets}
    rows = []
    for arm in evidence.arms:  # the same runs under every budget
        _share_seeds([groups for groups in found.values() if arm in groups], arm)
    for arm in evidence.arms:
        taus = [mean_tau(test, found[n][arm], "all") if arm in found[n] else math.nan for n in budgets]
        if not all(map(math.isnan, taus)):
            runs = max(len(groups[arm].names) for groups in found.values() if arm in groups)
            rows.append([f"{arm} ({runs})" if runs > 1 else arm, *map(number, taus)])
            name = f"{arm}, {family}" if several else arm
            lines[name] = ([float(n) for n in budgets], taus)
    for first, second in (("treespark", "control"), ("treespark", "dspark")):
        cells = []
        for n in budgets:
            above, below = found[n].get(first), found[n].get(second)
            cells.append(ratio(compare(test, test.suite_names, above, below)) if above and below else "-")
        if set(cells) != {"-"}:
            rows.append([f"tau {first}/{second}", *cells])
    return table(["tau, all suites", *(f"N = {n}" for n in budgets)], rows)


def _policies(evidence: Evidence, others: dict[str, dict[str, Any]]) -> list[str]:
    test = evidence.test
    found = {name: evidence.groups(test, policy) for name, policy in others.items()}
    rows = []
    for arm in evidence.arms:
        _share_seeds([groups for groups in found.values() if arm in groups], arm)
        cells = [number(mean_tau(test, groups[arm], "all")) if arm in groups else "-" for groups in found.values()]
        if set(cells) != {"-"}:
            rows.append([arm, *cells])
    return table(["tau, all suites", *(f"`{name}`" for name in others)], rows)


def _share_seeds(columns: Sequence[dict[str, Group]], arm: str) -> None:
    """Leaves an arm, in each column that has it, the runs that all these columns have."""
    if columns:
        shared = set.intersection(*(set(groups[arm].seeds) for groups in columns))
        for groups in columns:
            groups[arm] = groups[arm].only(shared)


def gradient_table(evidence: Evidence) -> list[str]:
    """Norms and directions of the loss terms' gradients; nothing where they were not measured."""
    if evidence.gradients is None:
        return []
    steps = evidence.study["plan"]["bench"].get("gradient_steps")
    rows = [
        [name, f"{item['norm']:.4f}", number(item["to_base"]), number(item["cosine"])]
        for name, item in evidence.gradients["terms"].items()
    ]
    return [
        f"Mean gradient over {steps} batches at the start that the arms continue, each term with its coefficient; "
        "base: the control's losses together.",
        "",
        *table(["term", "norm", "to base", "cosine with base"], rows),
    ]


def search_table(evidence: Evidence) -> list[str]:
    """The candidates on validation prompts against the control of as many steps, and the final pairs there."""
    validation = evidence.validation
    if validation is None:
        return ["Not run: there is no validation.json."]
    entries = evidence.study.get("search") or []
    chosen = _chosen(evidence.study["plan"].get("chosen"))
    suites, rows = suites_at(validation, "all"), []
    for entry in entries:
        group = gather(validation, entry["name"], [entry])
        reference = _reference(evidence, validation, entry, entries)
        against = "-"
        if group is not None and reference is not None:
            same = group.names == reference.names
            against = "(the control itself)" if same else ratio(compare(validation, suites, group, reference))
        tau = number(mean_tau(validation, group, "all")) if group is not None else "not measured"
        mark = "chosen" if entry["name"] in chosen else ""
        cells = [entry["name"], entry["group"], options_text(entry.get("options") or {}), str(entry["steps"])]
        rows.append([*cells, tau, against, mark])
    count = len({(item.suite, item.index) for item in validation.prompts})
    text = [f"{count} validation prompts, drawn from the training prompts; simulated rounds, one run each.", ""]
    if rows:
        head = ["candidate", "group", "options", "steps", "tau", "tau candidate/control of as many steps", ""]
        text += [*table(head, rows), ""]
        text += ["The best of several looks better here than it is; the test suites decide.", ""]
    else:
        text += ["No candidates were recorded.", ""]
    pairs = compare_all(evidence, validation)
    # The last place is that of all suites.
    shown = [f"tau {first}/{second} {ratio(list(found.values())[-1])}" for (first, second), found in pairs.items()]
    if shown:
        text += [f"The final runs on the same prompts: {'; '.join(shown)}."]
    return text


def _reference(
    evidence: Evidence, validation: Results, entry: dict[str, Any], entries: Sequence[dict[str, Any]]
) -> Group | None:
    """The control of as many steps: of the search (the chosen one first), else the final runs of the control."""
    chosen = _chosen(evidence.study["plan"].get("chosen"))
    controls = [item for item in entries if item["group"] == "control" and item["steps"] == entry["steps"]]
    for item in sorted(controls, key=lambda item: item["name"] not in chosen):
        found = gather(validation, "control", [item])
        if found is not None:
            return found
    final = [run for run in evidence.runs_of("control") if run["steps"] == entry["steps"]]
    return gather(validation, "control", final[:1])


def _chosen(value: Any) -> set[str]:
    """The names in plan["chosen"]: a name, a list of names, or names by group."""
    if isinstance(value, str):
        return {value}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return set().union(*(_chosen(part) for part in parts))


def options_text(options: dict[str, Any], prefix: str = "") -> str:
    """Options as `key=value`, those of nested ones behind a dot."""
    parts = []
    for key, value in options.items():
        name = f"{prefix}{key}"
        parts.append(options_text(value, f"{name}.") if isinstance(value, dict) and value else f"{name}={value}")
    return ", ".join(parts)
