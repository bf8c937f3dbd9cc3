"""Decoding as functions: one prompt or many, with a drafter or plainly. The loop is `BatchDecoding`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespark.decoding.batch import BatchDecoding
from treespark.decoding.record import DecodeResult, Round
from treespark.decoding.request import Request
from treespark.policies import TreePolicy

if TYPE_CHECKING:
    from treespark.drafters import DraftContext, Drafter
    from treespark.target import Target
    from treespark.target.cache import TargetCache


class Decoding:
    """One request on its way: `prefill`, then `step` until `finish_reason` is set; `run` does both.

    A batch of one.

    Args:
        target: The target model.
        prompt_ids: Prompt tokens, one at least.
        drafter: The drafter, bound to `target`; None decodes plainly, with one-row forwards.
        policy: Tree policy; None takes the drafter's recorded one.
        allow_other_policy: Whether `policy` may differ from the recorded one.
        max_new_tokens: Most new tokens, end token included.
        end_token_ids: Tokens that end the answer; None takes the target's own, an empty list takes none.
        generator: Source of randomness for policies that draw.
        on_commit: Receives the newly committed tokens after the prefill and after every round.

    Raises:
        ValueError: For an empty or impossible prompt, a negative limit, a drafter of another target, or a policy that
            is out of range for the drafter.
    """

    def __init__(
        self,
        target: Target,
        prompt_ids: Sequence[int] | Tensor,
        *,
        drafter: Drafter | None = None,
        policy: TreePolicy | None = None,
        allow_other_policy: bool = False,
        max_new_tokens: int = 128,
        end_token_ids: int | Iterable[int] | None = None,
        generator: torch.Generator | None = None,
        on_commit: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.batch = BatchDecoding(
            target,
            drafter=drafter,
            policy=policy,
            allow_other_policy=allow_other_policy,
            max_batch_size=1,
            generator=generator,
        )
        self.request = Request(
            target, prompt_ids, max_new_tokens=max_new_tokens, end_token_ids=end_token_ids, on_commit=on_commit
        )

    @property
    def tokens(self) -> list[int]:
        """New tokens so far."""
        return self.request.tokens

    @property
    def finish_reason(self) -> str | None:
        """Why the answer is over, or None while it goes on."""
        return self.request.finish_reason

    @property
    def cache(self) -> TargetCache | None:
        """The target's keys and values of the committed text; None before the prefill."""
        return self.batch.cache

    @property
    def context(self) -> DraftContext | None:
        """The drafter's keys and values of the committed text; None before the prefill."""
        return self.batch.context

    def prefill(self) -> None:
        """Reads the prompt and commits the target's first token."""
        self.batch.add(self.request)

    def step(self) -> Round:
        """Drafts, verifies and commits one round, and returns its record."""
        return self.batch.step()[0][1]

    def run(self) -> DecodeResult:
        """Decodes to the end."""
        self.batch.run([self.request])
        return self.batch.result(self.request)


def decode(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int] | Tensor,
    *,
    policy: TreePolicy | None = None,
    allow_other_policy: bool = False,
    max_new_tokens: int = 128,
    end_token_ids: int | Iterable[int] | None = None,
    generator: torch.Generator | None = None,
    on_commit: Callable[[list[int]], None] | None = None,
) -> DecodeResult:
    """Decodes one prompt greedily with a drafter; the text is plain greedy decoding's own.

    Args:
        target: The target model.
        drafter: A drafter bound to it.
        prompt_ids: Prompt tokens [P], one at least.
        policy: Tree policy; None takes the one recorded with the drafter, or the reference tree where none was. The
            result says which one it was and whether it is the recorded one.
        allow_other_policy: Needed for a policy other than the recorded one.
        max_new_tokens: Most new tokens, end token included.
        end_token_ids: Tokens that end the answer; None takes the target's own, an empty list takes none.
        generator: Source of randomness for policies that draw.
        on_commit: Receives the newly committed tokens after the prefill and after every round.

    Raises:
        ValueError: See `Decoding`.

    Source: arXiv 2610.20175 §3.1, A.2, A.3.
    """
    request = Decoding(
        target,
        prompt_ids,
        drafter=drafter,
        policy=policy,
        allow_other_policy=allow_other_policy,
        max_new_tokens=max_new_tokens,
        end_token_ids=end_token_ids,
        generator=generator,
        on_commit=on_commit,
    )
    return request.run()


def decode_plain(
    target: Target,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int = 128,
    end_token_ids: int | Iterable[int] | None = None,
    on_commit: Callable[[list[int]], None] | None = None,
) -> DecodeResult:
    """Decodes one prompt greedily without a drafter: the oracle and the baseline, from the loop that `decode` runs.

    Every round is a one-row forward that commits one token. The result carries `gaps`. Arguments as in `decode`.
    """
    request = Decoding(
        target, prompt_ids, max_new_tokens=max_new_tokens, end_token_ids=end_token_ids, on_commit=on_commit
    )
    return request.run()


def decode_batch(
    target: Target,
    drafter: Drafter | None,
    prompts: Iterable[Sequence[int] | Tensor],
    *,
    policy: TreePolicy | None = None,
    allow_other_policy: bool = False,
    max_batch_size: int = 8,
    max_new_tokens: int | Sequence[int] = 128,
    end_token_ids: int | Iterable[int] | None = None,
    generator: torch.Generator | None = None,
    on_commit: Callable[[int, list[int]], None] | None = None,
) -> list[DecodeResult]:
    """Decodes prompts of any lengths side by side; each answer is the one that `decode` gives for its prompt alone.

    Args:
        target: The target model.
        drafter: A drafter bound to it; None decodes plainly.
        prompts: Prompt tokens of each request.
        policy: Tree policy, as in `decode`.
        allow_other_policy: As in `decode`.
        max_batch_size: The most requests that decode side by side; a waiting one enters when one is over.
        max_new_tokens: Most new tokens, of all requests or of each.
        end_token_ids: Tokens that end an answer; None takes the target's own, an empty list takes none.
        generator: Source of randomness for policies that draw.
        on_commit: Receives a request's index and its newly committed tokens, after its prefill and its every round.

    Returns:
        The results in the order of the prompts. `timing` also holds "first_token" and "finished", seconds from the
        call; a round's seconds count for every request in it.

    Raises:
        ValueError: See `Decoding`; also for a batch size below 1 or another number of limits than of prompts.
    """
    batch = BatchDecoding(
        target,
        drafter=drafter,
        policy=policy,
        allow_other_policy=allow_other_policy,
        max_batch_size=max_batch_size,
        generator=generator,
    )
    texts = list(prompts)
    limits = [max_new_tokens] * len(texts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(texts):
        raise ValueError(f"max_new_tokens holds {len(limits)} limits for {len(texts)} prompts; give one for each.")
    ends = end_token_ids if end_token_ids is None or isinstance(end_token_ids, int) else list(end_token_ids)

    def stream(index: int) -> Callable[[list[int]], None] | None:
        return None if on_commit is None else lambda tokens: on_commit(index, tokens)

    requests = [
        Request(target, text, max_new_tokens=limit, end_token_ids=ends, on_commit=stream(index))
        for index, (text, limit) in enumerate(zip(texts, limits, strict=True))
    ]
    batch.run(requests)
    return [batch.result(request) for request in requests]
