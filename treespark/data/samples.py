"""Tokenised samples: what the loader keeps in memory of each line."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from treespark.data.mixture import SourceSpec, open_source
from treespark.data.prompts import DataError, Problems, PromptRecord
from treespark.data.sources import PromptSource
from treespark.data.template import ChatEncoder, Encoded, Span

LongSequences = Literal["cut", "split", "drop"]

_log = logging.getLogger(__name__)
_PROGRESS_FROM = 1000  # lines; fewer take a moment only


@dataclass(frozen=True)
class Sample:
    """One tokenised conversation.

    Attributes:
        ids: [S] int32 tokens.
        spans: supervised half-open ranges, ascending; the last one is the answer.
        own_text: the answer's tokens are known exactly because the target wrote them.
        where: ``file:line``.
    """

    ids: Tensor
    spans: tuple[Span, ...]
    own_text: bool
    where: str

    @property
    def num_eligible(self) -> int:
        """Positions that may be anchors: as `eligible_anchors` counts them, from the spans alone."""
        touching = sum(stop == start for (_, stop), (start, _) in zip(self.spans, self.spans[1:], strict=False))
        return sum(stop - start - 1 for start, stop in self.spans) + touching

    @property
    def prompt_length(self) -> int:
        """Start of the last supervised span."""
        return self.spans[-1][0]

    def __len__(self) -> int:
        return self.ids.numel()


def load_samples(
    sources: Sequence[SourceSpec | PromptSource],
    encoder: ChatEncoder,
    max_length: int,
    problems: Problems,
    long_sequences: LongSequences = "cut",
) -> list[Sample]:
    """Read and tokenise the prompts of some sources, in order; conversations over ``max_length`` are counted.

    * ``cut``: the answer ends there, if at least 2 of its tokens remain; else the line cannot be used.
    * ``split``: parts of at most ``max_length`` tokens, each a document of its own, whose positions start at 0. A later
      part has lost the text before it, as context and for the target's own probabilities, and the pair of tokens at
      each border trains nothing. Parts without an anchor are left out.
    * ``drop``: they are left out.

    Args:
        sources: JSONL files or other sources.
        encoder: tokenizer and template.
        max_length: tokens per sequence.
        problems: what to do with lines that cannot be used.
        long_sequences: ``cut``, ``split`` or ``drop``.

    Raises:
        FileNotFoundError: a file does not exist.
        DataError: a line cannot be used and ``problems`` stops at it, or a file has no usable line.
    """
    samples: list[Sample] = []
    for source in (part for spec in sources for part in open_source(spec).parts):
        path = source.label
        before, num_unplaced, num_problems = len(samples), 0, len(problems.errors)
        long = _Long(long_sequences, max_length)
        records = list(source.records(problems))
        for record in _track(records, path):
            try:
                encoded = encoder.encode(record)
                parts = long.fit(encoded)
            except DataError as error:
                problems.add(error)
                continue
            except ValueError as error:
                problems.add(record.error(str(error)))
                continue
            num_unplaced += encoded.num_unplaced
            own = record.response_ids is not None
            for ids, spans, from_start in parts:
                # What the target writes after the middle of a text is not what it wrote after all of it.
                samples.append(
                    Sample(torch.tensor(ids, dtype=torch.int32), tuple(spans), own and from_start, record.where)
                )
        of_file = Problems(problems.on_error)
        of_file.errors = problems.errors[num_problems:]
        done = long.report(path, len(records))
        if done and len(samples) == before and not of_file.errors:
            raise DataError(f"{path}: nothing is left: {done}. Raise max_length, or set long_sequences to another way.")
        of_file.report(path, len(samples) - before)
        if num_unplaced:
            _log.warning(
                "%s: %d earlier assistant messages are not supervised: the chat template renders them differently once "
                "they are history",
                path,
                num_unplaced,
            )
    return samples


class _Part(NamedTuple):
    """Tokens and spans of a document, and whether it begins where the conversation does."""

    ids: list[int]
    spans: list[Span]
    from_start: bool


@dataclass
class _Long:
    """What happens to conversations that are too long, and how many there were."""

    how: LongSequences
    max_length: int
    num_long: int = 0
    num_parts: int = 0
    num_tokens: int = 0
    num_lost: int = 0

    def fit(self, encoded: Encoded) -> list[_Part]:
        """The documents that a conversation gives."""
        ids, spans = encoded.ids, encoded.spans
        if len(ids) <= self.max_length:
            return [_Part(ids, spans, True)]
        parts = {"cut": self._cut, "split": self._split, "drop": lambda *_: []}[self.how](ids, spans)
        self.num_long += 1
        self.num_parts += len(parts)
        self.num_tokens += len(ids)
        self.num_lost += len(ids) - sum(len(part.ids) for part in parts)
        return parts

    def _cut(self, ids: list[int], spans: list[Span]) -> list[_Part]:
        start, most = spans[-1][0], self.max_length
        if start + 2 > most:
            raise ValueError(
                f"the prompt has {start} tokens and leaves no room for an answer in max_length={most}. "
                "Raise max_length, or set on_error: skip."
            )
        return [_Part(ids[:most], [*spans[:-1], (start, most)], True)]

    def _split(self, ids: list[int], spans: list[Span]) -> list[_Part]:
        parts = []
        for first in range(0, len(ids), self.max_length):
            last = min(first + self.max_length, len(ids))
            inside = [(max(start, first) - first, min(stop, last) - first) for start, stop in spans]
            inside = [(start, stop) for start, stop in inside if start < stop]
            if any(stop - start > 1 for start, stop in inside):
                parts.append(_Part(ids[first:last], inside, first == 0))
        return parts

    def report(self, path: str, num_lines: int) -> str:
        """Logs in one line what was done to how many, and returns it; empty where none was too long."""
        if not self.num_long:
            return ""
        done = {
            "cut": f"{self.num_long} of {num_lines} answers cut at {self.max_length} tokens",
            "split": f"{self.num_long} of {num_lines} conversations split into {self.num_parts} documents of at most "
            f"{self.max_length} tokens; the later ones have lost the text before them",
            "drop": f"{self.num_long} of {num_lines} conversations longer than {self.max_length} tokens dropped",
        }[self.how]
        _log.warning("%s: %s (%d of their %d tokens are left out)", path, done, self.num_lost, self.num_tokens)
        return done


def _track(records: list[PromptRecord], path: str) -> Iterable[PromptRecord]:
    if len(records) < _PROGRESS_FROM:
        return records
    from rich.progress import track

    return track(records, description=f"Tokenising {path}", transient=True)
