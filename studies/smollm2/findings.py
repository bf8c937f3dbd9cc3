"""The comparisons of the study, their words, and what of the paper holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from evidence import Evidence, places, suites_at
from intervals import SPEED, Group, accepts, compare, paired, rates
from treespark.bench.arms import policy_name
from treespark.bench.results import Results
from treespark.bench.statistics import Interval
from treespark.policies import parse

Found = dict[tuple[str, str], dict[str, Interval]]


class Comparison(NamedTuple):
    """Two arms, what is claimed of them, and the paper's figures and the targets as relative gains by place."""

    first: str
    second: str
    claim: str
    expected: str = "above"
    paper: Mapping[str, float] = {}
    targets: Mapping[str, float] = {}

    @property
    def name(self) -> str:
        """The ratio's name, first/second."""
        return f"{self.first}/{self.second}"


# Paper figures: arXiv 2610.20175, Qwen3-4B.
COMPARISONS = (
    Comparison(
        "treespark",
        "dspark",
        "TreeSpark's tree commits more than DSpark's chain",
        paper={"general": 0.241, "writing": 0.314},
        targets={"general": 0.24, "writing": 0.31},
    ),
    Comparison(
        "treespark",
        "control",
        "Training under the tree pays at the same width, steps and policy",
        paper={"general": 0.064},
        targets={"general": 0.064},
    ),
    Comparison("treespark", "control_equal_compute", "Training under the tree pays at the same wall clock"),
    Comparison("no_survival", "treespark", "TreeSpark loses without survival", "below"),
    Comparison("no_coverage", "treespark", "TreeSpark loses without coverage", "below"),
    Comparison("narrow", "treespark", "TreeSpark loses with narrow heads", "below"),
    Comparison("retention", "control", "Our retention helps the control"),
    Comparison("survival_retention", "no_coverage", "Retention helps beside survival"),
    Comparison("coverage_retention", "no_survival", "Retention helps beside coverage"),
    Comparison("treespark_retention", "treespark", "Retention helps TreeSpark"),
)
POSITIONS_PAPER = {1: "78.8 → 90.0 %", 7: "24.7 → 37.0 %"}
SPEED_PAPER = {"general": 0.151, "writing": 0.219}
LIVE_TARGETS = {"plain": 0.3, "dspark": 0.15}
LIVE_SUITE = "gsm8k"


def compare_all(evidence: Evidence, results: Results) -> Found:
    """Returns every comparison whose arms were both measured, by place."""
    groups = evidence.groups(results)
    return {
        (item.first, item.second): {
            place: compare(results, suites_at(results, place), groups[item.first], groups[item.second])
            for place in places(results)
        }
        for item in COMPARISONS
        if item.first in groups and item.second in groups
    }


def ratio(interval: Interval | None) -> str:
    """A ratio with its interval: `1.064 [1.041, 1.088]`."""
    if interval is None or math.isnan(interval.value):
        return "-"
    if math.isnan(interval.low):
        return f"{interval.value:.3f} (no interval)"
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def gain(value: float) -> str:
    """A relative gain: `+6.4 %`."""
    return f"{100 * value:+.1f} %"


def verdict(interval: Interval, noise: float = 0.0) -> str:
    """What the interval says of the ratio; a ratio within the noise of seeds says nothing."""
    if math.isnan(interval.low):
        return "no interval"
    if abs(interval.value - 1) > noise and not interval.low <= 1 <= interval.high:
        return "above 1" if interval.low > 1 else "below 1"
    return "not distinguishable from 1"


def reached(interval: Interval, target: float) -> str:
    """Whether a target gain was reached: by the ratio itself, with its interval above 1."""
    met = interval.value >= 1 + target and interval.low > 1
    return f"target {100 * target:+.4g} % {'reached' if met else 'not reached'}"


def seed_noise(evidence: Evidence, place: str) -> float:
    """The largest |ratio - 1| of tau between two runs of one arm, which differ by their seed alone; 0 without any."""
    test, found = evidence.test, [0.0]
    for group in evidence.groups(test).values():
        taus = rates(test, suites_at(test, place), group).mean(0)
        found += [float(abs(one / other - 1)) for one in taus for other in taus]
    return max(found)


def noise_of(evidence: Evidence, item: Comparison, place: str) -> float:
    """The noise that a comparison's interval leaves out: that of seeds where one seed alone was compared."""
    groups = evidence.groups(evidence.test)
    first, second = paired(groups[item.first], groups[item.second])
    return seed_noise(evidence, place) if min(len(first.seeds), len(second.seeds)) == 1 else 0.0


def main_place(evidence: Evidence) -> str:
    """Where a comparison is judged: all suites, or the general ones where others hold prompts of an earlier round."""
    found = [place for place in places(evidence.test) if not opened(evidence, place)]
    return found[-1] if found else places(evidence.test)[-1]


def opened(evidence: Evidence, place: str) -> bool:
    """Whether a place has suites whose prompts an earlier round measured on."""
    return not set(evidence.test.settings.get("opened_suites") or []).isdisjoint(suites_at(evidence.test, place))


def judge(evidence: Evidence, item: Comparison, found: Mapping[str, Interval]) -> str:
    """The words beside a comparison: the places with a target, and the main place."""
    words = []
    for place, interval in found.items():
        target = item.targets.get(place)
        if target is not None or place == main_place(evidence):
            text = f"{place}: {verdict(interval, noise_of(evidence, item, place))}"
            text += f", {reached(interval, target)}" if target else ""
            words.append(text + (" (exploratory)" if opened(evidence, place) else ""))
    return "; ".join(words)


def claims(evidence: Evidence, found: Found) -> tuple[list[str], list[str]]:
    """Returns sentences on the paper's claims, and those on our own."""
    paper, ours = [], []
    for item in COMPARISONS:
        intervals = found.get((item.first, item.second))
        own = "etention" in item.claim
        if intervals is None:
            (ours if own else paper).append(f"**Not measured.** {item.claim} (tau {item.name}).")
            continue
        # The paper's figures are of single places; the rest is judged at the main one.
        for place in item.paper or [main_place(evidence)]:
            if place in intervals:
                text, noise = f"{item.claim}, {_where(place)}", noise_of(evidence, item, place)
                text += " (exploratory)" if opened(evidence, place) else ""
                sentence = _sentence(text, f"tau {item.name}", intervals[place], item.expected, noise)
                sentence += f" The paper: {gain(item.paper[place])}." if place in item.paper else ""
                target = item.targets.get(place)
                sentence += f" T{reached(intervals[place], target)[1:]}." if target else ""
                (ours if own else paper).append(sentence)
    return [*paper, *_position_claims(evidence), *_speed_claims(evidence)], ours


def _position_claims(evidence: Evidence) -> list[str]:
    test, groups = evidence.test, evidence.groups(evidence.test)
    if not {"treespark", "dspark"} <= groups.keys():
        return []
    sentences = []
    place = main_place(evidence)
    for depth in dict.fromkeys((1, test.depths)):
        suites = suites_at(test, place)
        interval = compare(test, suites, groups["treespark"], groups["dspark"], accepts(depth))
        text = f"More rounds accept position {depth}, {_where(place)}"
        paper = f" The paper: {POSITIONS_PAPER[depth]}." if depth in POSITIONS_PAPER else ""
        sentences.append(_sentence(text, "acceptance treespark/dspark", interval, "above") + paper)
    return sentences


def _speed_claims(evidence: Evidence) -> list[str]:
    text = "Live decoding is faster than DSpark's chain"
    live = evidence.live
    groups = evidence.groups(live) if live is not None else {}
    if live is None or not {"treespark", "dspark"} <= groups.keys():
        return [f"**Not measured.** {text} (speed treespark/dspark)."]
    sentences = []
    for place, paper in SPEED_PAPER.items():
        if suites := suites_at(live, place):
            interval = compare(live, suites, groups["treespark"], groups["dspark"], SPEED)
            sentence = _sentence(f"{text}, {_where(place)}", "speed treespark/dspark", interval, "above")
            sentences.append(f"{sentence} The paper: {gain(paper)}.")
    suites = [suite for suite in live.suite_names if LIVE_SUITE in suite.lower()]
    fast, plain = paired_live(evidence), plain_group(live)
    pairs = [(groups["treespark"], "plain", plain), (groups["treespark"], "dspark", groups["dspark"])]
    if "treespark" in fast:
        others = [("plain", plain), ("dspark", groups["dspark"]), ("dspark", fast.get("dspark"))]
        pairs += [(fast["treespark"], base, other) for base, other in others]
    for first, base, other in pairs:
        if suites and other is not None:
            target = LIVE_TARGETS[base]
            interval = compare(live, suites, first, other, SPEED)
            words = f"{verdict(interval)}; {reached(interval, target)}"
            name = f"{first.label}/{other.label}"
            sentences.append(f"On {', '.join(suites)}: speed {name} = {ratio(interval)}, {words}.")
    return sentences


def paired_live(evidence: Evidence) -> dict[str, Group]:
    """The live arms whose policies the plan chose beforehand for their speed, by name of the arm."""
    live, wanted = evidence.live, evidence.study["plan"].get("bench", {}).get("live_pair") or {}
    found = {}
    for arm, text in wanted.items():
        policy = parse(text).config()
        group = evidence.group(live, arm, policy) if live is not None else None
        if group is not None:
            found[arm] = replace(group, label=f"{arm} under {policy_name(policy)}")
    return found


def plain_group(live: Results) -> Group | None:
    """Plain decoding as a group, or None."""
    return None if live.baseline is None else Group("plain", (live.baseline,), (0,))


def _where(place: str) -> str:
    return "over all suites" if place == "all" else f"on {place} suites"


def _sentence(claim: str, name: str, interval: Interval, expected: str, noise: float = 0.0) -> str:
    state = verdict(interval, noise)
    opposite = {"above": "below 1", "below": "above 1"}[expected]
    word = {f"{expected} 1": "Holds", opposite: "Does not hold"}.get(state, "Open")
    if noise:
        state += f" (one seed each; runs of one arm differ by up to {100 * noise:.1f} %)"
    return f"**{word}.** {claim}: {name} = {ratio(interval)}, {state}."
