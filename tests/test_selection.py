"""The normaliser's own forward and backward against torch's logsumexp."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from treespark.selection import log_normalizer, top_tokens


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


@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([1, 5, 64, 130, 1000, 4096, 4100, 9001]),
    k=st.integers(1, 9),
    levels=st.sampled_from([1, 2, 3, 50, 10**6]),
)
def test_top_tokens_equal_a_stable_sort(seed: int, vocab: int, k: int, levels: int) -> None:
    """Against sorting the whole row, with ties anywhere (1 level: all are equal) and impossible tokens among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (2, 3, vocab), generator=generator).float()
    logits[0, :, ::3] = -torch.inf
    k = min(k, vocab)
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(top_tokens(logits, k), expected)


def test_top_tokens_of_nan_are_tokens() -> None:
    """A row that holds NaN names tokens of the vocabulary; that their scores are NaN is for the caller to see."""
    logits = torch.full((1, 5000), torch.nan)
    found = top_tokens(logits, 4)
    assert found.shape == (1, 4) and 0 <= int(found.min()) <= int(found.max()) < 5000
