"""Mixtures: exact shares, an order that the seed decides, and words where a source is too small."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from treespark.commands.mixing import mix
from treespark.data import Mixture, Source, open_source
from treespark.data.mixture import largest_shares, shares
from treespark.data.prompts import Problems
from treespark.generation import generate

STOP = Problems("stop")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """40 prompts of math in a JSONL file and 30 of code in a saved data set."""
    datasets.disable_progress_bars()
    rows = [[{"prompt": f"{kind} {i}"} for i in range(n)] for kind, n in (("math", 40), ("code", 30))]
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[0]))
    datasets.Dataset.from_list(rows[1]).save_to_disk(tmp_path / "code")
    return [str(tmp_path / "math.jsonl"), str(tmp_path / "code")]


def mixture(files: list[str], num_prompts: int | None = 20, seed: int = 0, **code: Any) -> Mixture:
    sources = [Source(files[0], weight=3), Source(files[1], weight=1, **code)]
    return Mixture(sources, num_prompts, seed)


def prompts(mixture: Mixture) -> list[str]:
    return [record.fields["prompt"] for record in mixture.records(STOP)]


@pytest.mark.parametrize("streaming", [False, True])
def test_shares_order_and_seed(files: list[str], streaming: bool) -> None:
    """3 : 1 of 20 is 15 and 5, each prompt once and interleaved; the seed decides which and in what order."""
    drawn = prompts(mixture(files, streaming=streaming))
    assert Counter(prompt.split()[0] for prompt in drawn) == {"math": 15, "code": 5}
    assert len(set(drawn)) == 20 and drawn != sorted(drawn)
    assert drawn == prompts(mixture(files, streaming=streaming))
    other = prompts(mixture(files, seed=1, streaming=streaming))
    assert other != drawn and set(other) != set(drawn)


def test_hash_and_record(files: list[str]) -> None:
    """The hash follows the draw: weights, seed and number; the record says how many came from each source."""
    made = mixture(files)
    record = made.describe()
    assert record["num_prompts"] == 20 and record["seed"] == 0 and record["sha256"] == made.sha256
    assert [(row["dataset"], row["weight"], row["num_prompts"]) for row in record["mixture"]] == [
        (files[0], 3, 15),
        (files[1], 1, 5),
    ]
    hashes = {mixture(files).sha256, mixture(files, seed=1).sha256, mixture(files, 16).sha256}
    assert len(hashes) == 3 and made.sha256 in hashes


def test_the_first_prompts_of_a_mixture_are_those_of_the_whole(files: list[str]) -> None:
    """A reader that stops after 7 and one that takes them all see the same 7: it may continue anywhere."""
    spec = {"mixture": [{"dataset": files[0], "weight": 3}, files[1]], "num_prompts": 20}
    part = [record.where for record in open_source(spec, limit=7).records(STOP)]
    assert part == [record.where for record in open_source(spec).records(STOP)][:7]


def test_the_record_of_the_first_prompts_names_what_they_come_from(files: list[str]) -> None:
    """Options, weights, number and seed of every source, though a limit spans them; only the hash is of what was read.

    A stream among them is read as far as the limit asks.
    """
    code = {"dataset": files[1], "streaming": True}
    spec = [{"mixture": [{"dataset": files[0], "weight": 3}, code], "num_prompts": 20, "seed": 7}, code]
    limited = open_source(spec, limit=5)
    mixed, after = limited.describe()["sources"][0]["sources"]
    assert mixed == {
        "mixture": [{"dataset": files[0], "weight": 3}, code | {"weight": 1.0}],
        "num_prompts": 20,
        "seed": 7,
    }
    assert after == code
    assert limited.describe()["limit"] == 5 and limited.describe()["sha256"] == limited.sha256


@pytest.mark.parametrize("form", ["file", "options", "list", "mixture"])
def test_no_file_is_replaced_by_what_is_made_from_it(files: list[str], form: str) -> None:
    """Whatever form names the file, also with overwrite; it stays as it is."""
    options: dict[str, Any] = {"dataset": files[0], "where": {"prompt": ["math 1", "math 2"]}}
    spec: Any = {
        "file": files[0],
        "options": options,
        "list": [files[1], options],
        "mixture": {"mixture": [options, files[1]], "num_prompts": 2},
    }[form]
    before = Path(files[0]).read_bytes()
    with pytest.raises(ValueError, match="the same file"):
        mix(spec, files[0], overwrite=True)
    with pytest.raises(ValueError, match="the same file"):
        generate("unused", spec, files[0], overwrite=True)
    assert Path(files[0]).read_bytes() == before


def test_as_many_as_the_shares_allow(files: list[str]) -> None:
    """40 of math at 3 : 1 allow 13 of code: 53 prompts, since 54 would need 41 (40.5) or 14 of code and 40 of math.

    54 * 3/4 = 40.5 and 54 / 4 = 13.5: the remainders tie and the first source gets the rounding, which it lacks.
    """
    made = mixture(files, None)
    assert len(prompts(made)) == 53
    assert [row["num_prompts"] for row in made.drawn] == [40, 13]


def test_too_small_sources_are_named(files: list[str]) -> None:
    """100 at 3 : 1 needs 75 of math, which has 40: 53 are possible."""
    with pytest.raises(ValueError, match=r"math.jsonl: 40 usable prompts, but its share of 75.00% of 100 needs 75.*53"):
        prompts(mixture(files, 100))
    with pytest.raises(ValueError, match="0 usable prompts"):
        Mixture([Source(files[0], where={"prompt": "no"})]).draw(STOP)


def test_prompts_that_are_passed_over_are_replaced(files: list[str]) -> None:
    kept = mixture(files).draw(STOP, lambda record: int(record.fields["prompt"].split()[1]) % 2 == 0)
    assert len(kept) == 20 and all(int(record.fields["prompt"].split()[1]) % 2 == 0 for record in kept)


def test_bad_lines_of_a_source_are_reported(files: list[str]) -> None:
    Path(files[0]).write_text(Path(files[0]).read_text() + "{\n")
    problems = Problems("skip")
    assert len(mixture(files).draw(problems)) == 20
    assert [str(error).split(":")[1] for error in problems.errors] == ["41"]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 10_000))
def test_shares_add_up_and_are_rounded_by_less_than_one(weights: list[float], total: int) -> None:
    counts = shares(weights, total)
    assert sum(counts) == total
    assert all(abs(n - total * w / sum(weights)) < 1 + 1e-6 for n, w in zip(counts, weights, strict=True))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60)), min_size=1, max_size=4))
def test_largest_shares_is_the_best_total(pairs: list[tuple[int, int]]) -> None:
    """Against trying every total."""
    weights, available = [w for w, _ in pairs], [n for _, n in pairs]
    fits = [n for n in range(sum(available) + 1) if all(map(int.__le__, shares(weights, n), available))]
    assert sum(largest_shares(weights, available)) == max(fits)


def test_the_papers_recipe() -> None:
    """29.92 %, 40.15 %, 19.94 % and 9.99 % of 50,000 are whole numbers; opening the file reads no data set."""
    path = "recipes/data/paper_mixture.yaml"
    made = open_source(path)
    assert isinstance(made, Mixture) and made.num_prompts == 50_000
    weights = [source.weight for source in made.sources]
    assert shares(weights, 50_000) == [14_960, 20_075, 9_970, 4_995]
    assert [source.category for source in made.sources] == ["math", "code", "dialogue", "writing"]
    assert all(source.kind == "hub" for source in made.sources)
    assert yaml.safe_load(Path(path).read_text()).keys() == {"num_prompts", "seed", "mixture"}
