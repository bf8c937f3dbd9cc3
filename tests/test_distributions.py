"""Distributions whose gradient is collected against plain autograd; with and without memory that is used again."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treespark import selection
from treespark.distributions import Distributions
from treespark.workspace import Workspace

ROWS, V = 5, 23


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows a block, so that the last block is a short one."""
    monkeypatch.setattr(selection, "_CACHED", 2 * V)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def collected(logits: Tensor, other: Tensor, index: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
    """A value that reads everything: tokens (some twice), normaliser, distance, and the logits themselves."""
    found = Distributions(logits)
    value = (found.log_probs(index, tokens) * weights[:, None]).sum() + (found.log_normalizer**2).sum()
    value = value + (found.distance(other, selection.log_normalizer(other)) * weights[:ROWS]).sum()
    return value + found.log_probs(index, tokens[:, :1]).exp().sum() + 0.1 * found.logits.square().sum()


def plain(logits: Tensor, other: Tensor, index: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    value = (log_probs[index[:, None], tokens] * weights[:, None]).sum() + (logits.logsumexp(-1) ** 2).sum()
    value = value + ((log_probs.exp() - other.softmax(-1)).abs().sum(-1) * weights[:ROWS]).sum()
    return value + log_probs[index[:, None], tokens[:, :1]].exp().sum() + 0.1 * logits.square().sum()


@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([torch.float64, torch.float32]))
def test_equals_plain_autograd(seed: int, reuse: bool, dtype: torch.dtype) -> None:
    """Value and gradient; in a workspace the gradient is written over the logits, outside they are left alone."""
    generator = torch.Generator().manual_seed(seed)
    start, other = 3 * random(seed, ROWS, V, dtype=dtype), 3 * random(seed + 1, ROWS, V, dtype=dtype)
    index, tokens = torch.randint(ROWS, (7,), generator=generator), torch.randint(V, (7, 3), generator=generator)
    weights = random(seed + 2, 7, dtype=dtype)
    expected_at = start.clone().requires_grad_()
    expected = plain(expected_at, other, index, tokens, weights)
    (wanted,) = torch.autograd.grad(expected, expected_at)
    workspace = Workspace() if reuse else None
    with workspace or contextlib.nullcontext():
        leaf = start.clone().requires_grad_()
        if workspace is None:
            value = collected(leaf, other, index, tokens, weights)
            (again,) = torch.autograd.grad(value, leaf, retain_graph=True)
        else:
            memory = workspace.take((ROWS, V), dtype, leaf.device, scratch=True)
            value = collected(_Copied.apply(leaf, memory), other, index, tokens, weights)
        (found,) = torch.autograd.grad(value, leaf)
        tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(value, expected, **tolerance)
        torch.testing.assert_close(found, wanted, **tolerance)
        if workspace is None:
            assert torch.equal(again, found)
        else:
            assert found.data_ptr() == memory.data_ptr()


class _Copied(torch.autograd.Function):
    """Copies values into given memory; its gradient passes unchanged."""

    @staticmethod
    def forward(ctx, values: Tensor, memory: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        memory.copy_(values)
        return memory.view_as(memory)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return gradient, None


def test_gradcheck() -> None:
    """Each reading by itself, float64."""
    index, tokens = torch.tensor([0, 0, 2]), torch.tensor([[1, 1], [4, 5], [7, 1]])
    logits, other = random(0, 3, 9).requires_grad_(), random(1, 3, 9)
    normalizer = selection.log_normalizer(other)
    readings = [
        lambda values: Distributions(values).log_probs(index, tokens),
        lambda values: Distributions(values).log_normalizer,
        lambda values: Distributions(values).distance(other, normalizer),
    ]
    assert all(torch.autograd.gradcheck(reading, (logits,)) for reading in readings)


def test_bfloat16_is_normalised_in_float32() -> None:
    """Logits of bfloat16: values in float32 exact to its rounding, the gradient in the logits' own dtype."""
    logits = (2 * random(3, ROWS, V)).bfloat16().requires_grad_()
    index, tokens = torch.arange(ROWS), torch.arange(ROWS)[:, None]
    found = Distributions(logits).log_probs(index, tokens)
    expected = logits.float().log_softmax(-1)[index, tokens[:, 0]]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:, 0], expected)
    left, right = (torch.autograd.grad(value.sum(), logits)[0] for value in (found, expected))
    assert left.dtype == torch.bfloat16
    torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-3)


def test_workspace_gives_the_same_memory_to_the_next_chunk() -> None:
    """What one chunk took, the next one takes again, also for less; a sum is kept for known weights alone."""
    weight = torch.zeros(4, 2)
    with Workspace([weight]) as workspace:
        first = workspace.take((6, 4), torch.float32, weight.device, scratch=True)
        second = workspace.take((6, 4), torch.float32, weight.device)
        assert first.data_ptr() != second.data_ptr()
        assert workspace.may_overwrite(first) and not workspace.may_overwrite(second)
        workspace.clear()
        third = workspace.take((5, 4), torch.float32, weight.device)
        assert third.data_ptr() in (first.data_ptr(), second.data_ptr()) and not workspace.may_overwrite(third)
        assert workspace.take((6, 4), torch.float64, weight.device).dtype == torch.float64
        assert workspace.collected(weight) is None
        total = workspace.sum_of(weight)
        assert total is not None and total is workspace.sum_of(weight) is workspace.collected(weight)
        assert workspace.sum_of(torch.zeros(4, 2)) is None
