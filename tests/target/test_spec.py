"""Identity, sizes and mask token of a target."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.tiny import tiny_model, tiny_target
from tests.tiny_text import tiny_tokenizer
from treespark.target import Target, check_mask_token, default_mask_token
from treespark.target.linear import FewRowsLinear, apply_head, speed_up_few_rows


def test_spec_takes_the_models_sizes() -> None:
    spec = tiny_target("qwen3", layers=3).spec
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.head_dim) == (64, 32, 3, 8)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.intermediate_size) == (4, 2, 48)
    assert (spec.model_type, spec.eos_token_ids, spec.bos_token_id, spec.pad_token_id) == ("qwen3", (2,), 1, 0)
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_end_tokens_come_from_the_generation_config_and_the_tokenizer() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [7, 9]
    assert Target(model).spec.eos_token_ids == (7, 9)
    assert Target(model, tiny_tokenizer()).spec.eos_token_ids == (7, 9, 2)


def test_fingerprint_is_the_models_not_its_dtypes_or_names() -> None:
    """The same weights in float32 and bfloat16, under two names: one target. Another seed or depth: another one."""
    model = tiny_model(dtype=torch.float32)
    first = Target(model, name="a").spec.fingerprint
    assert first == Target(model.to(torch.bfloat16), name="b").spec.fingerprint
    assert first != tiny_target(dtype=torch.float32, seed=1).spec.fingerprint
    assert first != tiny_target(dtype=torch.float32, layers=3).spec.fingerprint


def test_mask_token_prefers_a_free_row_then_a_special_token() -> None:
    """64 tokens and 64 rows: the special token that the chat template leaves alone (3); 70 rows: row 64."""
    tokenizer = tiny_tokenizer()
    assert Target(tiny_model(), tokenizer).spec.mask_token_id == 3
    assert Target(tiny_model(vocab=70), tokenizer).spec.mask_token_id == 64
    assert tiny_target().spec.mask_token_id == 63  # no tokenizer: the last row
    spec = dataclasses.replace(tiny_target().spec, eos_token_ids=(2, 63), pad_token_id=62)
    assert default_mask_token(None, spec) == 61
    tokenizer.chat_template += "<|mask|>"
    assert Target(tiny_model(), tokenizer).spec.mask_token_id is None


def test_token_for_unknown_text_is_no_mask_token() -> None:
    """A tokenizer writes its unknown token for text that it cannot encode (SmolLM2: <|endoftext|>)."""
    tokenizer = tiny_tokenizer()
    tokenizer.unk_token = "<|mask|>"
    target = Target(tiny_model(), tokenizer)
    assert target.spec.mask_token_id is None
    with pytest.raises(ValueError, match="unknown text"):
        check_mask_token(tokenizer, 3, target.spec)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (64, "rows 0 to 63"),
        (-1, "rows 0 to 63"),
        (2, "an end token"),
        (0, "the padding token"),
        (1, "the first token of a text"),
        (20, "which plain text can produce"),
    ],
)
def test_bad_mask_tokens_are_refused(token: int, message: str) -> None:
    target = Target(tiny_model(), tiny_tokenizer())
    with pytest.raises(ValueError, match=message):
        check_mask_token(target.tokenizer, token, target.spec)


def test_mask_token_of_the_chat_template_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model(), tokenizer)
    check_mask_token(tokenizer, 3, target.spec)
    tokenizer.chat_template += "<|mask|>"
    with pytest.raises(ValueError, match="chat template writes"):
        check_mask_token(tokenizer, 3, target.spec)


def test_target_without_tokenizer_says_so() -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        _ = tiny_target().tokenizer


@pytest.mark.parametrize("rows", [1, 5, 11, 12])
def test_head_for_few_rows_equals_the_plain_one(rows: int) -> None:
    """The weight-first product (large heads, 2 to 11 rows) only reorders the sums."""
    weight = torch.randn(40000, 128, dtype=torch.float64)
    states = torch.randn(1, rows, 128, dtype=torch.float64)
    logits = apply_head(states, weight)
    assert torch.allclose(logits, states @ weight.t(), atol=1e-12)
    assert logits.shape == (1, rows, 40000) and logits.is_contiguous()


def test_few_rows_linear_replaces_plain_layers_only() -> None:
    """A layer with a bias and a subclass stay; a replaced one gives the same values for few and for many rows."""

    class Own(torch.nn.Linear):
        pass

    plain, biased, own = torch.nn.Linear(512, 256, bias=False), torch.nn.Linear(4, 4), Own(4, 4, bias=False)
    states = [torch.randn(1, rows, 512) for rows in (1, 4, 11, 12)]
    expected = [plain(item) for item in states]
    speed_up_few_rows(torch.nn.ModuleList([plain, biased, own]))
    assert type(plain) is FewRowsLinear and type(biased) is torch.nn.Linear and type(own) is Own
    with torch.no_grad():
        for item, wanted in zip(states, expected, strict=True):
            torch.testing.assert_close(plain(item), wanted, rtol=1e-5, atol=1e-5)
