"""The records of a benchmark: what one prompt did under one arm, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treespark.decoding import Round


@dataclass(frozen=True)
class Trial:
    """One prompt under one arm.

    Attributes:
        num_tokens: New tokens, the prefill's one included.
        finish_reason: "stop" or "length".
        num_accepted: Accepted draft tokens of each round, the bonus left out.
        committed: Committed tokens of each round, the bonus included.
        timing: Seconds by name: those of `DecodeResult.timing`, and first_token, rest and share (see `Times`); empty
            for simulated rounds.
        identical: Whether the tokens are plain decoding's; None where that was not compared.
        num_compared: Tokens compared, up to and with the first difference.
        simulated: Committed tokens of each simulated round, where a live run also simulates.
        num_judged: Tokens set against the target's own logits before them, in bfloat16 and float16; see `text_margins`.
        num_near_ties: Those that are not the likeliest token, but as likely as it within rounding.
        margin: The largest distance of such a token's logit below the best one, in spacings of the dtype, or None.
    """

    num_tokens: int
    finish_reason: str
    num_accepted: list[int]
    committed: list[int]
    timing: dict[str, float] = field(default_factory=dict)
    identical: bool | None = None
    num_compared: int = 0
    simulated: list[int] | None = None
    num_judged: int = 0
    num_near_ties: int = 0
    margin: float | None = None

    @classmethod
    def of(cls, rounds: Sequence[Round], num_tokens: int, finish_reason: str) -> Trial:
        """Returns the trial of some rounds, without a timing."""
        accepted, committed = [item.num_accepted for item in rounds], [item.committed for item in rounds]
        return cls(num_tokens, finish_reason, accepted, committed)


@dataclass(frozen=True)
class PromptTrials:
    """One prompt under every arm, decoded once.

    Attributes:
        suite: Name of its suite.
        index: Its place in the suite, from 0.
        id: The line's id.
        num_prompt_tokens: Length of the prompt.
        trials: By name of the arm.
        batch_size: The most requests that decoded side by side.
        repeat: Which repeat it was, from 0.
        sha256: Of the prompt's tokens.
    """

    suite: str
    index: int
    id: str
    num_prompt_tokens: int
    trials: dict[str, Trial]
    batch_size: int = 1
    repeat: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Difference:
    """The first token of an output that is not plain decoding's.

    Attributes:
        suite: Name of the suite.
        index: The prompt's place in it.
        id: The prompt's id.
        arm: Name of the arm.
        position: Index of the token in the answer.
        gap: Plain decoding's best minus second best logit there; None where one output ended and the other went on.
        near_tie: Whether that gap is so small that rounding may decide.
        batch_size: Requests side by side.
        repeat: Which repeat it was.
    """

    suite: str
    index: int
    id: str
    arm: str
    position: int
    gap: float | None
    near_tie: bool
    batch_size: int = 1
    repeat: int = 0


@dataclass(frozen=True)
class Miss:
    """The first token of an output, in bfloat16 or float16, that plain decoding of the same text would not write.

    Attributes:
        suite: Name of the suite.
        index: The prompt's place in it.
        id: The prompt's id.
        arm: Name of the arm.
        position: Index of the token in the answer.
        spacings: How far its logit lies below the best one, in spacings of the dtype; None where the output ends too
            early or goes on behind an end token.
        batch_size: Requests side by side.
        repeat: Which repeat it was.
    """

    suite: str
    index: int
    id: str
    arm: str
    position: int
    spacings: float | None
    batch_size: int = 1
    repeat: int = 0
