"""The first study's report: cells, ratios and verdicts from records whose tau is known, and its intervals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.study_results import BUDGETED, CHAIN, SUITES, budget, entry, noisy, results, run, scripts, write
from treespark.bench.gains import pair_up
from treespark.bench.measures import MEASURES
from treespark.bench.results import Results
from treespark.bench.statistics import compare_suites
from treespark.policies import parse


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The report as a module."""
    with scripts("report") as found:
        yield found["report"]


def known() -> tuple[list[dict[str, Any]], Results]:
    """Four arms that share no seed: dspark 2 tokens a round, control 2.5, narrow 3.5, and treespark 3 under
    seed 1 and 4 under seed 2.

    On the writing suite treespark has one token more.
    """
    runs = [run("dspark", 9), run("control", 9), run("treespark", 1), run("treespark", 2), run("narrow", 9)]
    arms = [entry("dspark-9", CHAIN), *(entry(item["name"], BUDGETED) for item in runs[1:])]
    pattern = {"dspark-9": [2, 2], "control-9": [2, 3], "treespark-1": [3, 3], "treespark-2": [4, 4]}
    pattern["narrow-9"] = [3, 4]

    def rounds(drafter: str) -> Any:
        more = drafter.startswith("treespark")
        return lambda suite, index: [count + (more and suite == "poetry") for count in pattern[drafter]]

    return runs, results(arms, {arm["name"]: rounds(arm["drafter"]) for arm in arms})


def row(page: str, first: str) -> list[str]:
    """The cells of the first table row that starts so."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def made(script: ModuleType, folder: Path, output: Path) -> str:
    script.report(str(folder), str(output))
    return output.read_text(encoding="utf-8")


def steady(script: ModuleType, folder: Path, runs: list[dict[str, Any]], taus: Sequence[int]) -> str:
    """The page of runs whose every round commits the same number of tokens."""
    arms = [entry(item["name"], BUDGETED) for item in runs]
    rounds = {arm["name"]: lambda suite, index, tau=tau: [tau, tau] for arm, tau in zip(arms, taus, strict=True)}
    return made(script, write(folder / "results", runs, results(arms, rounds)), folder / "page.md")


def test_cells_and_verdicts(script: ModuleType, tmp_path: Path) -> None:
    """Seeds of 3 and 4 average to 3.5 (writing: 4.5); all is (3.5 + 3.5 + 4.5) / 3 over three suites.

    treespark/dspark is 3.5 / 2 = 1.75, and drawing one seed twice gives 1.5 or 2. narrow/treespark is 3.5 / 3.833 over
    all suites and 1 on general ones, where the seeds' draws lie around it.
    """
    page = made(script, write(tmp_path / "s" / "results", *known()), tmp_path / "page.md")
    heads = [line for line in page.splitlines() if line.startswith("| tau |")]
    assert heads == ["| tau | dspark | control | treespark (2) | narrow |"]
    assert row(page, "gsm8k") == ["2.000", "2.500", "3.500", "3.500"]
    assert row(page, "**mean, writing** (1)") == ["**2.000**", "**2.500**", "**4.500**", "**3.500**"]
    assert row(page, "**mean, all** (3)")[2] == "**3.833**"
    cells = row(page, "tau treespark/dspark")
    assert cells[:3] == ["2/1", "1.750 [1.500, 2.000]", "2.250 [2.000, 2.500]"]
    assert cells[4] == "+24.1 % general, +31.4 % writing"
    words = ["general: above 1, target +24 % reached", "writing: above 1, target +31 % reached", "all: above 1"]
    assert cells[5] == "; ".join(words)
    assert row(page, "tau treespark/control")[1].startswith("1.400 [1.200, 1.600]")
    assert row(page, "tau narrow/treespark")[1] == "1.000 [0.875, 1.167]"
    assert "**Open.** TreeSpark loses with narrow heads, over all suites" in page
    assert "**Holds.** Training under the tree pays at the same width, steps and policy, on general suites" in page
    assert "**Not measured.** TreeSpark loses without survival (tau no_survival/treespark)." in page
    assert "**Holds.** More rounds accept position 1" not in page  # every round of both accepts it


def test_no_gain_is_said(script: ModuleType, tmp_path: Path) -> None:
    """A TreeSpark of 2 tokens a round beside a control of 4 does not hold; one that is the control is open."""
    runs = [run("control", 1), run("treespark", 1), run("retention", 1)]
    page = steady(script, tmp_path, runs, [4, 2, 4])
    assert "**Does not hold.** Training under the tree pays" in page and "Target +6.4 % not reached" in page
    assert "**Open.** Our retention helps the control, over all suites: tau retention/control = 1.000" in page
    assert row(page, "tau retention/control")[-1] == "all: not distinguishable from 1"


def one_each(seeds: Sequence[int] = (1,), spread: float = 0.0) -> tuple[Results, Any, Any]:
    import intervals

    arms = [entry(f"{arm}-{seed}", BUDGETED) for arm in ("a", "b") for seed in seeds]
    step = dict(zip([arm["name"] for arm in arms], [*seeds, *seeds], strict=True))
    rounds = {
        name: noisy((3.0 if name.startswith("a") else 2.7) + spread * step[name] * name.startswith("a"), step[name])
        for name in step
    }
    names = list(rounds)
    first = intervals.Group("a", tuple(names[: len(seeds)]), tuple(seeds))
    return results(arms, rounds), first, intervals.Group("b", tuple(names[len(seeds) :]), tuple(seeds))


def test_one_seed_is_the_benchmarks_interval(script: ModuleType) -> None:
    """With one run each there is nothing but prompts to draw: tau's interval is that of `compare_suites`."""
    import intervals

    found, first, second = one_each()
    ours = intervals.compare(found, list(SUITES), first, second)
    records = [found.select(suite) for suite in SUITES]
    pairs = pair_up(records, range(len(SUITES)), first.names[0], second.names[0], MEASURES["tau"])
    theirs = compare_suites(pairs, seed=5)
    assert ours.value == pytest.approx(theirs.value) and ours.num_prompts == theirs.num_prompts == 12
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.05 * (ours.high - ours.low))
    assert ours.low < ours.value < ours.high


def test_two_levels_against_a_plain_loop(script: ModuleType) -> None:
    """Prompts and seeds drawn one by one in a loop give the same interval up to resampling noise."""
    import intervals

    found, first, second = one_each((1, 2, 3), spread=0.1)
    generator = np.random.default_rng(1)
    sums = {
        (suite, name): np.array(
            [(sum(p.trials[name].committed), len(p.trials[name].committed)) for p in found.select(suite)]
        )
        for suite in SUITES
        for name in (*first.names, *second.names)
    }
    drawn = []
    for _ in range(3000):
        runs = generator.integers(3, size=3)
        prompts = {suite: generator.integers(4, size=4) for suite in SUITES}
        means = []
        for group in (first, second):  # the same seeds: the same runs are drawn
            taus = []
            for suite in SUITES:
                each = [sums[suite, group.names[number]][prompts[suite]].sum(0) for number in runs]
                taus.append(np.mean([above / below for above, below in each]))
            means.append(np.mean(taus))
        drawn.append(means[0] / means[1])
    ours = intervals.compare(found, list(SUITES), first, second)
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.08 * (high - low))


def test_shared_seeds_and_their_noise(script: ModuleType, tmp_path: Path) -> None:
    """Arms that share a seed are compared on it alone; what lies within the noise of seeds is not called a gain."""
    import intervals

    runs = [run("control", 1), run("control", 2), run("retention", 1)]
    page = steady(script, tmp_path, runs, [2, 4, 3])
    # 3/2 on seed 1; the control's runs differ by 4/2 - 1 = 100 %.
    assert row(page, "tau retention/control")[:2] == ["1/1", "1.500 [1.500, 1.500]"]
    assert "**Open.** Our retention helps the control" in page
    assert "(one seed each; runs of one arm differ by up to 100.0 %)" in page
    one, two = intervals.Group("a", ("x", "y"), (1, 2)), intervals.Group("b", ("z",), (3,))
    assert intervals.paired(one, two) == (one, two)


def test_seeds_that_differ_widen_the_interval(script: ModuleType) -> None:
    """The same three seeds with a spread between them, and without."""
    import intervals

    widths = []
    for spread in (0.0, 0.3):
        interval = intervals.compare(*rearranged(one_each((1, 2, 3), spread)))
        widths.append(interval.high - interval.low)
    assert widths[1] > 2 * widths[0]


def rearranged(given: tuple[Results, Any, Any]) -> tuple[Any, ...]:
    return given[0], list(SUITES), given[1], given[2]


def test_equal_seeds_are_paired(script: ModuleType) -> None:
    """What a seed does to both arms cancels when its runs are drawn together, and does not when they are not."""
    import intervals

    seeds, taus = (1, 2, 3), {1: [2, 2], 2: [4, 4], 3: [6, 6]}
    arms = [entry(f"{arm}-{seed}", BUDGETED) for arm in ("a", "b") for seed in seeds]
    rounds = {arm["name"]: lambda s, i, r=taus[int(arm["drafter"][-1])]: r for arm in arms}
    found, names = results(arms, rounds), list(rounds)
    first = intervals.Group("a", tuple(names[:3]), seeds)
    paired = intervals.compare(found, list(SUITES), first, intervals.Group("b", tuple(names[3:]), seeds))
    other = intervals.compare(found, list(SUITES), first, intervals.Group("b", tuple(names[3:]), (4, 5, 6)))
    assert (paired.low, paired.high) == (1.0, 1.0)
    assert other.low < 0.7 and other.high > 1.4


def full(folder: Path) -> Path:
    """Every file that a study may have."""
    runs = [run("dspark", 1), *(run(arm, seed) for seed in (1, 2) for arm in ("control", "treespark"))]
    runs += [run("tried", 1), run("control_equal_compute", 1, seconds_per_step=None)]
    arms = [entry("dspark-1", CHAIN)]
    for item in runs[1:]:
        arms += [entry(item["name"], BUDGETED)]
        arms += [entry(item["name"], policy, True) for policy in (CHAIN, budget(8), budget(16), budget(64))]
    arms += [entry("dspark-1", budget(nodes), True) for nodes in (8, 16, 32, 64)]
    level = {"dspark": 2.0, "control": 2.3, "treespark": 2.6, "tried": 2.7, "control_equal_compute": 2.4}
    rounds = {arm["name"]: noisy(level[arm["drafter"].rpartition("-")[0]], place) for place, arm in enumerate(arms)}
    search = [
        {"name": "s-control", "group": "control", "options": {}, "steps": 200},
        {"name": "s-half", "group": "survival", "options": {"coefficient": 0.5, "init": {"cap": 2}}, "steps": 200},
        {"name": "s-lost", "group": "survival", "options": {}, "steps": 300},
    ]
    plan = {"chosen": {"survival": "s-half"}}
    write(folder, runs, results(arms, rounds), plan=plan, search=search, exploratory=["tried-1"])
    tried = [entry(item["name"], BUDGETED) for item in search]
    rounds = {arm["name"]: noisy(2.0 + 0.5 * place, place) for place, arm in enumerate(tried)}
    results(tried, rounds).save(folder / "validation.json", computed=False)
    decoded = [entry("", None), entry("dspark-1", CHAIN), entry("treespark-1", BUDGETED)]
    count = dict(zip([arm["name"] for arm in decoded], ([1] * 20, [2] * 14, [3] * 12), strict=True))
    live = results(decoded, {n: lambda s, i, r=r: r for n, r in count.items()}, simulated=False, complete=False)
    live.save(folder / "live.json", computed=False)
    bins = [[0.1, 0.3, 10], [0.5, 0.5, 30], [None, None, 0]]
    figures = {"confidence/calibration_error": 0.031, "coverage/total": 2.5, "coverage/depth_1": 0.9}
    calibration: dict[str, Any] = {name: figures for name in ("chain-wide", "control-1", "treespark-1")}
    calibration["reliability"] = {"treespark-1": {"confidence": bins, "path_mass": bins}}
    (folder / "calibration.json").write_text(json.dumps(calibration))
    (folder.parent / "remarks.md").write_text("The hinge is rarely active.\n")
    return folder


@pytest.fixture(scope="module")
def whole(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The page of a study with every file."""
    folder = tmp_path_factory.mktemp("study")
    return folder, made(script, full(folder / "results"), folder / "study.md")


def test_every_section(whole: tuple[Path, str]) -> None:
    """Costs, budgets, the search, live speeds, calibration, what is exploratory, and the remarks stand in the page."""
    _, page = whole
    assert "The hinge is rarely active." in page and "Not run" not in page
    assert "| treespark | 2 | chain-wide | 5.00 | 400 | 10.0 | 1.00 | 2.00 | 1.00 |" in page
    assert "| control_equal_compute | 1 | chain-wide | 5.00 | 400 | 10.0 | 1.00 | - | - |" in page
    assert "| tau, all suites | N = 8 | N = 16 | N = 32 | N = 64 |" in page
    assert row(page, "s-half")[:3] == ["survival", "coefficient=0.5, init.cap=2", "200"]
    assert row(page, "s-half")[-1] == "chosen" and float(row(page, "s-half")[4].split()[0]) > 1.1
    assert row(page, "s-control")[4] == "(the control itself)" and row(page, "s-lost")[4] == "-"
    # 20 tokens in 2 s are 10 a second; 28 and 36 tokens 14 and 18.
    assert row(page, "plain")[0] == "10.0" and "live.json: of an interrupted run" in page
    assert "On gsm8k: speed treespark/plain = 1.800 [1.800, 1.800], above 1; target +30 % reached." in page
    assert "speed treespark/dspark = 1.286 [1.286, 1.286], above 1; target +15 % reached." in page
    # (10 x 0.2 + 30 x 0) / 40 = 0.05
    assert row(page, "treespark-1")[-1] == "0.050" and row(page, "chain-wide (a start)")[-1] == "-"
    before, after = page.split("Exploratory", 1)
    assert "| tried |" not in before and "| tried |" in after
    assert "depth_1" not in page


def test_the_page_is_the_same_twice_and_its_links_exist(
    script: ModuleType, whole: tuple[Path, str], tmp_path: Path
) -> None:
    """Same bytes of page and pictures, none above 80 kB, and no path of this machine."""
    folder, page = whole
    assert made(script, folder / "results", tmp_path / "study.md") == page
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page)]
    assert links == ["study.acceptance.png", "study.budget.png", "study.reliability.png"]
    for link in links:
        picture = (folder / link).read_bytes()
        assert picture == (tmp_path / link).read_bytes() and len(picture) < 80_000
    assert str(folder) not in page
    assert "](#what-holds-and-what-does-not)" in page and "\n## What holds and what does not\n" in page


def test_what_was_not_run_is_said(script: ModuleType, tmp_path: Path) -> None:
    """Without the optional files each has a line in its place; the others have their tables."""
    page = made(script, write(tmp_path / "s" / "results", *known()), tmp_path / "page.md")
    for name in ("validation.json", "live.json", "calibration.json"):
        assert f"Not run: there is no {name}." in page
    assert "No remarks were written." in page and "No policy was measured under several budgets." in page


def test_earlier_rounds_and_used_up_suites(script: ModuleType, tmp_path: Path) -> None:
    """A round in a folder beside the results is compared pair by pair; suites that it used up are named."""
    folder = write(tmp_path / "results", *known())
    runs, test = known()
    write(tmp_path / "first" / "results", runs[:3], test)
    assert "Earlier rounds" not in made(script, tmp_path / "first" / "results", tmp_path / "first.md")
    test.settings["opened_suites"] = ["poetry"]
    write(folder, runs, test)
    page = made(script, folder, tmp_path / "page.md")
    section = page.split("## Earlier rounds")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| tau treespark/dspark |")]
    assert [line[1:3] for line in rows] == [["first", "1.500 [1.500, 1.500]"], ["this round", "1.750 [1.500, 2.000]"]]
    assert "first: dspark 2.000, control 2.500, treespark 3.333; this round: dspark 2.000" in section
    assert "an earlier round used up, which are therefore exploratory: poetry." in page


def test_live_pair_and_gradients(script: ModuleType, tmp_path: Path) -> None:
    """The policies that the plan chose for speed are judged as a pair of their own; gradients get a table."""
    runs, test = known()
    pair = {"dspark": "Budgeted(k=1,num_draft_nodes=3)", "treespark": "Budgeted(k=4, num_draft_nodes=6)"}
    folder = write(tmp_path / "results", runs, test, plan={"bench": {"live_pair": pair, "gradient_steps": 5}})
    decoded = [entry("", None), entry("dspark-9", CHAIN), entry("treespark-1", BUDGETED)]
    decoded += [entry("dspark-9", parse(pair["dspark"]).config(), True)]
    decoded += [entry("treespark-1", parse(pair["treespark"]).config(), True)]
    count = [[1] * 20, [1] * 16, [1] * 18, [2] * 12, [3] * 12]
    rounds = {arm["name"]: lambda s, i, r=r: r for arm, r in zip(decoded, count, strict=True)}
    results(decoded, rounds, simulated=False).save(folder / "live.json", computed=False)
    terms = {"L1": {"norm": 0.25, "to_base": 0.5, "cosine": -0.125}}
    (folder / "gradients.json").write_text(json.dumps({"drafters": {}, "terms": terms}))
    page = made(script, folder, tmp_path / "page.md")
    assert "speed treespark/plain = 0.900 [0.900, 0.900], below 1; target +30 % not reached." in page
    under = "treespark under Budgeted(k=4, num_draft_nodes=6)"
    assert f"speed {under}/plain = 1.800 [1.800, 1.800], above 1; target +30 % reached." in page
    assert f"speed {under}/dspark = 2.250 [2.250, 2.250], above 1; target +15 % reached." in page
    ratio = "1.500 [1.500, 1.500], above 1; target +15 % reached."
    assert f"speed {under}/dspark under Budgeted(k=1, num_draft_nodes=3) = {ratio}" in page
    assert "Mean gradient over 5 batches" in page and row(page, "L1") == ["0.2500", "0.500", "-0.125"]


def test_required_files(script: ModuleType, tmp_path: Path) -> None:
    """study.json and test.json are asked for by name, with the command that writes them."""
    folder = write(tmp_path / "results", *known())
    (folder / "test.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"test\.json: no such file; .*study.py bench"):
        script.report(str(folder), str(tmp_path / "page.md"))
    (folder / "study.json").write_text("{}")
    (folder / "test.json").write_text("{}")
    with pytest.raises(ValueError, match="plan, data, runs not found"):
        script.report(str(folder), str(tmp_path / "page.md"))
    assert not (tmp_path / "page.md").exists()


def test_records_of_other_weights_are_refused(script: ModuleType) -> None:
    """A drafter that was trained again after the benchmark."""
    import evidence

    stale = {"control-1": {"sha256": "0" * 64}}
    with pytest.raises(ValueError, match=r"test\.json measured control-1 with weights 000.*bench it again"):
        evidence._check_drafters("test.json", stale, [run("control", 1)])
