"""Overlap with suites and repeats within a set, against plain set arithmetic on words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treespark.data import DataError, PromptRecord
from treespark.data.overlap import Duplicates, SuiteText, read_suite
from treespark.data.prompts import check_fields

WORDS = [f"w{i}" for i in range(12)]


def record(text: str, line: int = 1, **fields: object) -> PromptRecord:
    return check_fields({"prompt": text} | fields, "train", line)


def suite(*texts: str, name: str = "s") -> list[SuiteText]:
    return [SuiteText(name, f"{name}:{i}", text) for i, text in enumerate(texts, start=1)]


def plain_grams(text: str, n: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+|[-+*/=<>^%]", text.lower())
    n = min(n, len(words))
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)} if words else set()


texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=14).map(" ".join)


@settings(deadline=None, max_examples=60)
@given(st.lists(texts, min_size=1, max_size=6), st.lists(texts, min_size=1, max_size=6), st.integers(1, 4))
def test_suites_against_plain_sets(train: list[str], test: list[str], n: int) -> None:
    """Share of the shorter text's n-grams; those in more than 2 of the few suite texts are template."""
    found = Duplicates(suite(*test), ngram=n, suite_overlap=0.5)
    held = [plain_grams(text, n) for text in test]
    template = {gram for gram in set().union(*held) if sum(gram in other for other in held) > 2}
    held = [grams - template for grams in held]
    for text in train:
        own = plain_grams(text, n) - template
        best = max((len(own & other) / max(min(len(own), len(other)), 1) for other in held), default=0.0)
        removal = found._in_suites(record(text), [text], [found.grams(text)])
        if text in test:
            assert removal is not None and removal.overlap == 1.0
        elif best >= 0.5:
            assert removal is not None and removal.overlap == pytest.approx(best, abs=1e-4)
        else:
            assert removal is None


@settings(deadline=None, max_examples=60)
@given(st.lists(texts, min_size=1, max_size=25), st.integers(1, 3), st.sampled_from([0.6, 0.8, 1.0]))
def test_repeats_against_plain_jaccard(train: list[str], n: int, near: float) -> None:
    """Kept and removed as by comparing each text with every text that was kept before it."""
    found = Duplicates(ngram=n, near=near)
    kept: list[set[tuple[str, ...]]] = []
    for text in train:
        own = plain_grams(text, n)
        is_new = all(len(own & other) / len(own | other) < near for other in kept)
        if is_new:
            kept.append(own)
        assert found.is_new(record(text)) == is_new


def test_the_same_question_in_other_words_around_it() -> None:
    """A suite's question of 11 words inside a longer prompt: all 4 of its 8-grams are there."""
    question = "how many apples does Tom have after he gives away three"
    found = Duplicates(suite(question, "something else entirely that nobody asks about in any prompt"))
    assert not found.is_new(record(f"Answer in one word, please: {question.upper()}?! Think first.", line=7, id="a"))
    assert found.is_new(record("how many apples does Ann have after she gives away three"))
    (removal,) = found.removals
    assert removal.row() == {"prompt": "train:7", "id": "a", "reason": "suite", "match": "s:1", "overlap": 1.0}
    assert found.by_suite() == {"s": 1}


def test_a_suites_template_is_no_content() -> None:
    """Twenty questions share their instruction; a prompt with the instruction and another question is new."""
    frame = "you are an expert and will be given a question please reason step by step {} thank you very much"
    questions = [f"topic{i} alpha{i} beta{i} gamma{i} delta{i} epsilon{i} zeta{i} eta{i} theta{i}" for i in range(20)]
    found = Duplicates(suite(*map(frame.format, questions)))
    assert found.is_new(record(frame.format("a new matter that has never been seen before in this place")))
    assert not found.is_new(record(questions[3]))
    assert found.removals[0].match == "s:4"


def test_operators_and_signs_without_spaces_count() -> None:
    """`3 + 4` is not `3 - 4`; a Chinese text has n-grams of its signs."""
    found = Duplicates(near=0.8)
    assert found.is_new(record("what is 3 + 4")) and found.is_new(record("what is 3 - 4"))
    assert not found.is_new(record("What  is 3 + 4"))
    assert (
        found.is_new(record("我发现我使用设置只能设置或者读取一次")) and len(found.grams("我发现我使用设置只能")) == 3
    )
    assert not found.is_new(record("我发现我使用设置只能设置或者读取一次!"))
    assert [removal.reason for removal in found.removals] == ["exact", "near"]


def test_every_turn_and_message_of_a_suite_counts(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    lines = [{"turns": ["first question", "second question"]}, {"prompt": "third"}]
    lines.append({"messages": [{"role": "system", "content": "no"}, {"role": "user", "content": "fourth"}]})
    path.write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    read = read_suite(path)
    assert [text.text for text in read] == ["first question", "second question", "third", "fourth"]
    assert [text.where for text in read] == [f"{path}:{i}" for i in (1, 1, 3, 5)]
    found = Duplicates(read)
    assert not found.is_new(record("Second  Question")) and found.is_new(record("no"))
    for bad, words in (('{"turns": [1]}\n', "'turns' must be a list of texts"), ("\n", "no prompt to compare with")):
        path.write_text(bad)
        with pytest.raises(DataError, match=words):
            read_suite(path)


def test_hashes_do_not_depend_on_the_process() -> None:
    """A text's hash is a fixed number (computed once, here): what is removed does not change from run to run."""
    found = Duplicates(ngram=3)
    assert found.grams("one two three").tolist() == Duplicates(ngram=3).grams("ONE, two three!").tolist()
    assert found.grams("one two three").tolist() == [14794070335030077128]


def test_arguments_out_of_range() -> None:
    with pytest.raises(ValueError, match="ngram must be at least 1, got 0"):
        Duplicates(ngram=0)
    with pytest.raises(ValueError, match="near must lie above 0 and at most at 1, got 1.5"):
        Duplicates(near=1.5)
