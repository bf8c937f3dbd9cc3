"""Is one output the same as plain decoding's?"""

from __future__ import annotations

from typing import NamedTuple

from treespark.decoding.record import NEAR_TIE, DecodeResult


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
