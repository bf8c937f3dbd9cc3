"""Options of the DSpark drafter: defaults, checks, sharing with the target."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.tiny import tiny_drafter, tiny_target
from tests.tiny_text import tiny_tokenizer
from treespark.drafters import Drafter, DSparkDrafter
from treespark.drafters.dspark import default_layer_ids

TARGET = tiny_target(layers=6)


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),  # Qwen3-4B and -8B: the published ids
        (30, 5, [1, 8, 14, 20, 27]),  # 1 + 26 i / 4 = 1, 7.5, 14, 20.5, 27; halves round to even
        (36, 1, [18]),
        (3, 1, [1]),
        (2, 1, [0]),
        (2, 5, [0]),
        (4, 2, [1]),  # 1 + 0 twice: made distinct
        (3, 2, [0, 1]),  # 1, 1 - 1 = 0
        (6, 5, [1, 2, 3]),  # 1, 1.5, 2, 2.5, 3 -> 1, 2, 2, 2, 3
    ],
)
def test_default_layer_ids(layers: int, count: int, expected: list[int]) -> None:
    """round(1 + i (L - 4) / (m - 1)), Python's round, clipped to 0..L-2, distinct."""
    assert default_layer_ids(layers, count) == expected


def test_fewer_layers_than_asked_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    default_layer_ids(6, 5)
    assert "offers 3 tapped layers, not 5" in caplog.text


def test_explicit_layer_ids_are_kept_in_order() -> None:
    assert DSparkDrafter(TARGET.spec, target_layer_ids=[4, 0]).layer_ids == (4, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_layer_ids": [0, 5]}, "the final one is not allowed"),
        ({"target_layer_ids": [-1]}, "must be distinct decoder layers from 0 to 4"),
        ({"target_layer_ids": [1, 1]}, "must be distinct"),
        ({"target_layer_ids": []}, "must be distinct"),
        ({"num_target_layers_tapped": 0}, "num_target_layers_tapped must be at least 1"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"head_dim": 12, "head_dim_ratio": 1.5}, "not both"),
        ({"head_dim": 7}, "even number"),
        ({"num_attention_heads": 3}, "multiple of num_key_value_heads"),
        ({"markov_rank": 0}, "confidence_with_markov: true needs a Markov head"),
        ({"markov_rank": -1}, "markov_rank must be 0"),
        ({"markov_head": "vanila"}, "Unknown Markov head 'vanila'. Did you mean: vanilla?"),
        ({"block_attention": "casual"}, "Unknown block_attention 'casual'. Did you mean: causal?"),
        ({"mask_token_id": 64}, "rows 0 to 63"),
        ({"mask_token_id": 2}, "an end token"),
    ],
)
def test_contradicting_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        DSparkDrafter(TARGET.spec, **options)


def test_target_without_a_spare_token_asks_for_one() -> None:
    spec = dataclasses.replace(TARGET.spec, mask_token_id=None)
    with pytest.raises(ValueError, match="give mask_token_id"):
        DSparkDrafter(spec)
    assert DSparkDrafter(spec, mask_token_id=5).mask_token_id == 5


@pytest.mark.parametrize(("options", "width"), [({}, 8), ({"head_dim_ratio": 1.5}, 12), ({"head_dim": 6}, 6)])
def test_head_width(options: dict[str, Any], width: int) -> None:
    """The target's 8, or 8 · 1.5 = 12; projections follow, nothing else does."""
    drafter = DSparkDrafter(TARGET.spec, num_layers=1, **options)
    shapes = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    assert drafter.head_dim == width
    assert shapes["layers.0.self_attn.q_proj.weight"] == (4 * width, 32)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (2 * width, 32)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (32, 4 * width)
    assert shapes["layers.0.self_attn.q_norm.weight"] == (width,)
    assert shapes["layers.0.mlp.gate_proj.weight"] == (48, 32)


def test_width_of_the_paper() -> None:
    """128 · 1.5 = 192."""
    spec = dataclasses.replace(TARGET.spec, head_dim=128)
    assert DSparkDrafter(spec, num_layers=1, head_dim_ratio=1.5).head_dim == 192


def test_config_rebuilds_the_same_drafter() -> None:
    options: dict[str, Any] = {"markov_rank": 4, "markov_head": "rnn", "block_attention": "causal"}
    drafter = DSparkDrafter(TARGET.spec, num_layers=1, head_dim_ratio=1.5, block_size=3, **options)
    again = Drafter.get("DSparkDrafter")(TARGET.spec, **drafter.config()["init_args"])
    assert again.config() == drafter.config()
    assert {key: again.config()["init_args"][key] for key in options} == options
    again.load_trainable_state_dict(drafter.trainable_state_dict())


def test_embedding_and_head_are_the_targets_own_tensors() -> None:
    """Nothing is allocated before `bind`; afterwards the storage is shared, frozen, and not part of training state."""
    for tie in (False, True):
        target = tiny_target(tie=tie)
        drafter = tiny_drafter(target, bind=False)
        assert drafter.embed_tokens.weight.is_meta and not drafter.is_bound
        drafter.bind(target)
        assert drafter.embed_tokens.weight is target.input_embedding().weight
        assert drafter.lm_head.weight is target.output_head().weight
        assert not drafter.lm_head.weight.requires_grad and not drafter.embed_tokens.weight.requires_grad
        assert not any(key.startswith(("embed_tokens", "lm_head")) for key in drafter.trainable_state_dict())


def test_binding_to_another_target_is_refused() -> None:
    """Same sizes, other weights; other sizes: both errors name the two targets."""
    drafter = tiny_drafter(tiny_target())
    for other in (tiny_target(seed=1), tiny_target(layers=3), tiny_target(vocab=70)):
        with pytest.raises(ValueError, match="made for the target 'tiny'.*fingerprint.*not for 'tiny'"):
            drafter.bind(other)
    drafter.bind(tiny_target())


def test_binding_checks_the_mask_token_with_the_tokenizer() -> None:
    """63 is free for all that the sizes tell, but the tokenizer has an ordinary token there."""
    from tests.tiny import tiny_model
    from treespark.target import Target

    target = Target(tiny_model(), tiny_tokenizer())
    drafter = tiny_drafter(target, bind=False, mask_token_id=63)
    with pytest.raises(ValueError, match="plain text can produce"):
        drafter.bind(target)


def test_training_state_round_trip_and_errors() -> None:
    drafter, other = tiny_drafter(TARGET), tiny_drafter(TARGET, seed=1)
    state = drafter.trainable_state_dict()
    other.load_trainable_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), other.trainable_state_dict().values(), strict=True))
    for change, message in (
        ({k: v for k, v in state.items() if k != "fc.weight"}, "missing in .*: fc.weight"),
        ({**state, "extra": torch.zeros(1)}, "Unexpected tensors in .*: extra"),
        ({**state, "fc.weight": torch.zeros(2, 2)}, r"fc.weight has \[2, 2\], expected \[32, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_trainable_state_dict(change)


def test_fresh_markov_head_corrects_nothing_but_learns() -> None:
    """W2 starts at zero, so the first logits are the uncorrected ones; its gradient is not zero."""
    drafter = DSparkDrafter(TARGET.spec, num_layers=1, markov_rank=4, block_size=2).double()
    drafter.bind(TARGET)
    proposer = drafter.propose(torch.randn(3, 2, 32, dtype=torch.float64), torch.tensor([4, 5, 6]))
    logits = proposer.path_logits(torch.tensor([[4, 9], [5, 9], [6, 9]]))
    assert torch.equal(logits, proposer.base_logits)
    logits.log_softmax(-1)[..., 7].sum().backward()
    assert drafter.markov is not None and drafter.markov.markov_w2.weight.grad.abs().max() > 0
