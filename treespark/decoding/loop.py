"""The decoding loop of one request: plain decoding, chains and trees are the same code.

Shapes: R rows (requests; 1 here), P prompt tokens, W = packed nodes + root, K depths, H hidden, m taps, V vocabulary.

Between rounds the target's cache and the drafter's context hold the committed text without its last token. That token
is the anchor of the next round: its own hidden state is not known until the target has verified the round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespark.decoding.policy import resolve_policy
from treespark.decoding.record import DecodeResult, Round
from treespark.decoding.stop import FinishReason, StopRules
from treespark.decoding.verify import root_tree, tree_attention_mask, trim, walk
from treespark.policies import TreePolicy
from treespark.tree import PackedTree

if TYPE_CHECKING:
    from treespark.drafters import DraftContext, Drafter
    from treespark.target import Target
    from treespark.target.cache import TargetCache


class Decoding:
    """One request on its way: `prefill`, then `step` until `finish_reason` is set; `run` does both.

    Args:
        target: The target model.
        prompt_ids: Prompt tokens, one at least.
        drafter: The drafter, bound to `target`; None decodes plainly, with one-row forwards.
        policy: Tree policy; None takes the drafter's recorded one.
        allow_other_policy: Whether `policy` may differ from the recorded one.
        max_new_tokens: Most new tokens, end token included.
        end_token_ids: Tokens that end the answer; None takes the target's own, an empty list takes none.
        generator: Source of randomness for policies that draw.

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
    ) -> None:
        self.target, self.drafter, self.generator = target, drafter, generator
        self.rules = StopRules.of(target.spec.eos_token_ids if end_token_ids is None else end_token_ids, max_new_tokens)
        self.prompt = _check_prompt(target, prompt_ids, max_new_tokens)
        self.policy: TreePolicy | None = None
        self.recorded = False
        self.layer_ids: tuple[int, ...] = ()
        if drafter is not None:
            _check_drafter(target, drafter)
            self.policy, self.recorded = resolve_policy(drafter, policy, allow_other_policy)
            self.layer_ids = tuple(drafter.layer_ids)
        self.tokens: list[int] = []
        self.rounds: list[Round] = []
        self.gaps: list[float] = []
        self.timing = dict.fromkeys(("prefill", "draft", "build", "verify", "commit", "decode"), 0.0)
        self.finish_reason: FinishReason | None = self.rules.finish_reason(self.tokens)
        self.cache: TargetCache | None = None
        self.context: DraftContext | None = None
        self._mark = 0.0

    @torch.no_grad()
    def prefill(self) -> None:
        """Reads the prompt and commits the target's first token."""
        begin = perf_counter()
        length = self.prompt.shape[1]
        nodes = self.policy.num_nodes(self.drafter.block_size) if self.policy and self.drafter else 0
        # Room for a usual answer at once; the cache grows by itself past it.
        self.cache = self.target.new_cache(length + min(self.rules.max_new_tokens, 1024) + nodes + 1, rows=1)
        output = self.target(self.prompt, self.cache, self.layer_ids, num_logits=1)
        self._commit([self._choose(output.logits)])
        if self.drafter is not None and self.finish_reason is None:
            positions = torch.arange(length, device=self.prompt.device).unsqueeze(0)
            self.context = self.drafter.encode(output.features.context, positions)
        self.timing["prefill"] += perf_counter() - begin

    @torch.no_grad()
    def step(self) -> Round:
        """Drafts, verifies and commits one round, and returns its record."""
        assert self.cache is not None and self.finish_reason is None, "prefill first; no rounds after the end"
        begin = self._mark = perf_counter()
        start = self.cache.length  # the anchor's position
        anchor = torch.tensor([[self.tokens[-1]]], device=self.prompt.device)
        packed = self._draft(anchor, start)

        mask, ancestors = None, None
        if packed.tokens.shape[1] > 1:
            ancestors = packed.ancestor_mask()
            mask = tree_attention_mask(ancestors, start)
        output = self.target(packed.tokens, self.cache, self.layer_ids, start + packed.depths, mask)
        if self.drafter is None:
            nodes, path = [], [self._choose(output.logits)]
        else:
            choices = output.logits.argmax(-1)  # [1, W]
            accepted = walk(packed, choices, ancestors).accepted
            # The one transfer of the verification.
            on_path, tokens, chosen = torch.stack([accepted.long(), packed.tokens, choices])[:, 0].tolist()
            nodes = [index for index in range(1, len(tokens)) if on_path[index]]
            path = [tokens[index] for index in nodes] + [chosen[nodes[-1] if nodes else 0]]
        self._lap("verify")

        committed = self.rules.cut(path, len(self.tokens))
        record = Round.of(len(nodes), len(committed))
        # The last committed token becomes the anchor: its key and value, if computed at all, do not stay.
        kept = torch.tensor([0, *nodes[: len(committed) - 1]])  # on the CPU: reading it there waits for nothing
        self.cache.keep(start, kept)
        self._commit(committed)
        self.rounds.append(record)
        self._lap("commit")
        if self.drafter is not None and self.finish_reason is None:
            features = output.features.context.index_select(1, kept.to(anchor.device))
            positions = torch.arange(start, start + len(kept), device=anchor.device).unsqueeze(0)
            self.context = self.drafter.encode(features, positions, self.context)
            self._lap("draft")
        self.timing["decode"] += perf_counter() - begin
        return record

    def run(self, on_commit: Callable[[list[int]], None] | None = None) -> DecodeResult:
        """Decodes to the end; `on_commit` receives the newly committed tokens after the prefill and every round."""
        if self.finish_reason is None:
            self.prefill()
            if on_commit:
                on_commit(self.tokens[:])
        while self.finish_reason is None:
            record = self.step()
            if on_commit:
                on_commit(self.tokens[-record.committed :])
        return DecodeResult(
            tokens=self.tokens,
            rounds=self.rounds,
            finish_reason=self.finish_reason,
            timing=self.timing,
            policy=self.policy.config() if self.policy else None,
            recorded=self.recorded,
            gaps=self.gaps if self.drafter is None else None,
        )

    def _draft(self, anchor: Tensor, position: int) -> PackedTree:
        """Drafts and packs the round's tree below `anchor` [1, 1]; the bare root without a drafter."""
        if self.drafter is None:
            return root_tree(anchor)
        assert self.policy is not None and self.context is not None
        # No mask: all that the context holds lies before the anchor.
        hidden = self.drafter.draft(self.context, anchor, torch.full_like(anchor, position), None)  # [1, 1, K, H]
        self._lap("draft")
        proposer = self.drafter.propose(hidden.flatten(0, 1), anchor[:, 0])
        packed = self.policy.build(proposer, generator=self.generator).pack()
        packed = trim(packed, int(packed.num_nodes.max()))
        self._lap("build")
        return packed

    def _choose(self, logits: Tensor) -> int:
        """Returns the target's token at [1, 1, V]; plain decoding also notes how far the second best was behind."""
        row = logits[0, 0]
        if self.drafter is not None:
            return int(row.argmax())
        best = row.topk(2).values
        token, gap = torch.stack([row.argmax().double(), (best[0] - best[1]).double()]).tolist()
        self.gaps.append(gap)
        return int(token)

    def _commit(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)
        self.finish_reason = self.rules.finish_reason(self.tokens)

    def _lap(self, part: str) -> None:
        now = perf_counter()
        self.timing[part] += now - self._mark
        self._mark = now


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
    )
    return request.run(on_commit)


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
    request = Decoding(target, prompt_ids, max_new_tokens=max_new_tokens, end_token_ids=end_token_ids)
    return request.run(on_commit)


def _check_drafter(target: Target, drafter: Drafter) -> None:
    own, theirs = drafter.spec, target.spec
    # A checkpoint from elsewhere may know no fingerprint; `bind` has compared its tensors then.
    if own.fingerprint not in ("", theirs.fingerprint) or own.vocab_size != theirs.vocab_size:
        raise ValueError(
            f"This drafter was made for the target '{own.name}' (fingerprint {own.fingerprint[:12]}), but "
            f"'{theirs.name}' ({theirs.fingerprint[:12]}) decodes: load the drafter's own target."
        )
    if not drafter.is_bound:
        raise ValueError("The drafter has no embedding and output head yet: call drafter.bind(target) first.")


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
