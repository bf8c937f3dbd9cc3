"""Turns the study's stored results into a page of Markdown and its pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence import ARMS, Evidence, places, policies
from findings import LIVE_SUITE, LIVE_TARGETS, SPEED_PAPER, claims, compare_all, gain, plain_group, ratio, seed_noise
from intervals import SPEED, Group, compare, rates
from pictures import draw
from tables import (
    SHOWN,
    Picture,
    budget_tables,
    earlier_table,
    gradient_table,
    main_table,
    mean_tau,
    number,
    options_text,
    pair_table,
    position_table,
    search_table,
    table,
)
from treespark.bench.arms import policy_name
from treespark.bench.results import Results
from treespark.bench.statistics import NUM_RESAMPLES

CALIBRATION = ("confidence/calibration_error", "confidence/brier", "coverage/total", "edge_loss")


def report(results: str | Path, output: str | Path) -> None:
    """Writes the report and, beside it, its pictures.

    Args:
        results: Folder of study.json and test.json and, where they were made, validation.json, live.json and
            calibration.json; remarks.md lies beside the folder.
        output: The page; a picture is called `<page>.<name>.png`.

    Raises:
        FileNotFoundError: Without study.json or test.json.
        ValueError: When a file holds something else.
    """
    evidence, page = Evidence.load(results), Path(output)
    page.parent.mkdir(parents=True, exist_ok=True)

    def picture(name: str) -> Path:
        return page.with_suffix(f".{name}.png")

    found = compare_all(evidence, evidence.test)
    parts: list[tuple[str, Sequence[str]]] = [
        ("Setting", _setting(evidence)),
        ("tau on the test suites", main_table(evidence)),
        ("Pairs", [*_pairs_note(evidence), "", *pair_table(evidence, found)]),
        ("Earlier rounds", earlier_table(evidence, found)),
        ("Acceptance by position", position_table(evidence, picture)),
        ("Budgets and policies", budget_tables(evidence, picture)),
        ("Search", search_table(evidence)),
        ("Gradients of the loss terms", gradient_table(evidence)),
        ("Training cost", _cost(evidence)),
        ("Live decoding", _live(evidence)),
        ("Calibration", _calibration(evidence, picture)),
        ("What holds and what does not", _claims(evidence, found)),
        ("Why, as we think", [evidence.remarks.strip() if evidence.remarks else "No remarks were written."]),
        ("What it was made with", _provenance(evidence)),
    ]
    lines = _head(evidence)
    for title, text in parts:
        if not text:
            continue
        lines += ["", f"## {title}", "", *text]
    text = "\n".join(line.rstrip() for line in lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    page.write_text(text.rstrip() + "\n", encoding="utf-8")


def _head(evidence: Evidence) -> list[str]:
    test = evidence.test
    lines = [
        "# The SmolLM2 study: does training under the deployed tree pay?",
        "",
        "Made by `python studies/smollm2/study.py report` from the stored results; only the remarks are typed by hand.",
        "Ratios are the product; absolute numbers belong to this machine and this small target. In short:",
        "[what holds and what does not](#what-holds-and-what-does-not).",
    ]
    warnings = [f"test.json: {message}" for message in test.warnings()]
    for name, results in (("validation.json", evidence.validation), ("live.json", evidence.live)):
        if results is not None and not results.complete:
            warnings.append(f"{name}: of an interrupted run.")
    return lines + ([""] if warnings else []) + [f"* Warning: {message}" for message in warnings]


def _setting(evidence: Evidence) -> list[str]:
    data, test = evidence.study["data"], evidence.test
    kinds = ", ".join(f"{name} {count:,}" for name, count in (data.get("by_category") or {}).items())
    share = data.get("draft_vocab_share")
    prompts = {(item.suite, item.index) for item in test.prompts}
    name = test.target.get("name") or "the target"
    lines = [
        f"* Data: greedy answers of {name} to {_count(data, 'num_prompts')} prompts ({kinds}), "
        f"{_count(data, 'num_own_writing')} of the writing prompts our own; {_count(data, 'num_removed')} were removed "
        f"because they overlap an evaluation suite. {_count(data, 'num_train')} train, "
        f"{_count(data, 'num_validation')} validate; {_count(data, 'num_tokens')} tokens, prompts included"
        + (f"; {100 * share:.1f} % of the validation answers' tokens can be drafted." if share is not None else "."),
        f"* Test: {len(test.suite_names)} suites, {len(prompts)} prompts, at most "
        f"{test.settings.get('max_new_tokens')} new tokens; rounds simulated on the target's own greedy answers. "
        "Last checkpoints, each under the policy that it was trained for, unless a table says otherwise.",
        *_opened(test),
        "* tau: committed tokens per round, the bonus token included. It is pooled within a suite, averaged over the "
        "runs (seeds) of an arm, then over suites, unweighted.",
        "* Arms:",
    ]
    for arm in evidence.arms:
        seeds = ", ".join(str(run["seed"]) for run in evidence.runs_of(arm))
        recorded = evidence.group(test, arm)
        policy = next((item["policy"] for item in test.arms if recorded and item["name"] == recorded.names[0]), None)
        shown = f"`{policy_name(policy)}`" if policy else "not measured"
        lines.append(f"  * {arm}: {ARMS.get(arm, 'described in the plan')}; {shown}; seeds {seeds}.")
    return lines


def _opened(test: Results) -> list[str]:
    suites = test.settings.get("opened_suites") or []
    return [
        "* No test prompt of these simulated rounds had been measured on before, but for those of suites that an "
        f"earlier round used up, which are therefore exploratory: {', '.join(suites)}."
    ] * bool(suites)


def _pairs_note(evidence: Evidence) -> list[str]:
    most = max(len(evidence.runs_of(arm)) for arm in evidence.arms) if evidence.arms else 0
    words = {1: "one seed an arm", 2: "two seeds an arm", 3: "three seeds an arm"}.get(most, f"{most} seeds an arm")
    return [
        f"Ratios with 95 % bootstrap intervals: {NUM_RESAMPLES:,} resamples draw prompts within suites, the same for "
        "both arms, and runs of each arm (arms that share seeds are compared on these alone, and draw them together). "
        f"All seeds of an arm continue the same start. With at most {words}, the seeds' part of an interval is rough; "
        "where one seed alone is compared it has none, and a ratio counts only if it is further from 1 than any two "
        "runs of one arm are from each other "
        f"({', '.join(f'{100 * seed_noise(evidence, place):.1f} % {place}' for place in places(evidence.test))}). "
        "*runs*: of the first and of the second arm. *paper*: arXiv 2610.20175, Qwen3-4B. A target is reached when the "
        "ratio reaches it and the interval lies above 1.",
    ]


def _cost(evidence: Evidence) -> list[str]:
    def mean(runs: Sequence[dict[str, Any]], key: str) -> float:
        found = [run[key] for run in runs if run.get(key) is not None]
        return sum(found) / len(found) if found else math.nan

    control = evidence.runs_of("control")
    rows = []
    for arm in evidence.arms:
        runs = evidence.runs_of(arm)
        step, base = mean(runs, "seconds_per_step"), mean(control, "seconds_per_step")
        whole = mean(runs, "seconds") / mean(control, "seconds")
        starts = sorted({run.get("start") or "from nothing" for run in runs})
        cells = [number(mean(runs, "num_parameters") / 1e6, 2), number(mean(runs, "steps"), 0)]
        cells += [number(mean(runs, "seconds") / 60, 1), number(whole, 2), number(step, 2), number(step / base, 2)]
        rows.append([arm, str(len(runs)), ", ".join(starts), *cells])
    head = ["arm", "runs", "start", "parameters, M", "steps", "minutes", "to control", "s/step, alone", "to control"]
    hours = sum(run["seconds"] for run in evidence.runs if run.get("seconds") is not None) / 3600
    note = f"Means over runs; minutes are wall clock beside other work, all runs together {hours:.1f} hours."
    return [note, "", *table(head, rows)]


def _live(evidence: Evidence) -> list[str]:
    live = evidence.live
    if live is None:
        return ["Not run: there is no live.json."]
    recorded = evidence.groups(live)
    groups: dict[str, Group] = dict(recorded)
    for policy in policies(live):
        for arm, group in evidence.groups(live, policy).items():
            if arm not in recorded or group.names != recorded[arm].names:
                groups[f"{arm}, {policy_name(policy)}"] = group
    plain, chain = plain_group(live), recorded.get("dspark")
    near = [suite for suite in live.suite_names if LIVE_SUITE in suite.lower()]
    shown = {"all": live.suite_names} | ({"gsm8k": near} if near and near != live.suite_names else {})
    rows = []
    for label, group in (({"plain": plain} if plain else {}) | groups).items():
        cells = [number(float(rates(live, live.suite_names, group, SPEED).mean()), 1)]
        cells.append("-" if group is plain else number(mean_tau(live, group, "all"), 2))
        for suites in shown.values():
            for base in (plain, chain):
                skip = base is None or base is group or group is plain
                cells.append("-" if skip else ratio(compare(live, suites, group, base, SPEED)))
        rows.append([label, *cells, _identical(live, group)])
    bases = [f"speed arm/{base}, {place}" for place in shown for base in ("plain", "dspark")]
    prompts = len({(item.suite, item.index) for item in live.prompts})
    targets = " and ".join(f"{1 + value:g} × {base}" for base, value in LIVE_TARGETS.items())
    paper = ", ".join(f"{gain(value)} {place}" for place, value in SPEED_PAPER.items())
    note = (
        f"{prompts} prompts, one request at a time, arms interleaved, {live.dtype}. Speed is tokens of the rounds per "
        "second of decoding; a ratio over suites is one plus the mean of the suites' gains. The paper, TreeSpark over "
        f"DSpark: {paper}. Targets for treespark on GSM8K-like prompts: {targets}; see the claims below."
    )
    return [note, "", *table(["arm", "tokens/s", "tau", *bases, "identical"], rows), "", _outputs(live)]


def _identical(live: Results, group: Group) -> str:
    trials = [prompt.trials[name] for prompt in live.prompts for name in group.names if name in prompt.trials]
    found = [trial.identical for trial in trials if trial.identical is not None]
    return f"{sum(found)}/{len(found)}" if found else "-"


def _outputs(live: Results) -> str:
    if not live.judged:
        return "Outputs were not compared with plain decoding's."
    good = "as greedy decoding allows" if live.ok else "**more than near-ties explain: do not trust these numbers**"
    if live.narrow:
        counts = f"{live.num_near_ties} near-ties, {len(live.misses)} misses"
        return f"{live.num_judged_tokens:,} tokens judged, {counts}: {good}."
    return (
        f"{live.num_compared_tokens:,} tokens compared with plain decoding's: {len(live.differences)} outputs differ, "
        f"{live.num_near_ties} of them at a near-tie: {good}."
    )


def _calibration(evidence: Evidence, picture: Picture) -> list[str]:
    found = evidence.calibration
    if found is None:
        return ["Not run: there is no calibration.json."]
    curves = found.get("reliability") or {}
    starts = {run.get("start") for run in evidence.runs}
    order = [run["name"] for run in evidence.runs]
    names = [name for name in found if name not in ("reliability", "drafters")]
    names.sort(key=lambda name: order.index(name) if name in order else -1)
    keys = [key for key in CALIBRATION if any(key in found[name] for name in names)]
    further = dict.fromkeys(key for name in names for key in found[name] if not isinstance(found[name][key], list))
    keys += [key for key in further if key not in keys and not key[-1:].isdigit()]  # figures by depth end in a digit
    errors = ["path_mass"] if any("path_mass" in curves.get(name, {}) for name in names) else []
    rows = []
    for name in names:
        cells = [number(found[name].get(key)) for key in keys]
        cells += [number(calibration_error(curves.get(name, {}).get(key) or [])) for key in errors]
        rows.append([f"{name} (a start)" if name in starts else name, *cells])
    lines = [
        "Starts are before the runs that go on from them. The path mass's error is the mean over bins, weighted by "
        "their counts, of |predicted - share on the target's path|.",
        "",
        *table(["run", *keys, *(f"{key} calibration error" for key in errors)], rows),
    ]
    panels = {}
    for key, title in (("confidence", "confidence head"), ("path_mass", "path mass")):
        drawn: dict[str, tuple[list[float], list[float]]] = {}
        for name in names:
            arm = evidence.arm_of(name)
            first = arm in SHOWN and name == evidence.runs_of(arm)[0]["name"] if evidence.runs_of(arm or "") else False
            bins = [item for item in curves.get(name, {}).get(key) or [] if item[2] and None not in item]
            if bins and (first or name in starts):
                drawn[name] = ([item[0] for item in bins], [item[1] for item in bins])
        if drawn:
            panels[title] = drawn
    if panels:
        draw(panels, picture("reliability"), diagonal=True, xlabel="predicted", ylabel="true", xlim=(0, 1), ylim=(0, 1))
        lines += ["", f"![Reliability]({picture('reliability').name})"]
    return lines


def calibration_error(bins: Sequence[Sequence[float | None]]) -> float:
    """Returns the mean of |predicted - true| over bins of [predicted, true, count], weighted; nan without any."""
    full = [item for item in bins if item[2] and None not in item]
    count = sum(item[2] for item in full)
    return sum(item[2] * abs(item[0] - item[1]) for item in full) / count if count else math.nan


def _claims(evidence: Evidence, found: Any) -> list[str]:
    paper, ours = claims(evidence, found)
    lines = ["The paper's claims, here. *Holds* and *does not hold* are said where the interval excludes 1.", ""]
    lines += [f"* {sentence}" for sentence in paper]
    return [*lines, "", "Ours:", "", *(f"* {sentence}" for sentence in ours)]


def _provenance(evidence: Evidence) -> list[str]:
    data, runs, test = evidence.study["data"], evidence.runs, evidence.test
    rows = [[key, f"`{value}`"] for key, value in data.items() if key.endswith("sha256")]
    rows += [[f"target {test.target.get('name', '')}", f"`{test.target.get('fingerprint')}`"]]
    measured = [item for item in (test, evidence.validation, evidence.live) if item is not None]
    for kind in ("versions", "hardware"):
        sources = [run.get(kind) or {} for run in runs] + [getattr(item, kind) for item in measured]
        for key in dict.fromkeys(key for source in sources for key in source):
            values = dict.fromkeys(_plain(source[key]) for source in sources if source.get(key) not in (None, []))
            rows += [[key, " / ".join(values)]] if values else []
    rows += [["seed of the resampling", str(test.seed)]]
    lines = [*table(["", "value"], rows), ""]
    head = ["run", "seed", "start", "added losses", "drafter SHA-256", "recipe SHA-256"]
    cells = []
    for run in runs:
        losses = run.get("losses") or {}
        shown = "; ".join(f"{name}({options_text(options or {})})" for name, options in losses.items())
        hashes = [f"`{(run.get(key) or '-')[:12]}`" for key in ("drafter_sha256", "recipe_sha256")]
        cells.append([run["name"], str(run["seed"]), run.get("start") or "-", shown or "-", *hashes])
    return lines + table(head, cells)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _count(data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    return "an unrecorded number of" if value is None else f"{value:,}"
