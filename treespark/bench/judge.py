"""The judge: is an output the target's own greedy text?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from treespark.bench.records import Difference, Miss, Trial
from treespark.decoding import DecodeResult, Margins, StopRules, compare_outputs, text_margins
from treespark.decoding.record import NEAR_TIE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.bench.suites import BenchPrompt
    from treespark.target import Target


class Place(NamedTuple):
    """Where an output belongs: its prompt's suite and place in it, batch size, repeat, and the arm's name."""

    suite: str
    number: int
    batch_size: int
    repeat: int
    arm: str


class Judge:
    """Sets outputs against plain decoding's, and in bfloat16 and float16 against the target's own logits.

    In float64 outputs are plain decoding's, in float32 but for near-ties. In a narrower dtype rounding decides between
    close tokens so often that texts soon part, so each is judged by itself: `text_margins`.

    Args:
        target: The target.
        max_new_tokens: Most new tokens of an answer.
        end_token_ids: Tokens that end an answer; None takes the target's own.
    """

    def __init__(self, target: Target, max_new_tokens: int, end_token_ids: Sequence[int] | None) -> None:
        self.target = target
        self.rules = StopRules.of(target.spec.eos_token_ids if end_token_ids is None else end_token_ids, max_new_tokens)
        self.narrow = target.dtype not in (torch.float32, torch.float64)
        # float64 leaves nothing to rounding; a near-tie excuses a difference in float32 only.
        self.near_tie = 0.0 if target.dtype == torch.float64 else NEAR_TIE
        self.differences: list[Difference] = []
        self.misses: list[Miss] = []
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Margins] = {}

    def judge(
        self, trial: Trial, result: DecodeResult, plain: DecodeResult | None, prompt: BenchPrompt, place: Place
    ) -> Trial:
        """Returns the trial with the verdict on its output, and notes what is wrong.

        Args:
            trial: The output's record.
            result: The output.
            plain: Plain decoding's output to compare it with, or None.
            prompt: What it answers.
            place: Where it belongs.
        """
        suite, number, size, repeat, arm = place
        if plain is not None:
            seen = compare_outputs(plain, result, near_tie=self.near_tie)
            trial = replace(trial, identical=seen.identical, num_compared=seen.num_compared)
            if not seen.identical and not self.narrow:
                assert seen.first_difference is not None
                first = (suite, number, prompt.id, arm, seen.first_difference)
                self.differences.append(Difference(*first, seen.gap, seen.near_tie, size, repeat))
        if not self.narrow:
            return trial
        margins = self._margins(prompt.ids, tuple(result.tokens))
        where, spacings = margins.first_miss, None if margins.first_miss is None else margins.miss
        if where is None:
            where = self._wrong_end(result.tokens)
        if where is not None:
            self.misses.append(Miss(suite, number, prompt.id, arm, where, spacings, size, repeat))
        return replace(
            trial, num_judged=margins.num_tokens, num_near_ties=margins.num_near_ties, margin=margins.largest
        )

    def _wrong_end(self, tokens: Sequence[int]) -> int | None:
        """Returns where an answer should have ended, or ends before it should; None where it ends by the rules."""
        end = len(self.rules.cut(tokens, 0))
        return end if end < len(tokens) or self.rules.finish_reason(tokens) is None else None

    def take(self) -> tuple[list[Difference], list[Miss]]:
        """Returns what was wrong since the last call."""
        found = self.differences, self.misses
        self.differences, self.misses = [], []
        return found

    def _margins(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Margins:
        """Reads each text once: arms, batch sizes and repeats mostly write the same."""
        key = (prompt, tokens)
        if key not in self._known:
            self._known[key] = text_margins(self.target, prompt, tokens)
        return self._known[key]
