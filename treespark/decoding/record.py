"""What decoding hands back: the record of every round and the result of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treespark.decoding.stop import FinishReason

NEAR_TIE = 1e-3
"""Two logits closer than this are a near-tie: float32 forwards of different widths may order them either way."""


class Round(NamedTuple):
    """One round: a draft, its verification, and what was committed after the stop rules.

    Attributes:
        num_accepted: Draft tokens committed, bonus excluded.
        committed: Tokens committed, bonus included.
        has_bonus: Whether the target's own token after the accepted path was committed (the stop rules may cut it).
    """

    num_accepted: int
    committed: int
    has_bonus: bool

    @classmethod
    def of(cls, num_walked: int, committed: int) -> Round:
        """Builds the record of a walk over `num_walked` draft nodes whose path was cut to `committed` tokens."""
        has_bonus = committed == num_walked + 1
        return cls(committed - has_bonus, committed, has_bonus)


def round_tensors(rounds: list[Round]) -> tuple[Tensor, Tensor]:
    """Returns (num_accepted, committed) of the rounds, each [number of rounds] long, as the metrics take them."""
    table = torch.tensor([(r.num_accepted, r.committed) for r in rounds], dtype=torch.long).view(-1, 2)
    return table[:, 0], table[:, 1]


@dataclass
class DecodeResult:
    """The answer to one request.

    Attributes:
        tokens: New tokens, end token included, prompt excluded.
        rounds: One record per round. The prefill's token, the first of `tokens`, belongs to no round.
        finish_reason: "stop" after an end token, "length" at the limit.
        timing: Seconds by name: prefill, draft (the backbone), head (the output head on its slots), build (Markov
            products and the tree), verify, commit, and decode, the wall time of all rounds. On an
            accelerator the host waits for the device in verify only, so there the parts are host times and only
            prefill and decode are exact. Also first_token and finished: seconds from the start of the call that decoded
            the request, among others or alone, to its first and to its last token. A round's seconds count for every
            request that took part in it.
        policy: Config of the tree policy; None for plain decoding.
        recorded: Whether that is the policy which the drafter was trained under.
        gaps: Plain decoding only: best minus second best logit at each of `tokens`.
    """

    tokens: list[int]
    rounds: list[Round]
    finish_reason: FinishReason
    timing: dict[str, float] = field(default_factory=dict)
    policy: dict[str, Any] | None = None
    recorded: bool = False
    gaps: list[float] | None = None

    @property
    def tau(self) -> float:
        """Acceptance length, the bonus counted: committed tokens per round; nan without rounds."""
        return sum(r.committed for r in self.rounds) / len(self.rounds) if self.rounds else math.nan

    @property
    def mean_accepted(self) -> float:
        """Accepted draft tokens per round, the bonus left out; nan without rounds."""
        return sum(r.num_accepted for r in self.rounds) / len(self.rounds) if self.rounds else math.nan

    @property
    def num_near_ties(self) -> int | None:
        """Tokens where the two best logits were closer than 1e-3; None where gaps were not recorded."""
        return None if self.gaps is None else sum(gap < NEAR_TIE for gap in self.gaps)
