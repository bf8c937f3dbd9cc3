"""Sources of prompts: files and data sets in every form give the same prompts, and wrong ones say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from tests.tiny_text import save_tiny_target
from treespark.data import DataError, DraftingData, PromptRecord, Source, hash_files, open_source, read_records
from treespark.data.prompts import Problems

ROWS = [{"prompt": f"question {i}", "category": "ab"[i % 2], "id": i} for i in range(6)]


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of `datasets` go into the test's own folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def forms(tmp_path: Path) -> dict[str, Any]:
    """The same six rows as a JSONL file, parquet file, arrow file, folder, saved data set and saved splits."""
    data = datasets.Dataset.from_list(ROWS)
    data.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "folder").mkdir()
    data.to_parquet(tmp_path / "folder" / "train.parquet")
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "splits")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    return {
        "jsonl": write(tmp_path / "rows.jsonl", ROWS),
        "parquet": str(tmp_path / "rows.parquet"),
        "arrow": str(arrow),
        "folder": str(tmp_path / "folder"),
        "disk": str(tmp_path / "saved"),
        "splits": str(tmp_path / "splits"),
    }


def read(spec: Any, on_error: Any = "stop", limit: int | None = None) -> list[PromptRecord]:
    return list(read_records(spec, Problems(on_error), limit))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["parquet", "arrow", "folder", "disk", "splits"])
def test_every_form_gives_the_same_prompts(forms: dict[str, str], form: str, streaming: bool) -> None:
    """Fields and order equal the JSONL file's; the hash depends on the rows and not on how they are stored."""
    spec = {"dataset": forms[form], "streaming": streaming}
    assert [record.fields for record in read(spec)] == ROWS
    assert [record.line for record in read(spec)] == [1, 2, 3, 4, 5, 6]
    assert [record.fields for record in read(spec, limit=2)] == ROWS[:2]
    first, second = open_source(spec), open_source({"dataset": forms["parquet"]})
    list(first.records(Problems("stop")))  # read before it is asked, the other one is read for the hash
    assert first.sha256 == second.sha256 != open_source(spec | {"limit": 3}).sha256


def test_a_split_is_chosen_by_name(forms: dict[str, str]) -> None:
    spec = {"dataset": forms["splits"], "split": "test"}
    assert [record.fields for record in read(spec)] == ROWS[:1]
    assert read(spec)[0].where == f"{forms['splits']}[test]:1"
    with pytest.raises(ValueError, match=r"the splits are train, test; 'val' is none of them"):
        read(spec | {"split": "val"})
    with pytest.raises(ValueError, match="one data set without splits; drop 'split'"):
        read({"dataset": forms["disk"], "split": "test"})
    with pytest.raises(ValueError, match=r'folder\[val\]: cannot be read as a folder: Unknown split "val"'):
        read({"dataset": forms["folder"], "split": "val"})


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_options_choose_and_rename(forms: dict[str, str], form: str) -> None:
    """Rows of category b are 1, 3 and 5; two of them are taken, their id becomes the prompt's source."""
    spec = {"dataset": forms[form], "where": {"category": ["b"]}, "limit": 2, "category": "math"}
    spec["columns"] = {"source": "id"}
    records = read(spec)
    assert [record.fields for record in records] == [
        {"prompt": "question 1", "category": "math", "source": 1},
        {"prompt": "question 3", "category": "math", "source": 3},
    ]
    assert [record.line for record in records] == [2, 4]
    hashes = [open_source({"dataset": forms[form]} | more).sha256 for more in ({}, {"limit": 2}, {"category": "x"})]
    assert len(set(hashes)) == 3


def test_columns_that_hold_the_prompt(tmp_path: Path) -> None:
    rows = [{"question": "why", "chat": [{"role": "user", "content": "hi"}], "answer": "so"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    base = {"dataset": str(tmp_path / "x.parquet")}
    (record,) = read(base | {"columns": {"prompt": "question", "response": "answer"}})
    assert (record.messages[0]["content"], record.response) == ("why", "so")
    assert record.fields == {"prompt": "why", "response": "so"}
    assert read(base | {"columns": {"messages": "chat"}})[0].messages == ({"role": "user", "content": "hi"},)
    with pytest.raises(ValueError, match="found none of prompt, messages and conversations; say which column"):
        read(base)
    with pytest.raises(ValueError, match=r"columns names the unknown column 'q'\. The data set has the columns quest"):
        read(base | {"columns": {"prompt": "q"}})
    with pytest.raises(ValueError, match="where names the unknown column 'kind'"):
        read(base | {"columns": {"prompt": "question"}, "where": {"kind": 1}})
    with pytest.raises(ValueError, match="unknown column 'q'"):
        read(base | {"columns": {"prompt": "q"}, "streaming": True})
    both = datasets.Dataset.from_list([{"prompt": "a", "messages": rows[0]["chat"]}])
    both.to_parquet(tmp_path / "both.parquet")
    with pytest.raises(ValueError, match="found both prompt and messages"):
        read(str(tmp_path / "both.parquet"))
    with pytest.raises(DataError, match=r"one.jsonl:1: has no field 'q' \(columns names it\)"):
        read({"dataset": write(tmp_path / "one.jsonl", rows), "columns": {"prompt": "q"}})


SHAREGPT = [
    {"from": "system", "value": "be kind"},
    {"from": "human", "value": "hello"},
    {"from": "gpt", "value": "good day"},
    {"from": "human", "value": "and now"},
]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "struct of lists"])
def test_sharegpt_conversations_become_messages(tmp_path: Path, form: str) -> None:
    """Speakers become roles; the field is called `messages` from then on. Arrow may hold a struct of lists."""
    talk: Any = SHAREGPT
    if form == "struct of lists":
        talk = {key: [turn[key] for turn in SHAREGPT] for key in ("from", "value")}
    row = {"conversations": talk, "id": "x"}
    path = write(tmp_path / "x.jsonl", [row])
    if form != "jsonl":
        path = str(tmp_path / "x.parquet")
        datasets.Dataset.from_list([row]).to_parquet(path)
    (record,) = read(path)
    roles = [(message["role"], message["content"]) for message in record.messages]
    assert roles == [("system", "be kind"), ("user", "hello"), ("assistant", "good day"), ("user", "and now")]
    assert record.fields == {"messages": list(record.messages), "id": "x"} and record.response is None


def test_sharegpt_answers_and_unknown_speakers(tmp_path: Path) -> None:
    (record,) = read(write(tmp_path / "x.jsonl", [{"conversations": SHAREGPT[:3]}]))
    assert record.response == "good day" and len(record.messages) == 2
    wrong = [{"conversations": [{"from": "alien", "value": "hi"}]}]
    with pytest.raises(DataError, match=r"x.jsonl:1: 'conversations\[0\].from' must be one of human, gpt.*got 'alien'"):
        read(write(tmp_path / "x.jsonl", wrong))
    with pytest.raises(DataError, match=r"'conversations\[0\].value' must be text, got nothing"):
        read(write(tmp_path / "x.jsonl", [{"conversations": [{"from": "human"}]}]))


def test_keys_that_arrow_fills_in_are_dropped(tmp_path: Path) -> None:
    """One turn has a name; the other one must not get `name: None`, which templates would print."""
    turns = [{"role": "user", "content": "a", "name": "x"}, {"role": "assistant", "content": "b"}]
    datasets.Dataset.from_list([{"messages": turns}]).to_parquet(tmp_path / "x.parquet")
    (record,) = read(str(tmp_path / "x.parquet"))
    assert record.messages == (turns[0],) and record.fields["messages"] == turns


def test_bad_rows_are_skipped_or_stop(tmp_path: Path) -> None:
    """Row 2 has no prompt, row 3 holds bytes in its id."""
    rows = [{"prompt": "a", "id": b"1"}, {"prompt": None, "id": None}]
    datasets.Dataset.from_list([*rows, {"prompt": "b", "id": None}]).to_parquet(tmp_path / "x.parquet")
    problems = Problems("skip")
    assert [r.fields["prompt"] for r in read_records(str(tmp_path / "x.parquet"), problems)] == ["b"]
    reasons = [str(error).removeprefix(str(tmp_path)) for error in problems.errors]
    assert reasons[0] == "/x.parquet:1: column 'id' holds bytes, not text or numbers."
    assert reasons[1].startswith("/x.parquet:2: expected exactly one of")
    with pytest.raises(DataError, match="x.parquet:1"):
        read(str(tmp_path / "x.parquet"))


def test_no_network_and_no_such_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """`owner/name` is looked for on the hub; what `datasets` raises without a network is one plain sentence."""

    def offline(*args: Any, **options: Any) -> None:
        assert args[:2] == ("some/data", None) and options == {"split": "train", "streaming": False, "revision": "v1"}
        raise ConnectionError("Couldn't reach 'some/data' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"some/data\[train\]: cannot be read: Couldn't reach.*check the network"):
        read({"dataset": "some/data", "revision": "v1"})
    with pytest.raises(FileNotFoundError, match="no such data file"):
        read("some/data.jsonl")
    with pytest.raises(FileNotFoundError, match="no such data file"):
        read("nothing")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"dataset": "x.jsonl", "splits": "a"}, "Unknown option 'splits' of a source. Did you mean: split?"),
        ({"split": "a"}, "a mapping with 'dataset' or 'mixture'"),
        (3, "a mapping with 'dataset' or 'mixture'"),
        ([], "must name at least one"),
        ("{dataset: [", "cannot be read as YAML"),
        ({"dataset": "o/n", "limit": 0}, "limit must be at least 1, got 0"),
        ({"dataset": "o/n", "weight": 0}, "weight must be above 0, got 0"),
        ({"dataset": "o/n", "weight": float("inf")}, "weight must be above 0, got inf"),
        ({"dataset": "o/n", "weight": "much"}, "'weight' must be a number, got 'much'"),
        ({"dataset": "o/n", "weight": None}, "'weight' must be a number, got None"),
        ({"dataset": "o/n", "weight": True}, "'weight' must be a number, got True"),
        ({"dataset": "o/n", "limit": "5"}, "'limit' must be a whole number, got '5'"),
        ({"dataset": "o/n", "name": 2024}, "'name' must be text, got 2024. Put it in quotes: '2024'"),
        ({"dataset": "o/n", "streaming": "no"}, "'streaming' must be true or false, got 'no'"),
        ({"dataset": "o/n", "columns": ["prompt"]}, "'columns' must be a mapping, got .'prompt'."),
        ({"dataset": "o/n", "columns": {"prompt": 3}}, "'columns' must name a column for 'prompt', got 3"),
        ({"dataset": "o/n", "where": "x"}, "'where' must be a mapping, got 'x'"),
        ({"mixture": ["o/n"], "num_prompts": 2.5}, "'num_prompts' must be a whole number, got 2.5"),
        ({"mixture": ["o/n"], "seed": "abc"}, "'seed' must be a whole number, got 'abc'"),
        ({"mixture": ["o/n"], "seed": -1}, "seed of a mixture must be at least 0, got -1"),
        ({"mixture": "x.jsonl"}, "'mixture' must be a list of sources"),
        ({"mixture": []}, "needs at least one source"),
        ({"mixture": [["o/n"], "o/n"], "seeds": 3}, "Unknown option 'seeds'"),
        ({"mixture": [["o/n", "o/m"]]}, "holds single sources, no lists"),
        ({"mixture": ["o/n"], "num_prompts": 0}, "num_prompts must be at least 1"),
        ({"mixture": [{"dataset": "o/n", "streaming": True}]}, "num_prompts must be given: o/n.train. is streamed"),
    ],
)
def test_wrong_specifications(spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_source(spec)


def test_options_that_mean_nothing_for_a_file(forms: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="split and streaming mean nothing for a local JSONL file. Drop them."):
        Source(forms["jsonl"], split="train", streaming=True)


def test_one_syntax_as_mapping_text_and_file(forms: dict[str, str], tmp_path: Path) -> None:
    """A mapping, the same as inline YAML (as on a command line) and in a YAML file; lists follow each other."""
    spec = {"dataset": forms["parquet"], "limit": 2}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    expected = [record.fields for record in read(spec)]
    for other in (f"{{dataset: {forms['parquet']}, limit: 2}}", str(tmp_path / "spec.yaml"), [spec]):
        assert [record.fields for record in read(other)] == expected
    both = [spec, forms["jsonl"]]
    assert [record.fields for record in read(both)] == [*ROWS[:2], *ROWS]
    assert [record.fields for record in read(both, limit=3)] == [*ROWS[:2], ROWS[0]]
    assert open_source([forms["jsonl"]] * 2).sha256 == hash_files([forms["jsonl"]] * 2)
    assert open_source(both).sha256 != open_source(both[::-1]).sha256


def test_the_datamodule_takes_a_data_set_and_records_it(tmp_path: Path) -> None:
    """Samples equal those of a JSONL file; the record names options and hashes, and the hash follows the rows."""
    target = save_tiny_target(tmp_path / "target")
    rows = [{"question": f"q {i}", "answer": f"a {i}"} for i in range(3)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    spec = {"dataset": str(tmp_path / "x.parquet"), "columns": {"prompt": "question", "response": "answer"}}
    lines = [{"prompt": row["question"], "response": row["answer"]} for row in rows]
    path = write(tmp_path / "x.jsonl", lines)
    data, plain = DraftingData(target, train=spec), DraftingData(target, train=path, val=path)
    for ours, theirs in zip(data.samples("train"), plain.samples("train"), strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist() and ours.spans == theirs.spans
    source = open_source(spec)
    assert data.data_sources == {"train": spec | {"sha256": source.sha256}}
    assert data.train_dataloader().data_hash == source.sha256
    assert plain.data_hash == hash_files([path, path])
    assert data.data_hash not in (plain.data_hash, DraftingData(target, train=spec | {"limit": 2}).data_hash)
