"""Data files: every kind of unusable line is one clear error with its file and line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_text import tiny_tokenizer
from treespark.data import ChatEncoder, DataError, hash_files, load_samples, read_records
from treespark.data.prompts import Problems

GOOD: dict[str, Any] = {"prompt": "hi", "response": "yes"}


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def load(path: str, on_error: Any = "stop", max_length: int = 64, long: Any = "cut", **kwargs: Any) -> Any:
    return load_samples([path], ChatEncoder(tiny_tokenizer(), kwargs), max_length, Problems(on_error), long)


BAD = [
    ("{", "not valid JSON"),
    ("[1]", "expected a JSON object, got a list"),
    ("null", "expected a JSON object, got nothing"),
    ({"response": "yes"}, "exactly one of 'prompt', 'messages' and 'conversations', got neither"),
    ({"prompt": "a", "messages": [{"role": "user", "content": "a"}], "response": "b"}, "got prompt and messages"),
    ({"prompt": 3, "response": "b"}, "'prompt' must be text, got a number"),
    ({"prompt": "  ", "response": "b"}, "'prompt' is empty"),
    ({"messages": [], "response": "b"}, "'messages' must be a non-empty list"),
    ({"messages": ["a"], "response": "b"}, r"'messages\[0\]' must be an object"),
    ({"messages": [{"role": "user"}], "response": "b"}, r"'messages\[0\].content' must be text, got nothing"),
    ({"messages": [{"role": "assistant", "content": "b"}]}, "no user message"),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "response": "c"},
        "the answer is given twice",
    ),
    ({"prompt": "a", "response": ["b"]}, "'response' must be text, got a list"),
    ({"prompt": "a", "response_ids": []}, "'response_ids' must be a non-empty list"),
    ({"prompt": "a", "response_ids": [1.5]}, "'response_ids' must be a non-empty list of token ids"),
    ({"prompt": "a", "response_ids": [True]}, "'response_ids' must be a non-empty list of token ids"),
    ({"prompt": "a", "response_ids": [64]}, "'response_ids' holds 64, the tokenizer has 64 tokens"),
    ({"prompt": "a", "response": "no", "response_ids": [6, 7, 2]}, "'response_ids' decode to 'ab', 'response' is 'no'"),
    ({"prompt": "a", "response": "b", "finish_reason": "eos"}, "'finish_reason' must be 'stop' or 'length'"),
    ({"prompt": "a"}, "no assistant answer.*treespark generate"),
    ({"prompt": "a", "response": ""}, "answer is empty"),
    ({"prompt": "a" * 60, "response": "b"}, "the prompt has .* tokens and leaves no room.*max_length=64"),
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=[words[:30] for _, words in BAD])
def test_each_bad_line_is_one_error_with_its_place(tmp_path: Path, line: Any, words: str) -> None:
    """The bad line is the third of the file (a blank one before it is not counted out), so the error says `:3:`."""
    path = write(tmp_path / "data.jsonl", [GOOD, "", line])
    with pytest.raises(DataError, match=words) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize(("line", "words"), BAD, ids=[words[:30] for _, words in BAD])
def test_skip_leaves_the_line_out_and_reports_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: Any, words: str
) -> None:
    path = write(tmp_path / "data.jsonl", [GOOD, line, GOOD])
    with caplog.at_level(logging.WARNING):
        samples = load(path, "skip")
    assert [sample.where for sample in samples] == [f"{path}:1", f"{path}:3"]
    (report,) = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert "2 lines used, 1 skipped" in report and f"{path}:2" in report


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_nothing_usable_is_an_error_in_both_modes(tmp_path: Path, on_error: str) -> None:
    with pytest.raises(DataError, match="no usable line"):
        load(write(tmp_path / "empty.jsonl", []), on_error)
    with pytest.raises(DataError, match="not valid JSON"):
        load(write(tmp_path / "bad.jsonl", ["{", "{"]), on_error)


def test_missing_file_directory_and_foreign_bytes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl: no such data file"):
        load(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ValueError, match="cannot be read as a folder"):
        load(str(tmp_path))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match="latin.jsonl:1: not UTF-8"):
        load(str(tmp_path / "latin.jsonl"))
    with pytest.raises(ValueError, match="on_error must be 'stop' or 'skip'"):
        Problems("ignore")  # type: ignore[arg-type]


def test_twenty_broken_lines_of_two_hundred(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lines 5, 15, ... are broken: 180 are used and each of the 20 is named."""
    path = write(tmp_path / "data.jsonl", ["{" if i % 10 == 5 else GOOD for i in range(1, 201)])
    with caplog.at_level(logging.WARNING):
        assert len(load(path, "skip")) == 180
    (report,) = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert all(f"{path}:{i}:" in report for i in range(5, 200, 10))


def test_records_keep_their_fields_and_the_limit_counts_usable_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", ["{", {"prompt": "a", "id": 7}, {"prompt": "b"}, {"prompt": "c"}])
    records = list(read_records(path, Problems("skip"), limit=2))
    assert [record.messages[0]["content"] for record in records] == ["a", "b"]
    assert records[0].fields == {"prompt": "a", "id": 7} and not records[0].has_answer


def test_hash_depends_on_bytes_and_on_file_boundaries(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", ["1", "2"]), write(tmp_path / "b", ["3"])
    c, d = write(tmp_path / "c", ["1"]), write(tmp_path / "d", ["2", "3"])
    assert hash_files([a, b]) == hash_files([a, b]) != hash_files([c, d])


LONG: dict[str, Any] = {"prompt": "hi", "response_ids": [*range(10, 50), 2]}


def test_a_long_answer_is_split_into_documents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The prompt has n tokens, the answer 41; parts of n + 20: the answer's first 20 tokens, then 41 - 20 = 21.

    Together they are the text. Only the first part is what the target would write again from its own start.
    """
    whole = load(write(tmp_path / "a.jsonl", [LONG]))[0]
    n = whole.prompt_length
    path = write(tmp_path / "b.jsonl", [GOOD, LONG])
    _, first, second = load(path, max_length=n + 20, long="split")
    assert [first.spans, second.spans] == [((n, n + 20),), ((0, 21),)]
    assert [*first.ids.tolist(), *second.ids.tolist()] == whole.ids.tolist()
    assert (first.own_text, second.own_text) == (True, False) and first.where == second.where == f"{path}:2"
    assert f"1 of 2 conversations split into 2 documents of at most {n + 20} tokens" in caplog.text
    assert f"(0 of their {n + 41} tokens are left out)" in caplog.text


def test_parts_without_an_anchor_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Parts of n - 1 tokens: the prompt alone, which trains nothing; the prompt's last token and the answer's first."""
    n = load(write(tmp_path / "a.jsonl", [LONG]))[0].prompt_length
    parts = load(write(tmp_path / "b.jsonl", [LONG]), max_length=n - 1, long="split")
    assert parts[0].spans == ((1, n - 1),) and not any(part.own_text for part in parts)
    num_left_out = n + 41 - sum(len(part) for part in parts)
    assert num_left_out >= n - 1 and f"({num_left_out} of their {n + 41} tokens are left out)" in caplog.text


def test_long_conversations_are_dropped_with_a_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dropping is no error while something is left."""
    path = write(tmp_path / "a.jsonl", [GOOD, LONG, GOOD])
    assert [sample.where for sample in load(path, max_length=40, long="drop")] == [f"{path}:1", f"{path}:3"]
    assert "1 of 3 conversations longer than 40 tokens dropped" in caplog.text
    with pytest.raises(
        DataError, match="nothing is left: 1 of 1 conversations longer than 40 tokens dropped. Raise max"
    ):
        load(write(tmp_path / "b.jsonl", [LONG]), max_length=40, long="drop")
