"""Decoding rounds on text that is known already: the records of live decoding without a target forward per round.

Shapes: R rows, S sequence, B rows that still decode, K depths, H hidden, m taps, V vocabulary, W packed nodes + root.

Greedy verification accepts exactly the drafted tokens that the target itself goes on to write. So on text that the
target wrote greedily the verdict on every tree can be read off the text, and the hidden states that the drafter sees
are those of one forward over the whole text. A wave runs one round of every unfinished row together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespark.decoding.policy import resolve_policy
from treespark.decoding.record import NEAR_TIE, Round
from treespark.decoding.stop import StopRules
from treespark.decoding.verify import walk
from treespark.policies import TreePolicy
from treespark.tree import PackedTree

if TYPE_CHECKING:
    from treespark.drafters import Drafter
    from treespark.target import Target, TargetFeatures

_CHECKED_AT_ONCE = 256  # positions whose [positions, V] logits are held together


@torch.no_grad()
def simulate(
    target: Target,
    drafter: Drafter,
    policy: TreePolicy | None,
    features: TargetFeatures,
    input_ids: Tensor,
    prompt_lengths: Tensor,
    lengths: Tensor,
    *,
    end_token_ids: int | Iterable[int] | None = None,
    max_new_tokens: int | None = None,
    check: bool = True,
    generator: torch.Generator | None = None,
    on_wave: Callable[[Tensor, Tensor, PackedTree], None] | None = None,
) -> list[list[Round]]:
    """Returns the rounds that `decode` would record on prompts whose greedy answers are known.

    The answer's first token is the prefill's and belongs to no round. An answer that ends without an end token ended
    at its limit, so its length is the limit.

    Args:
        target: The target that wrote the answers.
        drafter: A drafter bound to it.
        policy: Tree policy; None takes the recorded one, as in `decode`.
        features: `target.features(input_ids, drafter.layer_ids, …)`: context [R, S, m*H], final [R, S, H].
        input_ids: [R, S] prompt and answer, one document a row, padded on the right.
        prompt_lengths: [R] where the answers begin, 1 at least.
        lengths: [R] where they end (exclusive).
        end_token_ids: Tokens that end an answer; None takes the target's own.
        max_new_tokens: A limit below the answers' lengths, or None.
        check: Whether to check first that the target wrote the answers; see `check_text`. It costs the output head at
            every answer token, so a caller that checked the same text before may leave it out.
        generator: Source of randomness for policies that draw.
        on_wave: Receives the rows [B], their anchors' positions [B] and their packed trees at every wave.

    Raises:
        ValueError: For lengths outside the rows, a policy out of range for the drafter, or (with `check`) text that
            the target did not write.
    """
    device, width = input_ids.device, input_ids.shape[1]
    policy, _ = resolve_policy(drafter, policy)
    ends = _answer_ends(target, input_ids, prompt_lengths, lengths, end_token_ids, max_new_tokens)
    if check:
        check_text(target, features.final, input_ids, prompt_lengths, ends)
    rounds: list[list[Round]] = [[] for _ in range(len(input_ids))]
    every_position = torch.arange(width, device=device)
    positions, last = prompt_lengths.to(device).clone(), ends.to(device) - 1
    rows = torch.nonzero(positions < last)[:, 0]  # [B]
    if len(rows) == 0:
        return rounds
    held = torch.empty(0, dtype=torch.long, device=device)  # rows that `context` holds, ascending
    while len(rows) > 0:
        if 2 * len(rows) <= len(held) or len(held) == 0:
            # Once half of the rows are done they leave; so all encodings together cost at most two of the whole.
            held = rows
            context = drafter.encode(features.context[held], every_position.expand(len(held), -1))
        places = positions[held].unsqueeze(1)  # [held, 1]; a finished row drafts at its end, and nobody looks
        seen = (every_position < places).unsqueeze(1)
        states = drafter.draft(context, input_ids[held].gather(1, places), places, seen)  # [held, 1, K, H]
        hidden = states[torch.searchsorted(held, rows), 0]  # [B, K, H]
        at = positions[rows]  # [B]
        anchors = input_ids[rows, at]
        packed = policy.build(drafter.propose(hidden, anchors), generator=generator).pack()
        if on_wave:
            on_wave(rows, at, packed)
        # What the target writes after a node at depth d below position t is the text's token t + d + 1, while known.
        following = at.unsqueeze(1) + packed.depths + 1  # [B, W]
        known = following <= last[rows].unsqueeze(1)
        choices = input_ids[rows].gather(1, following.clamp(max=width - 1)).masked_fill(~known, -1)
        num_walked = walk(packed, choices).num_accepted
        committed = torch.minimum(num_walked + 1, last[rows] - at)
        positions[rows] += committed
        for row, walked, taken in torch.stack([rows, num_walked, committed], 1).tolist():
            rounds[row].append(Round.of(walked, taken))
        rows = torch.nonzero(positions < last)[:, 0]
    return rounds


@torch.no_grad()
def check_text(target: Target, final: Tensor, input_ids: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> int:
    """Checks that answers are the target's own greedy text, and returns how many tokens are near-ties that fell over.

    A token passes when it is the argmax of the target's own head on the stored hidden state before it, or when its
    logit is within 1e-3 of the best (4 spacings of the target's dtype where these are wider, as in bfloat16).

    Args:
        target: The target, for its output head.
        final: [R, S, H] its final-normed hidden states.
        input_ids: [R, S] prompts and answers.
        prompt_lengths: [R] where the answers begin, 1 at least.
        lengths: [R] where they end (exclusive).

    Raises:
        ValueError: For text that the target would not have written.
    """
    device = input_ids.device
    every_position = torch.arange(input_ids.shape[1], device=device)
    starts, ends = prompt_lengths.to(device).unsqueeze(1), lengths.to(device).unsqueeze(1)
    answer = (every_position >= starts) & (every_position < ends)  # [R, S]
    places = torch.nonzero(answer)  # [answer tokens, 2]
    spacing = 4 * torch.finfo(target.dtype).eps
    num_ties = 0
    for rows, positions in (chunk.unbind(1) for chunk in torch.split(places, _CHECKED_AT_ONCE)):
        logits = target.logits(final[rows, positions - 1])
        tokens = input_ids[rows, positions]
        best = logits.max(-1).values
        gap = best - logits.gather(1, tokens.unsqueeze(1))[:, 0]
        other = logits.argmax(-1) != tokens
        # Written so that NaN logits fail as well.
        wrong = other & ~(gap <= torch.clamp(spacing * best.abs(), min=NEAR_TIE))
        if wrong.any():
            first = int(wrong.long().argmax())
            raise ValueError(
                f"Row {int(rows[first])} is not the greedy text of '{target.spec.name}': at position "
                f"{int(positions[first])} it holds token {int(tokens[first])}, but the target writes "
                f"{int(logits[first].argmax())} (logit gap {float(gap[first]):.3g}). Rounds can only be simulated on "
                "answers that this target wrote: make them with `treespark generate`."
            )
        num_ties += int(other.sum())
    return num_ties


def _answer_ends(
    target: Target,
    input_ids: Tensor,
    prompt_lengths: Tensor,
    lengths: Tensor,
    end_token_ids: int | Iterable[int] | None,
    max_new_tokens: int | None,
) -> Tensor:
    """Returns [R] where the answers end under the stop rules (exclusive), on the CPU."""
    limit = input_ids.shape[1] if max_new_tokens is None else max_new_tokens
    rules = StopRules.of(target.spec.eos_token_ids if end_token_ids is None else end_token_ids, limit)
    ends = []
    texts = input_ids.tolist()
    for row, (start, end) in enumerate(zip(prompt_lengths.tolist(), lengths.tolist(), strict=True)):
        if not 1 <= start <= end <= input_ids.shape[1]:
            raise ValueError(
                f"Row {row} has prompt length {start} and length {end}: expected 1 <= prompt length <= length <= "
                f"{input_ids.shape[1]}."
            )
        ends.append(start + len(rules.cut(texts[row][start:end], 0)))
    return torch.tensor(ends, dtype=torch.long)
