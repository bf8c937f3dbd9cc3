"""Greedy decoding by `transformers` itself, the baseline that others measure against.

Its prompt lookup takes drafts from the prompt instead of a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from treespark.target.model import Target


class Generated(NamedTuple):
    """What `transformers` wrote.

    Attributes:
        tokens: New tokens, end token included, prompt excluded.
        committed: How many of them each of the target's forwards gave; the first belongs to the prefill.
        first_token: Seconds from the call to the first new token.
        finished: Seconds from the call to its end.
    """

    tokens: list[int]
    committed: list[int]
    first_token: float
    finished: float


@torch.no_grad()
def generate_greedily(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    end_token_ids: Sequence[int] | None = None,
    lookup_tokens: int | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Generated:
    """Decodes a prompt with the greedy `generate` of `transformers`.

    Args:
        target: The target.
        prompt_ids: Prompt tokens.
        max_new_tokens: Most new tokens, end token included.
        end_token_ids: Tokens that end the answer; None takes the target's own.
        lookup_tokens: Tokens that prompt lookup drafts at most; None decodes without.
        clock: Source of times in seconds.
    """
    from transformers import GenerationConfig

    make_config: Any = GenerationConfig  # untyped there

    ends = list(target.spec.eos_token_ids if end_token_ids is None else end_token_ids)
    pad = target.spec.pad_token_id if target.spec.pad_token_id is not None else (ends[0] if ends else 0)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1}
    options |= {"eos_token_id": ends or None, "pad_token_id": pad}
    if lookup_tokens is not None:
        options["prompt_lookup_num_tokens"] = lookup_tokens
    prompt = torch.tensor([list(prompt_ids)], device=target.device)
    streamer = _Streamer(clock)
    model = target.model
    own = model.generation_config
    begin = clock()
    try:
        # What the options leave open would be filled in from the model's own file: penalties, end tokens.
        model.generation_config = make_config(pad_token_id=pad)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=make_config(**options),
            streamer=streamer,
        )
    finally:
        model.generation_config = own
    finished = clock() - begin
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    first = streamer.first - begin if streamer.first is not None else finished
    return Generated(tokens, streamer.counts, first, finished)


class _Streamer:
    """Counts the tokens of each forward and notes when the first came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self._has_prompt = clock, False
        self.counts: list[int] = []
        self.first: float | None = None

    def put(self, value: Tensor) -> None:
        """Takes the prompt, then the new tokens of each forward."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        if self.first is None:
            self.first = self.clock()
        self.counts.append(value.numel())

    def end(self) -> None:
        """Needs nothing: the call is about to return."""
