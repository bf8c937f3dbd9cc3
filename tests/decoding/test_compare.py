"""Comparison with plain decoding: only the first difference counts, or in bfloat16 every token's own margin."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny import tiny_drafter, tiny_model
from treespark.decoding import (
    Comparison,
    DecodeResult,
    Margins,
    compare_outputs,
    decode_batch,
    decode_plain,
    text_margins,
)
from treespark.policies import BestFirst, Budgeted, Chain, DDTree, TreePolicy
from treespark.target import Target


def result(tokens: list[int], gaps: list[float] | None = None) -> DecodeResult:
    return DecodeResult(tokens, [], "length", gaps=gaps)


def test_same_text() -> None:
    assert compare_outputs(result([4, 5], [1.0, 1.0]), result([4, 5])) == Comparison(True, 2)


def test_first_difference_at_a_near_tie() -> None:
    """Texts differ at 1 and 3: index 1 counts, where plain decoding's best two are 5e-4 apart; 2 tokens compared."""
    comparison = compare_outputs(result([4, 5, 6, 7], [1.0, 5e-4, 1.0, 1.0]), result([4, 9, 6, 8]))
    assert comparison == Comparison(False, 2, 1, 5e-4, True)


def test_difference_without_a_near_tie() -> None:
    assert not compare_outputs(result([4], [0.5]), result([5])).near_tie


def test_other_length_is_a_difference() -> None:
    """[4] against [4, 5] with equal stop rules: one of them stopped wrongly."""
    assert compare_outputs(result([4, 5], [1.0, 1e-6]), result([4])) == Comparison(False, 1, 1)


def test_gaps_are_needed() -> None:
    with pytest.raises(ValueError, match="decode_plain"):
        compare_outputs(result([4]), result([4]))


BF16 = {
    (family, implementation): Target(
        tiny_model(family, torch.bfloat16, vocab=16, initializer_range=0.5, attn_implementation=implementation),
        name="tiny",
    )
    for family in ("llama", "qwen3")
    for implementation in ("eager", "sdpa")
}


@pytest.mark.parametrize(("family", "implementation"), BF16)
@pytest.mark.parametrize("policy", [Chain(), Budgeted(3, 20), DDTree(12), BestFirst(3, 12, theta=0.02)], ids=repr)
def test_bfloat16_text_is_within_four_spacings(family: str, implementation: str, policy: TreePolicy) -> None:
    """Each token of a batch decoded in bfloat16 is as likely as the best, up to 4 spacings, before its own text."""
    target = BF16[family, implementation]
    prompts = [[1, 2, 3], [5], [9, 8, 7, 6, 5, 4], [7, 1, 0]]
    options = {"max_batch_size": 3, "max_new_tokens": 24, "end_token_ids": []}
    for prompt, found in zip(
        prompts, decode_batch(target, tiny_drafter(target), prompts, policy=policy, **options), strict=True
    ):
        margins = text_margins(target, prompt, found.tokens)
        assert margins.num_tokens == 24 and margins.first_miss is None and margins.largest <= 4


def test_margins_of_a_text_of_ones_own() -> None:
    """Plain text is the argmax everywhere; another token at place 2 is missed there, by its distance in spacings."""
    target = BF16["llama", "sdpa"]
    text = decode_plain(target, [4, 2], max_new_tokens=6, end_token_ids=[]).tokens
    assert text_margins(target, [4, 2], text) == Margins(6, 0, 0.0, None)
    logits = target.logits(target.features(torch.tensor([[4, 2, *text[:2]]]), ()).final)[0, -1].float()
    wrong = int(logits.argmin())
    margins = text_margins(target, [4, 2], [*text[:2], wrong])
    assert margins.first_miss == 2 and margins.num_near_ties == 0
    # bfloat16 keeps 8 bits: the spacing at a number from 2^e to below 2^(e+1) is 2^(e-7).
    spacing = 2.0 ** (math.floor(math.log2(float(logits.max()))) - 7)
    assert margins.largest == pytest.approx(float(logits.max() - logits.min()) / spacing, rel=0.05)
    assert text_margins(target, [4, 2], []) == Margins(0, 0, 0.0, None)


def test_near_ties_are_counted() -> None:
    """A head of equal rows ties all tokens: any text is a near-tie except where it holds token 0, the argmax."""
    target = Target(tiny_model("llama", torch.bfloat16, vocab=16), name="tied")
    target.output_head().weight.data.copy_(target.output_head().weight.data[:1].expand(16, -1).clone())
    assert text_margins(target, [3], [0, 5, 0, 7]) == Margins(4, 2, 0.0, None)
