"""Suites from files, folders, YAML files and data sets of the hub (which is a fake here)."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from treespark.bench.sources import SuiteSource, find_sources
from treespark.data.prompts import hash_files

ROOT = Path(__file__).parents[2]


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def prompts(source: SuiteSource, limit: int | None = None) -> list[str]:
    return [json.loads(line)["prompt"] for _, line in source.lines(limit)[0]]


def test_a_folder_is_a_set_of_suites(tmp_path: Path) -> None:
    """Files of the folder are general, those of a folder "writing…" writing, others named after their folder."""
    for name in ("b.jsonl", "a.jsonl", "writingbench/essay.jsonl", "law/c.jsonl", "notes.txt"):
        write(tmp_path / name, {"turns": ["x", "y"]})
    found = [(source.name, source.category) for source in find_sources([str(tmp_path)])]
    assert found == [("a", "general"), ("b", "general"), ("c", "law"), ("essay", "writing")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="Nothing to evaluate: the folder .* holds no JSONL file"):
        find_sources([str(tmp_path / "empty")])


def test_a_plain_file_is_read_as_it_is(tmp_path: Path) -> None:
    """Its lines are handed on byte for byte with their numbers, and the hash is the file's."""
    path = write(tmp_path / "a.jsonl", {"prompt": "one"}, "", {"prompt": "three"})
    (source,) = find_sources([str(path)])
    lines, sha256 = source.lines()
    assert [number for number, _ in lines] == [1, 3] and sha256 == hash_files([path])
    assert source.lines(1)[0] == lines[:1] and (source.name, source.category) == ("a", "")


def test_yaml_with_local_files(tmp_path: Path) -> None:
    """Paths are relative to the YAML; column, template, where, id and limit make prompts of rows."""
    rows = [{"q": f"  {i}?", "extra": "" if i % 2 else "more", "kind": "ab"[i % 2], "key": f"k{i}"} for i in range(6)]
    write(tmp_path / "data" / "rows.jsonl", *rows)
    entries = [
        {"name": "column", "path": "data/rows.jsonl", "column": "q", "where": {"kind": "b"}, "id": "key", "limit": 2},
        {"name": "template", "category": "writing", "path": "data/rows.jsonl", "template": "{q}\n\n{extra} \\boxed{}"},
        {"name": "empty end", "path": "data/rows.jsonl", "template": "{q}\n\n{extra}"},
    ]
    path = tmp_path / "suites.yaml"
    path.write_text(yaml.safe_dump({"suites": entries}))
    column, template, end = find_sources([str(path)])
    assert prompts(column) == ["  1?", "  3?"] and [number for number, _ in column.lines()[0]] == [2, 4]
    assert [json.loads(line)["id"] for _, line in column.lines()[0]] == ["k1", "k3"]
    assert prompts(template, 2) == ["0?\n\nmore \\boxed{}", "1?\n\n \\boxed{}"] and template.category == "writing"
    assert prompts(end, 2) == ["0?\n\nmore", "1?"]
    assert template.lines(2)[1] != template.lines(3)[1]  # the hash is that of the prompts
    with pytest.raises(ValueError, match=r"rows.jsonl:1: no column 'missing'. Available: q, extra, kind, key"):
        SuiteSource("s", path=str(tmp_path / "data/rows.jsonl"), column="missing").lines()


BAD: list[tuple[Any, str]] = [
    ([], "expected a list `suites`"),
    ([{"path": "a.jsonl"}], "expected an entry with a name"),
    ([{"name": "x"}], "expected one of path, hub and url"),
    ([{"name": "x", "path": "a.jsonl", "hub": "a/b"}], "expected one of path, hub and url"),
    ([{"name": "x", "path": "a.jsonl", "colum": "q"}], "Unknown key 'colum'. Did you mean: column"),
    ([{"name": "x", "path": "a.jsonl", "limit": "3"}], "limit must be of type int"),
    ([{"name": "x", "path": "a.jsonl", "limit": 0}], "limit must be at least 1"),
    ([{"name": "x", "path": "a.jsonl", "limit": True}], "limit must be of type int"),
    ([{"name": "x", "hub": "a/b", "files": [1]}], "files must name files, got 1"),
    ([{"name": "x", "path": "a.jsonl", "files": ["b.jsonl"]}], "files are those of a hub's data set"),
    ([{"name": "x", "path": "a.jsonl", "column": "q", "template": "{q}"}], "column or template, not both"),
    ([{"name": "x", "url": "http://a.example/a.jsonl"}], "must begin with https"),
]


@pytest.mark.parametrize(("entries", "message"), BAD)
def test_bad_yaml(tmp_path: Path, entries: Any, message: str) -> None:
    """Each gives one error that names the file and the entry."""
    path = tmp_path / "suites.yaml"
    path.write_text(yaml.safe_dump({"suites": entries}))
    with pytest.raises(ValueError) as error:
        find_sources([str(path)])
    assert message in str(error.value) and "suites.yaml" in str(error.value)


def test_missing_files_are_found_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "suites.yaml"
    path.write_text("suites: [{name: x, path: absent.jsonl}]")
    with pytest.raises(FileNotFoundError, match="absent.jsonl: no such data file"):
        find_sources([str(path)])
    path.write_text("suites: [{name: x, path: absent.jsonl}]\nsuits: []")
    with pytest.raises(ValueError, match="Unknown key 'suits'. Did you mean: suites"):
        find_sources([str(path)])
    path.write_text("suites: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        find_sources([str(path)])


def test_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration, split and revision reach `datasets`; of a list of turns the first counts; a failure is worded."""
    calls: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        if args[0] == "no/such":
            raise ConnectionError("no network\nmore")
        return [{"prompt": ["first", "second"], "n": i} for i in range(5)]

    fake: Any = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    source = SuiteSource("s", hub="own/er", revision="abc", config="c", split="train", column="prompt", where={"n": 3})
    assert prompts(source) == ["first"] and source.place == "own/er@abc:c/train"
    assert calls == [(("own/er", "c"), {"split": "train", "revision": "abc"})]
    with pytest.raises(ValueError, match=r"'s' cannot be had from no/such@main:test \(ConnectionError: no network\)"):
        SuiteSource("s", hub="no/such", column="prompt").lines()


def test_hub_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files inside a data set are read one after the other."""
    import huggingface_hub

    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, {"q": name})

    def download(repo: str, name: str, repo_type: str, revision: str) -> str:
        assert (repo, repo_type, revision) == ("own/er", "dataset", "main")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert prompts(SuiteSource("s", hub="own/er", files=("a.jsonl", "b.jsonl"), column="q")) == ["a.jsonl", "b.jsonl"]


def test_the_papers_suites_are_fifteen() -> None:
    """The shipped YAML names nine general and six writing suites, each once, and every template has a column."""
    found = find_sources([str(ROOT / "recipes/suites/paper.yaml")])
    categories = [source.category for source in found]
    assert (categories.count("general"), categories.count("writing"), len(found)) == (9, 6, 15)
    assert len({source.name for source in found}) == 15
    assert all(source.column or "{" in source.template for source in found)
    assert len({source.where["domain1"] for source in found if source.category == "writing"}) == 6
