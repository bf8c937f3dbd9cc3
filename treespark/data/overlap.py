"""Prompts that an evaluation suite holds, and prompts that are there twice: found by their n-grams of words.

Against suites, the share counts n-grams of the shorter of the two texts that the other one holds, so that a suite's
question inside a longer prompt is found. N-grams that many prompts of a suite share are its template, not its content,
and do not count. Within the set, the share is the Jaccard similarity of the two sets of n-grams; candidates come from
MinHash signatures in bands (Broder 1997; Leskovec et al., Mining of Massive Datasets, §3.4) and are then compared
exactly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treespark.data.prompts import DataError, PromptRecord, check_file, load_line, parse_line

Grams = NDArray[np.uint64]

# A sign of a script without spaces is a word by itself, and so is an operator: `3 + 4` is not `3 - 4`.
_IDEOGRAPH = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|[^\W{_IDEOGRAPH}]+|[-+*/=<>^%]")
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that powers of it keep all bits
_BANDS, _ROWS = 32, 4  # two texts of Jaccard 0.8 share no band with probability (1 - 0.8**4)**32 = 5e-8
_BUCKET = 64  # texts that a band may share before it counts as template
_COMPARED = 32  # candidates that are compared exactly: those that share most bands


@dataclass(frozen=True)
class Removal:
    """Why a prompt was left out.

    Attributes:
        prompt: its place, ``file:line``.
        id: its ``id`` field, if it has one.
        reason: ``suite``, ``exact`` (the same text, but for case and white space) or ``near``.
        match: place of the suite's prompt, or of the kept prompt, that it resembles.
        overlap: share of n-grams; 1 for the same text.
    """

    prompt: str
    id: Any
    reason: str
    match: str
    overlap: float

    def row(self) -> dict[str, Any]:
        """The removal as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class SuiteText:
    """One text of an evaluation suite: its suite's name, its place and the text."""

    suite: str
    where: str
    text: str


def read_suite(path: str | Path) -> list[SuiteText]:
    """The texts of a suite: every ``prompt``, user message or turn of a JSONL file.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: a line cannot be used, or there is none.
    """
    file = check_file(path)
    texts: list[SuiteText] = []
    for number, raw in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        turns = load_line(raw, str(path), number).get("turns")
        if turns is None:
            turns = _user_texts(parse_line(raw, str(path), number))
        elif not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise DataError(f"{path}:{number}: 'turns' must be a list of texts.")
        texts += [SuiteText(file.stem, f"{path}:{number}", turn) for turn in turns]
    if not texts:
        raise DataError(f"{path}: no prompt to compare with. Expected lines with 'prompt', 'messages' or 'turns'.")
    return texts


class Duplicates:
    """Finds prompts that a suite holds or that came before.

    Args:
        suites: texts of the evaluation suites.
        ngram: words of an n-gram; shorter texts are one n-gram as a whole.
        suite_overlap: share from which a prompt counts as held by a suite.
        near: Jaccard similarity from which a prompt repeats an earlier one; 1 leaves only the same n-grams out.
        template_share: share of a suite's prompts from which an n-gram counts as the suite's template.

    Attributes:
        removals: what :meth:`is_new` found, in order.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        suites: Sequence[SuiteText] = (),
        ngram: int = 8,
        suite_overlap: float = 0.5,
        near: float = 0.8,
        template_share: float = 0.1,
    ) -> None:
        if ngram < 1:
            raise ValueError(f"ngram must be at least 1, got {ngram}.")
        for name, share in (("suite_overlap", suite_overlap), ("near", near), ("template_share", template_share)):
            if not 0 < share <= 1:
                raise ValueError(f"{name} must lie above 0 and at most at 1, got {share}.")
        self.ngram, self.suite_overlap, self.near = ngram, suite_overlap, near
        self.removals: list[Removal] = []
        self._words: dict[str, int] = {}
        self._suites = list(suites)
        self._suite_exact = {_squeezed(text.text): i for i, text in reversed(list(enumerate(suites)))}
        self._index_suites(template_share)
        self._exact: dict[str, str] = {}
        self._kept: list[tuple[str, Grams]] = []
        self._buckets: list[dict[bytes, list[int]]] = [{} for _ in range(_BANDS)]
        numbers = np.random.default_rng(0).integers(0, 2**63, size=(2, _BANDS * _ROWS), dtype=np.uint64)
        self._factors, self._offsets = numbers[0] | np.uint64(1), numbers[1]

    def _index_suites(self, template_share: float) -> None:
        grams = [self.grams(text.text) for text in self._suites]
        sizes = Counter(text.suite for text in self._suites)
        frequency: dict[str, Counter[int]] = {suite: Counter() for suite in sizes}
        for text, own in zip(self._suites, grams, strict=True):
            frequency[text.suite].update(own.tolist())
        most = {suite: max(2, int(template_share * size)) for suite, size in sizes.items()}
        self._template = np.unique(
            np.array(
                [gram for suite, counts in frequency.items() for gram, n in counts.items() if n > most[suite]],
                dtype=np.uint64,
            )
        )
        self._holders: dict[int, list[int]] = {}
        self._suite_sizes: list[int] = []
        for i, own in enumerate(grams):
            own = self._content(own)
            self._suite_sizes.append(len(own))
            for gram in own.tolist():
                self._holders.setdefault(gram, []).append(i)
        self._suite_grams = np.array(sorted(self._holders), dtype=np.uint64)

    def is_new(self, record: PromptRecord) -> bool:
        """Whether neither a suite nor an earlier prompt resembles the user's text; if so, it is remembered."""
        texts = _user_texts(record)
        grams = [self.grams(text) for text in texts]
        removal = self._in_suites(record, texts, grams) or self._seen(record, texts, grams)
        if removal is not None:
            self.removals.append(removal)
        return removal is None

    def by_suite(self) -> dict[str, int]:
        """Removed prompts of each suite that held one or more, in the suites' order."""
        suite_of = {text.where: text.suite for text in self._suites}
        counts = Counter(suite_of[removal.match] for removal in self.removals if removal.reason == "suite")
        return {suite: counts[suite] for suite in dict.fromkeys(text.suite for text in self._suites)}

    # Suites ---------------------------------------------------------------------------------------------------------

    def _in_suites(self, record: PromptRecord, texts: Sequence[str], grams: Sequence[Grams]) -> Removal | None:
        if not self._suites:
            return None
        best: tuple[float, int] | None = None
        for text, own in zip(texts, grams, strict=True):
            if (same := self._suite_exact.get(_squeezed(text))) is not None:
                best = (1.0, same)
                break
            found = self._best_suite(self._content(own))
            if found is not None and (best is None or found[0] > best[0]):
                best = found
        if best is None or best[0] < self.suite_overlap:
            return None
        return self._removal(record, "suite", self._suites[best[1]].where, best[0])

    def _best_suite(self, own: Grams) -> tuple[float, int] | None:
        """The highest share and the first suite text that has it."""
        hits = own[_held(own, self._suite_grams)]
        if not len(hits):
            return None
        counts = Counter(i for gram in hits.tolist() for i in self._holders[gram])
        share, i = max((count / min(len(own), self._suite_sizes[i]), -i) for i, count in counts.items())
        return share, -i

    def _content(self, grams: Grams) -> Grams:
        """The n-grams that are no suite's template."""
        return grams[~_held(grams, self._template)]

    # Within the set -------------------------------------------------------------------------------------------------

    def _seen(self, record: PromptRecord, texts: Sequence[str], grams: Sequence[Grams]) -> Removal | None:
        digest = hashlib.sha256(_squeezed("\n".join(texts)).encode("utf-8", "surrogatepass")).hexdigest()
        if digest in self._exact:
            return self._removal(record, "exact", self._exact[digest], 1.0)
        own = np.unique(np.concatenate(grams)) if len(grams) > 1 else grams[0]
        if len(own):
            bands = self._signature(own)
            share, i = self._most_alike(own, bands)
            if share >= self.near:
                return self._removal(record, "near", self._kept[i][0], share)
            self._remember(record.where, own, bands)
        self._exact[digest] = record.where
        return None

    def _signature(self, own: Grams) -> list[bytes]:
        lowest = (own[:, None] * self._factors + self._offsets).min(axis=0)
        return [row.tobytes() for row in lowest.reshape(_BANDS, _ROWS)]

    def _most_alike(self, own: Grams, bands: Sequence[bytes]) -> tuple[float, int]:
        shared: Counter[int] = Counter()
        for bucket, band in zip(self._buckets, bands, strict=True):
            shared.update(bucket.get(band, ()))
        best = (0.0, 0)
        for i, _ in shared.most_common(_COMPARED):
            other = self._kept[i][1]
            common = int(_held(own, other).sum())
            best = max(best, (common / (len(own) + len(other) - common), -i))
        return best[0], -best[1]

    def _remember(self, where: str, own: Grams, bands: Sequence[bytes]) -> None:
        for bucket, band in zip(self._buckets, bands, strict=True):
            if len(holders := bucket.setdefault(band, [])) < _BUCKET:
                holders.append(len(self._kept))
        self._kept.append((where, own))

    def _removal(self, record: PromptRecord, reason: str, match: str, overlap: float) -> Removal:
        return Removal(record.where, record.fields.get("id"), reason, match, round(overlap, 4))

    # N-grams --------------------------------------------------------------------------------------------------------

    def grams(self, text: str) -> Grams:
        """Hashes of the n-grams of a text, ascending, each once; the same in every process."""
        words = _WORD.findall(text.casefold())
        if not words:
            return np.zeros(0, dtype=np.uint64)
        values = np.array([self._word(word) for word in words], dtype=np.uint64)
        size = min(self.ngram, len(words))
        total = np.zeros(len(words) - size + 1, dtype=np.uint64)
        for i in range(size):
            total = total * _BASE + values[i : i + len(total)]
        total ^= total >> np.uint64(31)  # mixes the high bits into the low ones, which the signatures need
        return np.unique(total * np.uint64(0xBF58476D1CE4E5B9))

    def _word(self, word: str) -> int:
        if (value := self._words.get(word)) is None:
            value = int.from_bytes(
                hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
            )
            self._words[word] = value
        return value


def _held(grams: Grams, ascending: Grams) -> NDArray[np.bool_]:
    """Which n-grams are among others; quick where there are few of them and many others."""
    if not len(ascending):
        return np.zeros(len(grams), dtype=np.bool_)
    places = np.searchsorted(ascending, grams)
    found: NDArray[np.bool_] = ascending[np.minimum(places, len(ascending) - 1)] == grams
    return found


def _user_texts(record: PromptRecord) -> list[str]:
    return [message["content"] for message in record.messages if message["role"] == "user"]


def _squeezed(text: str) -> str:
    return " ".join(text.casefold().split())


def write_removals(path: Path, removals: Sequence[Removal]) -> None:
    """One JSON object a line, put in place at once."""
    temporary = path.with_name(path.name + ".tmp")
    lines = [json.dumps(removal.row(), ensure_ascii=False) + "\n" for removal in removals]
    temporary.write_text("".join(lines), encoding="utf-8")
    temporary.replace(path)
