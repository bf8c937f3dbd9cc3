"""The backbone: what slots see, cached context, head width, rotary and norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import tiny_drafter, tiny_target
from treespark.drafters import Drafter, DSparkDrafter
from treespark.drafters.attention import block_mask
from treespark.drafters.backbone import RMSNorm, Rotary, rotate

TARGET = tiny_target()
ROWS, LENGTH = 2, 11
ANCHORS = torch.tensor([[2, 6, 7], [0, 5, 10]])


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    return ids, TARGET.features(ids, [0, 2]).context


def states(
    drafter: Drafter, ids: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor = ANCHORS
) -> torch.Tensor:
    """The training call: all anchors of all rows in one pass."""
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    context = drafter.encode(features, positions)
    visible = positions.unsqueeze(1) < anchors.unsqueeze(2)
    return drafter.draft(context, ids.gather(1, anchors), anchors, visible)


@pytest.mark.parametrize("head_dim", [2, 8, 10])
def test_features_at_or_after_the_anchor_change_nothing(head_dim: int) -> None:
    """The anchor's own hidden state is unknown in decoding, so positions >= anchor must not reach its block."""
    drafter = tiny_drafter(TARGET, head_dim=head_dim)
    ids, features = inputs()
    before = states(drafter, ids, features)
    for a in range(ANCHORS.shape[1]):
        changed = features.clone()
        for row in range(ROWS):
            changed[row, ANCHORS[row, a] :] = torch.randn_like(changed[row, ANCHORS[row, a] :])
        after = states(drafter, ids, changed)
        assert torch.equal(after[:, a], before[:, a])
        # The position before the anchor is seen (row 1's first anchor has none before it).
        changed[0, ANCHORS[0, a] - 1] += 1.0
        assert not torch.allclose(states(drafter, ids, changed)[0, a], before[0, a])


def test_blocks_never_see_each_other() -> None:
    """Anchors 6 and 7 overlap in position; another anchor token in one block leaves the other's states as they are."""
    drafter = tiny_drafter(TARGET)
    ids, features = inputs()
    together = states(drafter, ids, features)
    for a in range(ANCHORS.shape[1]):
        alone = states(drafter, ids, features, ANCHORS[:, a : a + 1])
        assert torch.allclose(together[:, a], alone[:, 0], atol=1e-12)


def test_slots_of_a_block_see_each_other_both_ways() -> None:
    """The first slot holds the anchor's token, the others the mask token; all of the block depends on the anchor."""
    drafter = tiny_drafter(TARGET)
    ids, features = inputs()
    before = states(drafter, ids, features)
    changed = ids.clone()
    changed[0, 6] = (ids[0, 6] + 1) % 60
    after = states(drafter, changed, features)
    assert not torch.allclose(after[0, 1], before[0, 1]) and torch.equal(after[0, 0], before[0, 0])
    assert (after[0, 1] - before[0, 1]).abs().amax(-1).min() > 1e-6  # every slot, also the first


def test_causal_blocks_look_back_only() -> None:
    """With `block_attention: causal` slot j depends on the slots up to j: the later ones may hold anything.

    Slot 0 is the anchor's and reaches all; the embedding of the mask token reaches every slot but slot 0.
    """
    for kind, first_is_fixed in (("causal", True), ("bidirectional", False)):
        drafter = tiny_drafter(TARGET, block_attention=kind)
        ids, features = inputs()
        before = states(drafter, ids, features)
        drafter.mask_token_id = 62
        after = states(drafter, ids, features)
        assert torch.equal(before[:, :, 0], after[:, :, 0]) == first_is_fixed
        assert (before[:, :, 1:] - after[:, :, 1:]).abs().amax(-1).min() > 1e-6


def test_causal_serving_equals_training() -> None:
    """One anchor behind a cached context, with a mask of its own inside the block (float64, 1e-12)."""
    drafter = tiny_drafter(TARGET, block_attention="causal")
    ids, features = inputs()
    expected = states(drafter, ids, features)[0, 1]
    with torch.no_grad():
        context = drafter.encode(features[:1, :6], torch.arange(6).unsqueeze(0))
        served = drafter.draft(context, ids[:1, 6:7], torch.tensor([[6]]))
    assert torch.allclose(served[0, 0], expected, atol=1e-12)


def test_all_false_context_gives_no_nan() -> None:
    """A padding anchor sees its own block only."""
    drafter = tiny_drafter(TARGET)
    _, features = inputs()
    context = drafter.encode(features, torch.arange(LENGTH).expand(ROWS, -1))
    anchors = torch.zeros(ROWS, 2, dtype=torch.long)
    hidden = drafter.draft(context, anchors, anchors, torch.zeros(ROWS, 2, LENGTH, dtype=torch.bool))
    assert torch.isfinite(hidden).all()
    hidden.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters() if p.grad is not None)


@pytest.mark.parametrize("pieces", [[6], [1, 5], [1] * 6, [2, 4]])
def test_serving_equals_training(pieces: list[int]) -> None:
    """Context appended piece by piece, one anchor, no mask = the training call with all anchors (float64, 1e-12)."""
    drafter = tiny_drafter(TARGET)
    ids, features = inputs()
    expected = states(drafter, ids, features)[0, 1]
    with torch.no_grad():
        context, start = None, 0
        for size in pieces:
            part = slice(start, start + size)
            context = drafter.encode(features[:1, part], torch.arange(LENGTH)[part].unsqueeze(0), context)
            start += size
        assert context is not None and context.length == 6
        buffers = [context.layer(i)[0].data_ptr() for i in range(2)]
        served = drafter.draft(context, ids[:1, 6:7], torch.tensor([[6]]))
        assert torch.allclose(served[0, 0], expected, atol=1e-12)
        drafter.encode(features[:1, 6:7], torch.tensor([[6]]), context)
        if len(pieces) > 2:  # 1, 2, 4, 8: the last doubling left room
            assert [context.layer(i)[0].data_ptr() for i in range(2)] == buffers
        after = drafter.draft(context, ids[:1, 7:8], torch.tensor([[7]]), torch.ones(1, 1, 7, dtype=torch.bool))
    assert torch.allclose(after[0, 0], states(drafter, ids, features)[0, 2], atol=1e-12)


def test_appending_keeps_gradients() -> None:
    """With gradients on, an appended context is concatenated, not overwritten."""
    drafter = tiny_drafter(TARGET)
    ids, features = inputs()
    context = drafter.encode(features[:1, :3], torch.arange(3).unsqueeze(0))
    context = drafter.encode(features[:1, 3:6], torch.arange(3, 6).unsqueeze(0), context)
    hidden = drafter.draft(context, ids[:1, 6:7], torch.tensor([[6]]))
    assert torch.allclose(hidden[0, 0], states(drafter, ids, features)[0, 1], atol=1e-12)
    hidden.sum().backward()
    assert drafter.fc.weight.grad is not None


def test_rows_of_an_appended_context_must_agree() -> None:
    drafter = tiny_drafter(TARGET)
    _, features = inputs()
    context = drafter.encode(features, torch.arange(LENGTH).expand(ROWS, -1))
    with pytest.raises(ValueError, match="Cannot append 1 rows to a draft context of 2 rows"):
        drafter.encode(features[:1], torch.arange(LENGTH).unsqueeze(0), context)
    with pytest.raises(ValueError, match=r"context mask of shape \[2, 1, 11\]"):
        drafter.draft(context, ANCHORS[:, :1], ANCHORS[:, :1], torch.ones(2, 1, 3, dtype=torch.bool))


def test_block_mask_by_hand() -> None:
    """2 anchors, 2 slots, 2 context positions; anchor 0 sees none of them, anchor 1 the first."""
    mask = block_mask(torch.tensor([[[False, False], [True, False]]]), 2)
    expected = [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 1, 1], [1, 0, 0, 0, 1, 1]]
    assert mask.int().tolist() == [[expected]]
    causal = block_mask(torch.tensor([[[False, False], [True, False]]]), 2, causal=True)
    expected = [[0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 1, 1]]
    assert causal.int().tolist() == [[expected]]


def test_attention_shifts_with_the_text() -> None:
    """Rotary attention knows distances only: all positions + 100 leave the states as they are."""
    drafter = tiny_drafter(TARGET)
    ids, features = inputs()
    hidden = []
    for shift in (0, 100):
        context = drafter.encode(features[:1, :6], torch.arange(6).unsqueeze(0) + shift)
        hidden.append(drafter.draft(context, ids[:1, 6:7], torch.tensor([[6 + shift]])))
    assert torch.allclose(hidden[0], hidden[1], atol=1e-6)
    moved = drafter.draft(context, ids[:1, 6:7], torch.tensor([[106 + 3]]))
    assert not torch.allclose(hidden[1], moved, atol=1e-3)


@pytest.mark.parametrize("parameters", [
    {"rope_type": "default", "rope_theta": 5000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
])  # fmt: skip
def test_rotary_equals_transformers(parameters: dict[str, Any]) -> None:
    """Cosines and sines of a Qwen3 config with the same settings and head width 12."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = Qwen3Config(head_dim=12, rope_parameters=dict(parameters), max_position_embeddings=256)
    theirs = Qwen3RotaryEmbedding(config)
    positions, x = torch.randint(0, 200, (2, 5)), torch.randn(2, 3, 5, 12)
    cos, sin = theirs(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    got = rotate(x, Rotary(parameters, 12, 256)(positions, torch.float32))
    assert torch.allclose(got, expected, atol=1e-6)


def test_rope_types_that_depend_on_the_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        Rotary({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 8, 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_computes_in_float32_at_least(dtype: torch.dtype) -> None:
    """Equal to x / sqrt(mean(x^2) + eps) · weight in float64, within the dtype's own rounding."""
    norm = RMSNorm(16, 1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = (torch.randn(3, 16) * 100).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert norm(x).dtype == dtype
    assert torch.allclose(norm(x).double(), expected, rtol=tolerance, atol=tolerance)


def test_drafter_may_have_another_dtype_than_its_target() -> None:
    """bfloat16 target, float32 drafter: features and embeddings are cast, logits come from the target's head."""
    target = tiny_target(dtype=torch.bfloat16)
    drafter = DSparkDrafter(target.spec, num_layers=1, block_size=3, markov_rank=4, num_target_layers_tapped=2)
    drafter.bind(target)
    ids = torch.randint(3, 64, (1, 6))
    context = drafter.encode(target.features(ids, drafter.layer_ids).context, torch.arange(6).unsqueeze(0))
    hidden = drafter.draft(context, ids[:, -1:], torch.tensor([[6]]))
    proposal = drafter.propose(hidden[:, 0], ids[:, -1]).expand(1, ids[:, -1:], torch.zeros(1, 1, 0), 3)
    assert hidden.dtype == torch.float32 and proposal.log_probs.dtype == torch.float32
