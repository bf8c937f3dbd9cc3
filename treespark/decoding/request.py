"""One request: a prompt, its stop rules, and the answer so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespark.decoding.record import Round
from treespark.decoding.stop import FinishReason, StopRules

if TYPE_CHECKING:
    from treespark.target import Target

PARTS = ("prefill", "draft", "head", "build", "verify", "commit", "decode")


class Request:
    """A prompt on its way to an answer.

    Args:
        target: The target model.
        prompt_ids: Prompt tokens, one at least.
        max_new_tokens: Most new tokens, end token included.
        end_token_ids: Tokens that end the answer; None takes the target's own, an empty list takes none.
        on_commit: Receives the newly committed tokens after the prefill and after every round.

    Attributes:
        prompt: [1, P] prompt tokens.
        tokens: New tokens so far.
        rounds: One record per round.
        gaps: Plain decoding only: best minus second best logit at each of `tokens`.
        timing: See `DecodeResult`.
        finish_reason: Why the answer is over, or None while it goes on.

    Raises:
        ValueError: For an empty or impossible prompt, or a negative limit.
    """

    def __init__(
        self,
        target: Target,
        prompt_ids: Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 128,
        end_token_ids: int | Iterable[int] | None = None,
        on_commit: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.rules = StopRules.of(target.spec.eos_token_ids if end_token_ids is None else end_token_ids, max_new_tokens)
        self.prompt = _check_prompt(target, prompt_ids, max_new_tokens)
        self.on_commit, self._num_handed_out = on_commit, 0
        self.tokens: list[int] = []
        self.rounds: list[Round] = []
        self.gaps: list[float] = []
        self.timing = dict.fromkeys(PARTS, 0.0)
        self.finish_reason: FinishReason | None = self.rules.finish_reason(self.tokens)

    @property
    def length(self) -> int:
        """Committed tokens without the last, whose place is the next anchor's: what the caches hold."""
        return self.prompt.shape[1] + len(self.tokens) - 1

    def commit(self, tokens: list[int]) -> None:
        """Appends tokens that the stop rules have cut already."""
        self.tokens.extend(tokens)
        self.finish_reason = self.rules.finish_reason(self.tokens)

    def hand_out(self) -> None:
        """Hands the tokens that were committed since the last call to `on_commit`; what that does is not timed."""
        new, self._num_handed_out = self.tokens[self._num_handed_out :], len(self.tokens)
        if self.on_commit is not None and new:
            self.on_commit(new)


def _check_prompt(target: Target, prompt_ids: Sequence[int] | Tensor, max_new_tokens: int) -> Tensor:
    """Returns the prompt as [1, P] on the target's device."""
    prompt = torch.as_tensor(prompt_ids, dtype=torch.long, device=target.device)
    if prompt.dim() == 2 and len(prompt) == 1:
        prompt = prompt[0]
    if prompt.dim() != 1 or prompt.numel() == 0:
        raise ValueError(
            f"Expected one prompt of at least one token, got shape {tuple(prompt.shape)}; render an empty prompt with "
            "the chat template or start it with the target's first token."
        )
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= target.spec.vocab_size:
        raise ValueError(
            f"The prompt holds token {low if low < 0 else high}, but '{target.spec.name}' has the tokens 0 to "
            f"{target.spec.vocab_size - 1}: tokenize with the target's own tokenizer."
        )
    if prompt.numel() + max_new_tokens > target.spec.max_position_embeddings:
        raise ValueError(
            f"The prompt's {prompt.numel()} tokens and max_new_tokens = {max_new_tokens} exceed the "
            f"{target.spec.max_position_embeddings} positions of '{target.spec.name}': shorten the prompt or lower "
            "max_new_tokens."
        )
    return prompt.unsqueeze(0)
