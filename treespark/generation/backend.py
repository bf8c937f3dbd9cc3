"""What every source of answers offers; the files, the progress and the resuming above it are the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treespark.data.prompts import DataError, PromptRecord

Progress = Callable[[int, int], None]
"""Receives the answers that are complete and the tokens that have come since it was called last."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that is to be answered.

    Attributes:
        index: its place among the usable prompts of the file.
        record: its line.
        ids: its tokens; None where a server renders it.
    """

    index: int
    record: PromptRecord
    ids: list[int] | None


@dataclass(frozen=True)
class Answer:
    """An answer of the target.

    Attributes:
        text: without special tokens.
        ids: its exact tokens, the end token included if it was reached; None where a server gives its text only.
        finish_reason: ``stop`` or ``length``.
        num_tokens: its tokens, end token included, 0 where a server does not count them.
        num_rounds: decoding rounds after the first token; 0 where they are not known.
    """

    text: str
    ids: list[int] | None
    finish_reason: str
    num_tokens: int
    num_rounds: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """What the answer adds to its line of the output."""
        ids = {} if self.ids is None else {"response_ids": self.ids}
        return {"response": self.text, **ids, "finish_reason": self.finish_reason}

    def row(self) -> dict[str, Any]:
        """The answer as :class:`~treespark.data.answers.AnswerStore` keeps it."""
        return {**self.fields, "num_tokens": self.num_tokens, "num_rounds": self.num_rounds}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Answer:
        """The answer that :meth:`row` wrote."""
        return cls(row["response"], row.get("response_ids"), row["finish_reason"], row["num_tokens"], row["num_rounds"])


Answers = Generator[dict[int, Answer | DataError], None, None]
"""Units as they are complete: by index an answer, or the reason why this prompt alone has none."""


class Backend(ABC):
    """Answers prompts greedily."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What the answers depend on besides the prompts and their limit, as JSON values."""

    @abstractmethod
    def prompt_ids(self, record: PromptRecord) -> list[int] | None:
        """Tokens of a line's prompt, or None where this backend does not see them.

        Raises:
            ValueError: the line cannot be answered.
        """

    @abstractmethod
    def units(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Groups of prompts that are kept or, after an interruption, redone as a whole.

        They depend on the order of the prompts alone.
        """

    @abstractmethod
    def answers(self, units: Sequence[Sequence[Prompt]], progress: Progress) -> Answers:
        """Yields each unit once it is complete, in any order of the units; closing it stops the work.

        Raises:
            ValueError: no prompt can be answered.
        """
