"""Features from memory are the target's own, whatever batch a sample comes in, and stay inside the limit."""

from __future__ import annotations

import torch

from tests.tiny import tiny_target
from treespark.target import FeatureMemory

LAYERS = (0, 2)


def batch(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns right-padded ids, mask and positions; a row's tokens depend on its length alone."""
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(length) * 7 % 60 + 3
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    return ids, mask, torch.arange(width).expand(len(lengths), -1)


def test_equal_the_targets_features_on_tokens() -> None:
    """Three rows of unequal length, computed and then remembered: both equal one batched forward, on tokens."""
    target = tiny_target()
    memory = FeatureMemory(target, LAYERS, limit=2**20)
    ids, mask, positions = batch([5, 9, 3])
    expected = target.features(ids, LAYERS, mask, positions)
    for _ in range(2):
        found = memory.features(ids, mask, positions, torch.tensor([4, 0, 2]))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[mask], other[mask], rtol=1e-5, atol=1e-6)
            assert not one[~mask].any()


def test_a_sample_is_computed_once_and_bitwise_the_same_in_any_batch() -> None:
    """The second batch holds a known sample beside a longer one: no forward for it, the same numbers."""
    target = tiny_target()
    memory = FeatureMemory(target, LAYERS, limit=2**20)
    calls: list[int] = []
    inner = target.features
    target.features = lambda ids, *rest: (calls.append(len(ids[0])), inner(ids, *rest))[1]  # type: ignore[method-assign]
    first = memory.features(*batch([5]), torch.tensor([1]))
    second = memory.features(*batch([5, 9]), torch.tensor([1, 7]))
    assert calls == [5, 9]
    assert torch.equal(first.context[0], second.context[0, :5])
    assert torch.equal(first.final[0], second.final[0, :5])


def test_limit_and_rows_that_only_pad() -> None:
    """5 tokens of (2 + 1)·32 float64 are 3,840 bytes: a limit of 4,000 keeps one such sample; -1 is never kept."""
    memory = FeatureMemory(tiny_target(), LAYERS, limit=4000)
    memory.features(*batch([5, 5]), torch.tensor([0, 1]))
    assert memory.num_bytes == 3840
    memory.features(*batch([1]), torch.tensor([-1]))
    assert memory.num_bytes == 3840
