"""Tokenised samples: what the loader keeps in memory of each line."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treespark.data.mixture import SourceSpec, open_source
from treespark.data.prompts import DataError, Problems, PromptRecord
from treespark.data.sources import PromptSource
from treespark.data.template import ChatEncoder, Encoded, Span

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
    def prompt_length(self) -> int:
        """Start of the last supervised span."""
        return self.spans[-1][0]

    def __len__(self) -> int:
        return self.ids.numel()


def load_samples(
    sources: Sequence[SourceSpec | PromptSource], encoder: ChatEncoder, max_length: int, problems: Problems
) -> list[Sample]:
    """Read, tokenise and cut the prompts of some sources, in order.

    A conversation longer than ``max_length`` tokens is cut there if at least 2 tokens of its answer remain.

    Args:
        sources: JSONL files or other sources.
        encoder: tokenizer and template.
        max_length: tokens per sequence.
        problems: what to do with lines that cannot be used.

    Raises:
        FileNotFoundError: a file does not exist.
        DataError: a line cannot be used and ``problems`` stops at it, or a file has no usable line.
    """
    samples: list[Sample] = []
    for source in (part for spec in sources for part in open_source(spec).parts):
        path = source.label
        before, num_cut, num_unplaced, num_problems = len(samples), 0, 0, len(problems.errors)
        records = list(source.records(problems))
        for record in _track(records, path):
            try:
                encoded = encoder.encode(record)
                ids, spans, is_cut = _cut(encoded, max_length)
            except DataError as error:
                problems.add(error)
                continue
            except ValueError as error:
                problems.add(record.error(str(error)))
                continue
            num_cut += is_cut
            num_unplaced += encoded.num_unplaced
            tokens = torch.tensor(ids, dtype=torch.int32)
            samples.append(Sample(tokens, tuple(spans), record.response_ids is not None, record.where))
        of_file = Problems(problems.on_error)
        of_file.errors = problems.errors[num_problems:]
        of_file.report(path, len(samples) - before)
        if num_cut:
            _log.warning("%s: %d of %d answers cut at %d tokens", path, num_cut, len(samples) - before, max_length)
        if num_unplaced:
            _log.warning(
                "%s: %d earlier assistant messages are not supervised: the chat template renders them differently once "
                "they are history",
                path,
                num_unplaced,
            )
    return samples


def _cut(encoded: Encoded, max_length: int) -> tuple[list[int], list[Span], bool]:
    ids, spans = encoded.ids, encoded.spans
    if len(ids) <= max_length:
        return ids, spans, False
    start = spans[-1][0]
    if start + 2 > max_length:
        raise ValueError(
            f"the prompt has {start} tokens and leaves no room for an answer in max_length={max_length}. "
            "Raise max_length, or set on_error: skip."
        )
    return ids[:max_length], [*spans[:-1], (start, max_length)], True


def _track(records: list[PromptRecord], path: str) -> Iterable[PromptRecord]:
    if len(records) < _PROGRESS_FROM:
        return records
    from rich.progress import track

    return track(records, description=f"Tokenising {path}", transient=True)
