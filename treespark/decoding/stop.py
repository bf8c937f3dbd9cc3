"""When an answer ends, and how a round's path is cut to that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class StopRules:
    """An answer ends after its first end token or after `max_new_tokens` tokens, whichever comes first.

    Attributes:
        end_token_ids: Tokens that end the answer; empty: only the limit ends it.
        max_new_tokens: Most tokens of the answer, end token included.
    """

    end_token_ids: frozenset[int]
    max_new_tokens: int

    @classmethod
    def of(cls, end_token_ids: int | Iterable[int], max_new_tokens: int) -> StopRules:
        """Builds the rules from one end token id or several.

        Raises:
            ValueError: For a negative limit.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
        ids = (end_token_ids,) if isinstance(end_token_ids, int) else end_token_ids
        return cls(frozenset(int(token) for token in ids), max_new_tokens)

    def cut(self, path: Sequence[int], num_new: int) -> list[int]:
        """Cuts a path after its first end token and to what the limit leaves when `num_new` tokens stand already."""
        kept: list[int] = []
        for token in path[: max(0, self.max_new_tokens - num_new)]:
            kept.append(token)
            if token in self.end_token_ids:
                break
        return kept

    def finish_reason(self, tokens: Sequence[int]) -> FinishReason | None:
        """Returns why an answer of these tokens is over, or None while it goes on.

        An end token that is also the last token that the limit allows counts as "stop".
        """
        if tokens and tokens[-1] in self.end_token_ids:
            return "stop"
        return "length" if len(tokens) >= self.max_new_tokens else None
