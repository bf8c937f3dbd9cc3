"""Slots' attention in one call, in chunks of anchors and by flex_attention, against softmax written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tiny import tiny_drafter, tiny_target
from treespark.drafters import attention
from treespark.drafters.attention import SlotMask, attend, flex_runs

G, GROUPS, D = 2, 2, 6


def reference(queries: Tensor, context: Any, own: Any, seen: Tensor, size: int, causal: bool) -> Tensor:
    """Each slot alone: the visible keys are collected one by one, no mask is involved."""
    rows, heads, slots, _ = queries.shape
    out = torch.zeros_like(queries)
    for row in range(rows):
        for head in range(heads):
            group = head // GROUPS
            for slot in range(slots):
                block = slot // size
                mine = [s for s in range(block * size, (block + 1) * size) if not causal or s <= slot]
                past = seen[row, block].nonzero()[:, 0]
                keys = torch.cat([context[0][row, group, past], own[0][row, group, mine]])
                values = torch.cat([context[1][row, group, past], own[1][row, group, mine]])
                weights = (keys @ queries[row, head, slot] / D**0.5).softmax(0)
                out[row, head, slot] = weights @ values
    return out


def tensors(seed: int, rows: int, anchors: int, size: int, length: int) -> tuple[Tensor, Any, Any, Tensor]:
    """Random queries, keys and values (float64, with gradients), and a mask of documents cut at anchors; the last
    anchor of each row is padding that sees nothing.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    shapes = (rows, G, length, D), (rows, G, anchors * size, D)
    places = torch.randint(0, length + 1, (rows, anchors, 2), generator=generator).sort(-1).values
    every = torch.arange(length)
    seen = (every >= places[..., :1]) & (every < places[..., 1:])
    seen[:, -1] = False
    context, own = ((draw(*shape), draw(*shape)) for shape in shapes)
    return draw(rows, G * GROUPS, anchors * size, D), context, own, seen


@given(st.integers(0, 1_000), st.integers(1, 2), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9), st.booleans())
def test_dense_and_chunked_equal_the_reference(
    seed: int, rows: int, anchors: int, size: int, length: int, causal: bool
) -> None:
    """Values and gradients in float64 (1e-12), for any number of chunks: two anchors each, or one."""
    queries, context, own, seen = tensors(seed, rows, anchors, size, length)
    leaves = [queries, *context, *own]
    expected = reference(queries, context, own, seen, size, causal)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for kind, most in (("dense", 32), ("chunked", 2), ("chunked", 1)):
        mask = SlotMask(seen, size, causal, GROUPS, kind)
        mask.recompute = most == 2
        if kind == "chunked":
            mask.chunks = attention._chunks(seen, most)
            assert len(mask.chunks) == -(-anchors // most)
        found = attend(queries, context, own, mask)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for got, want in zip(torch.autograd.grad((found * weights).sum(), leaves), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
        with torch.no_grad():
            assert torch.equal(attend(queries, context, own, mask), found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 70, 200])
def test_flex_attention_equals_the_reference(causal: bool, length: int) -> None:
    """Its mask is the same rule (forward only: on the CPU it has no backward)."""
    queries, context, own, seen = tensors(1, 2, 5, 3, length)
    queries, context, own = queries.detach(), [x.detach() for x in context], [x.detach() for x in own]
    found = attend(queries, context, own, SlotMask(seen, 3, causal, GROUPS, "flex"))
    expected = reference(queries, context, own, seen, 3, causal)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention is used on CUDA, and none is here")
def test_flex_attention_on_cuda_with_gradients() -> None:
    """Where it runs: values and gradients equal the chunks' within float32's tensor-core rounding."""
    if not flex_runs("cuda", torch.float32, 16, 2):
        pytest.skip("flex_attention does not run on this device; see the log")
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 640, 16), (1, 2, 300, 16), (1, 2, 300, 16), (1, 2, 640, 16), (1, 2, 640, 16)
    leaves = [torch.randn(shape, generator=generator).cuda().requires_grad_() for shape in shapes]
    seen = torch.arange(300, device="cuda") < torch.randint(0, 300, (1, 160, 1), generator=generator).cuda()
    found = []
    for kind in ("flex", "chunked"):
        out = attend(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), SlotMask(seen, 4, False, 2, kind))
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-2)


def test_chunks_leave_out_what_none_of_them_sees() -> None:
    """Three anchors, two of them a chunk: they see positions 2..4 together; the last one sees nothing."""
    seen = torch.zeros(1, 3, 9, dtype=torch.bool)
    seen[0, 0, 2:4], seen[0, 1, 3:5] = True, True
    found = [(chunk.anchors, chunk.context) for chunk in attention._chunks(seen, 2)]
    assert found == [(slice(0, 2), slice(2, 5)), (slice(2, 3), slice(0, 0))]


def test_choice_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small masks in one call; large ones in chunks, or by flex_attention where that runs."""
    seen = torch.ones(1, 6, 40, dtype=torch.bool)
    assert SlotMask(seen, 2).implementation == "dense"
    many = SlotMask(torch.ones(1, 60, 40, dtype=torch.bool), 2)
    assert many.implementation == "chunked" and len(many.chunks) == 2 and not many.recompute
    monkeypatch.setattr(attention, "_MASK_ELEMENTS", 200)  # 6·2·(40 + 12) = 624; an anchor takes 2·40 = 80
    mask = SlotMask(seen, 2)
    assert mask.implementation == "chunked" and len(mask.chunks) == 3 and mask.whole is None and mask.recompute
    assert SlotMask(seen, 2, flex_runs=True).implementation == "flex"
    assert not flex_runs("cpu", torch.float32, 8, 1)


@pytest.mark.parametrize("block_attention", ["bidirectional", "causal"])
def test_drafter_in_chunks_equals_dense(block_attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and every parameter's gradient of a whole drafter, and the choice is no part of its options."""
    monkeypatch.setattr(attention, "_MOST_ANCHORS", 2)
    target = tiny_target()
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    features, positions = target.features(ids, [0, 2]).context, torch.arange(20).expand(2, -1)
    anchors = torch.tensor([[1, 4, 9, 12, 18], [0, 2, 3, 17, 19]])
    found = []
    for kind in ("dense", "chunked"):
        drafter = tiny_drafter(target, attention=kind, block_attention=block_attention)
        context = drafter.encode(features, positions)
        hidden = drafter.draft(context, ids.gather(1, anchors), anchors, positions.unsqueeze(1) < anchors.unsqueeze(2))
        parameters = [p for name, p in drafter.named_parameters() if name.startswith(("fc", "layers", "norm"))]
        found.append([hidden, *torch.autograd.grad(hidden.square().sum(), parameters)])
        assert "attention" not in drafter.config()["init_args"]
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
