"""The normaliser's own forward and backward against torch's logsumexp."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from treespark.selection import log_normalizer


@given(st.integers(0, 10_000), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.floats(0.1, 80.0))
def test_equals_logsumexp(seed: int, dtype: torch.dtype, scale: float) -> None:
    """Value in float32 at least, gradient softmax(logits), also where logits lie far apart or are impossible."""
    logits = (scale * torch.randn(3, 2, 17, generator=torch.Generator().manual_seed(seed))).to(dtype)
    logits[0, 0, 3] = -torch.inf
    logits.requires_grad_()
    found = log_normalizer(logits)
    expected = torch.logsumexp(logits.double(), -1)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    weights = torch.rand(3, 2)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    torch.testing.assert_close(
        gradient.double(), logits.detach().double().softmax(-1) * weights.unsqueeze(-1).double(), rtol=1e-2, atol=1e-6
    )
    if dtype == torch.float64:
        row = torch.randn(2, 5, dtype=torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(log_normalizer, (row,))
