"""Is one output the same as plain decoding's, or in a narrow precision as good as it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from treespark.decoding.record import NEAR_TIE, DecodeResult
from treespark.decoding.request import Request

if TYPE_CHECKING:
    from treespark.target import Target

NEAR_TIE_SPACINGS = 4
"""So many spacings of the dtype below the best logit, a token counts as tied with it in bfloat16 and float16."""


class Comparison(NamedTuple):
    """An output set against plain decoding of the same request.

    Attributes:
        identical: Whether both hold the same tokens.
        num_compared: Tokens compared: all of them, or up to and with the first difference.
        first_difference: Index of the first token that differs, or None.
        gap: Plain decoding's best minus second best logit there, or None.
        near_tie: Whether that gap is below 1e-3. A difference elsewhere is an error of the decoder.
    """

    identical: bool
    num_compared: int
    first_difference: int | None = None
    gap: float | None = None
    near_tie: bool = False


def compare_outputs(plain: DecodeResult, other: DecodeResult, *, near_tie: float = NEAR_TIE) -> Comparison:
    """Compares an output with plain decoding's up to the first difference.

    What follows a difference answers another text and is not compared. In float64 outputs are identical; in float32 a
    forward over many rows and one over a single row differ in the last bits, so a near-tie may fall either way.

    Args:
        plain: Plain decoding's result, with `gaps`.
        other: The result to judge, of the same prompt and stop rules.
        near_tie: Largest gap between the two best logits that counts as a near-tie (exclusive).

    Raises:
        ValueError: When `plain` carries no gaps, that is, does not come from plain decoding.
    """
    if plain.gaps is None:
        raise ValueError("compare_outputs needs the result of decode_plain first: this one has no gaps recorded.")
    shared = min(len(plain.tokens), len(other.tokens))
    for index in range(shared):
        if plain.tokens[index] != other.tokens[index]:
            gap = plain.gaps[index]
            return Comparison(False, index + 1, index, gap, gap < near_tie)
    if len(plain.tokens) != len(other.tokens):
        # One stopped where the other went on: never a matter of rounding.
        return Comparison(False, shared, shared)
    return Comparison(True, shared)


class Margins(NamedTuple):
    """A text set against the target's own logits before each of its tokens.

    Attributes:
        num_tokens: Tokens compared.
        num_near_ties: Tokens that are not the argmax, but within `NEAR_TIE_SPACINGS` of it.
        largest: The largest distance of a token's logit below the best one, in spacings of the dtype at the best.
        first_miss: Index of the first token further below than `NEAR_TIE_SPACINGS`, or where logits are not numbers, or
            None. One is an error of the decoder.
        miss: How far that token is below, in spacings; 0 without one.
    """

    num_tokens: int
    num_near_ties: int
    largest: float
    first_miss: int | None
    miss: float = 0.0


@torch.no_grad()
def text_margins(target: Target, prompt_ids: Sequence[int] | Tensor, tokens: Sequence[int]) -> Margins:
    """Reads a text as plain decoding would, one token a forward pass, and measures how far each is below the best.

    In bfloat16 a forward over many rows and one over a single row round differently, and after the first difference
    texts go different ways: whether a text is the target's is judged on the text itself.

    Args:
        target: The target.
        prompt_ids: Prompt tokens [P], one at least.
        tokens: The answer.

    Raises:
        ValueError: For an empty or impossible prompt.
    """
    prompt = Request(target, prompt_ids, max_new_tokens=len(tokens)).prompt
    cache = target.new_cache(prompt.shape[1] + len(tokens))
    texts = [prompt, *torch.tensor(tokens[:-1], dtype=torch.long, device=target.device).view(-1, 1, 1)]
    rows = [target(text, cache, num_logits=1).logits[0, -1] for text in texts[: len(tokens)]]
    if not rows:
        return Margins(0, 0, 0.0, None)
    logits = torch.stack(rows)  # [n, V]
    found = logits.gather(1, torch.tensor(tokens, dtype=torch.long, device=target.device).unsqueeze(1))[:, 0]
    best = logits.amax(1)
    # |best| = m * 2^e with m from 0.5 to below 1: its neighbours are eps * 2^(e - 1) away.
    spacing = torch.finfo(logits.dtype).eps * torch.exp2(torch.frexp(best.double()).exponent.double() - 1)
    below = (best.double() - found.double()) / spacing
    missed = ~(below <= NEAR_TIE_SPACINGS)  # so that NaN is a miss as well
    first = int(missed.long().argmax()) if bool(missed.any()) else None
    near = (logits.argmax(1) != torch.tensor(tokens, device=target.device)) & ~missed
    miss = 0.0 if first is None else float(below[first])
    return Margins(len(tokens), int(near.sum()), float(below.max()), first, miss)
