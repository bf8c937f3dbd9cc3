"""Answers from a target in this process, plainly or sped up by a drafter.

Prompts are decoded side by side; an answer that ends makes room for the next prompt. A unit is a window of prompts,
so who decodes beside whom depends on the order of the input alone, and a unit that was cut off is redone to the
same bytes. In float64 a drafter changes nothing in them. In lower precision passes of different widths round
differently, and where the two best tokens are that close (a near-tie) another one may win, as it may with another
batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from treespark.data.prompts import PromptRecord
from treespark.data.template import ChatEncoder
from treespark.decoding.batch import BatchDecoding
from treespark.decoding.request import Request
from treespark.drafters.source import weights_hash
from treespark.features.identity import weights_digest
from treespark.generation.backend import Answer, Answers, Backend, Progress, Prompt
from treespark.target.loading import template_sha256

if TYPE_CHECKING:
    from treespark.drafters import Drafter
    from treespark.policies import TreePolicy
    from treespark.target import Target

_BATCHES_PER_UNIT = 8  # the last rows of a unit decode with ever fewer neighbours; a kill costs one unit


class LocalBackend(Backend):
    """A target in this process.

    Args:
        target: the target.
        encoder: its tokenizer and template.
        max_new_tokens: the most tokens of an answer.
        batch_size: prompts that decode side by side.
        drafter: a drafter bound to the target; None decodes plainly.
        policy: tree policy; None takes the drafter's recorded one.

    Raises:
        ValueError: the drafter was made for another target, or the policy is out of range for it.
    """

    def __init__(
        self,
        target: Target,
        encoder: ChatEncoder,
        *,
        max_new_tokens: int,
        batch_size: int,
        drafter: Drafter | None = None,
        policy: TreePolicy | None = None,
    ) -> None:
        self.target, self.encoder = target, encoder
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.drafter, self.policy = drafter, policy
        if drafter is not None:
            self.policy = self._decoding(1).policy  # checked, or the recorded one

    @property
    def identity(self) -> dict[str, Any]:
        """The target, its template, and how it decodes; the drafter too, for what near-ties may change."""
        drafting = {}
        if self.drafter is not None and self.policy is not None:
            drafting = {"drafter_sha256": weights_hash(self.drafter), "policy": self.policy.config()}
        return {
            "fingerprint": self.target.spec.fingerprint,
            "weights": weights_digest(self.target),  # a target that was fine-tuned may keep its fingerprint
            "chat_template": template_sha256(self.encoder.tokenizer),
            "batch_size": self.batch_size,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            **drafting,
        }

    def prompt_ids(self, record: PromptRecord) -> list[int]:
        """Tokens of a line's prompt.

        Raises:
            ValueError: it has none, or leaves no room for an answer.
        """
        ids = self.encoder.prompt_ids(record.messages)
        room = self.target.spec.max_position_embeddings - self.max_new_tokens
        if not ids:
            raise ValueError("the prompt has no tokens.")
        if len(ids) > room:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; with max_new_tokens={self.max_new_tokens} the target's context of "
                f"{self.target.spec.max_position_embeddings} leaves room for {room}. Shorten it, lower max_new_tokens, "
                "or set on_error to skip."
            )
        return ids

    def units(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Windows of the input, long prompts first: neighbours of like length hide less of each other's cache."""
        size = _BATCHES_PER_UNIT * self.batch_size
        windows = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        return [sorted(window, key=lambda prompt: (-len(prompt.ids or ()), prompt.index)) for window in windows]

    def answers(self, units: Sequence[Sequence[Prompt]], progress: Progress) -> Answers:
        """Decodes one unit after the other."""
        for unit in units:
            yield dict(zip((prompt.index for prompt in unit), self._decode(unit, progress), strict=True))

    def _decode(self, unit: Sequence[Prompt], progress: Progress) -> list[Answer]:
        requests: list[Request] = []

        def reporting(index: int) -> Callable[[list[int]], None]:
            return lambda tokens: progress(int(requests[index].finish_reason is not None), len(tokens))

        for index, prompt in enumerate(unit):
            assert prompt.ids is not None
            limit, report = self.max_new_tokens, reporting(index)
            requests.append(Request(self.target, prompt.ids, max_new_tokens=limit, on_commit=report))
        self._decoding(min(self.batch_size, len(unit))).run(requests)
        return [
            Answer(
                text=self.encoder.answer_text(request.tokens),
                ids=list(request.tokens),
                finish_reason=str(request.finish_reason),
                num_tokens=len(request.tokens),
                num_rounds=0 if self.drafter is None else len(request.rounds),
            )
            for request in requests
        ]

    def _decoding(self, batch_size: int) -> BatchDecoding:
        return BatchDecoding(
            self.target,
            drafter=self.drafter,
            policy=self.policy,
            allow_other_policy=True,  # asked for by name; the record beside the output says which
            max_batch_size=batch_size,
            generator=torch.Generator(self.target.device).manual_seed(0),  # a redone unit draws what it drew before
        )
