"""Decoding with the target's cache: pieces, trees, compaction, growth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tiny_model, tiny_target
from treespark.target import Target
from treespark.target.cache import TargetCache

TARGETS = {family: tiny_target(family, layers=2) for family in ("llama", "qwen3")}


def full(target: Target, ids: torch.Tensor) -> torch.Tensor:
    return target.logits(target.features(ids, []).final)


@given(st.sampled_from(sorted(TARGETS)), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4))
def test_pieces_equal_one_pass(family: str, pieces: list[int], capacity: int) -> None:
    """Text fed in pieces of any sizes gives the logits and taps of one pass; the buffers double on the way."""
    target = TARGETS[family]
    ids = torch.randint(3, 64, (2, sum(pieces)), generator=torch.Generator().manual_seed(sum(pieces)))
    cache = target.new_cache(capacity, rows=2)
    outputs = [target(piece, cache, [0]) for piece in ids.split(pieces, dim=1)]
    assert torch.allclose(torch.cat([o.logits for o in outputs], 1), full(target, ids), atol=1e-6)
    taps = torch.cat([o.features.context for o in outputs], 1)
    assert torch.allclose(taps, target.features(ids, [0]).context, atol=1e-6)
    assert cache.length == sum(pieces) <= cache.capacity


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_tree_paths_equal_plain_decoding_and_compaction_keeps_one(implementation: str) -> None:
    """A tree of 6 nodes in one pass: each node's logits equal those of its path alone; then path 0-3-5 is kept.

    Siblings share a position (prefix + depth), and a sibling between two kept nodes must leave no trace.
    """
    target = Target(tiny_model(layers=2, attn_implementation=implementation))
    prefix = torch.tensor([[5, 9, 11, 7]])
    tokens, parents = [20, 21, 22, 23, 24, 25], [0, 0, 0, 0, 1, 3]
    paths = []
    for i in range(6):
        path = [i]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    cache = target.new_cache(4)
    target(prefix, cache)
    mask = torch.ones(1, 6, 10, dtype=torch.bool)
    mask[:, :, 4:] = torch.tensor([[j in paths[i] for j in range(6)] for i in range(6)])
    positions = torch.tensor([[4 + len(path) - 1 for path in paths]])
    logits = target(torch.tensor([tokens]), cache, (), positions, mask).logits
    for i, path in enumerate(paths):
        text = torch.cat([prefix, torch.tensor([[tokens[j] for j in path]])], 1)
        assert torch.allclose(logits[:, i], full(target, text)[:, -1], atol=1e-6)
    cache.keep(4, [0, 3, 5])
    assert cache.length == 7
    after = target(torch.tensor([[30]]), cache).logits[:, -1]
    text = torch.cat([prefix, torch.tensor([[20, 23, 25, 30]])], 1)
    assert torch.allclose(after, full(target, text)[:, -1], atol=1e-6)


@given(st.integers(0, 5), st.sets(st.integers(0, 6)))
def test_keep_equals_gather(start: int, kept: set[int]) -> None:
    """`keep(start, kept)` = rows [0, start) and start + kept of the buffers, for every subset and start."""
    cache = TargetCache(1, 4)
    keys = torch.randn(1, 2, 12, 3)
    cache.hf.update(keys, -keys, 0)
    offsets = torch.tensor(sorted(kept), dtype=torch.long)
    cache.keep(start, sorted(kept))
    expected = torch.cat([keys[:, :, :start], keys[:, :, start + offsets]], 2)
    layer = cache.hf.layers[0]
    assert torch.equal(layer.keys, expected) and torch.equal(layer.values, -expected)
    assert cache.length == cache.hf.get_seq_length() == start + len(kept)


@pytest.mark.parametrize("kept", [[0, 5], [-1], [2, 1], [1, 1]])
def test_impossible_compaction_is_refused(kept: list[int]) -> None:
    target = TARGETS["llama"]
    cache = target.new_cache(8)
    target(torch.tensor([[5, 6, 7, 8]]), cache)
    with pytest.raises(ValueError, match=r"Cannot keep|ascending"):
        cache.keep(1, kept)


def test_mask_of_another_shape_is_refused() -> None:
    """A mask for the new positions alone (without the cached ones) would be silently wrong."""
    target = TARGETS["llama"]
    cache = target.new_cache(8)
    target(torch.tensor([[5, 6]]), cache)
    for mask in (torch.ones(1, 2, 2, dtype=torch.bool), torch.ones(1, 2, 4)):
        with pytest.raises(ValueError, match=r"Expected a bool mask of shape \[1, 2, 4\]"):
            target(torch.tensor([[7, 8]]), cache, (), None, mask)


def test_last_logits_only() -> None:
    target = TARGETS["qwen3"]
    ids = torch.tensor([[5, 6, 7, 8]])
    output = target(ids, target.new_cache(8), num_logits=1)
    assert output.logits.shape == (1, 1, 64) and output.features.final.shape == (1, 4, 32)
    assert torch.allclose(output.logits[:, 0], full(target, ids)[:, -1], atol=1e-12)


def test_rows_of_different_lengths_share_a_cache() -> None:
    """Two texts of 3 and 5 tokens; a forward of 2 tokens each appends behind the longer, and row 0's move to its end.

    Row 1 is then copied over row 0, and a cleared row holds zeros.
    """
    target = TARGETS["qwen3"]
    texts = [torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[10, 11, 12, 13, 14, 15, 16]])]
    cache = target.new_cache(4, rows=2)
    for row, (text, length) in enumerate(zip(texts, (3, 5), strict=True)):
        cache.select(row, row + 1, 0)
        target(text[:, :length], cache)
    cache.select(0, 2, 5)
    seen = torch.tensor([[True] * 3 + [False] * 2, [True] * 5]).unsqueeze(1).expand(-1, 2, -1)
    mask = torch.cat([seen, torch.ones(2, 2, dtype=torch.bool).tril().expand(2, -1, -1)], 2)
    new = torch.cat([texts[0][:, 3:], texts[1][:, 5:]])
    logits = target(new, cache, (), torch.tensor([[3, 4], [5, 6]]), mask).logits
    for row, text in enumerate(texts):
        assert torch.allclose(logits[row], full(target, text)[0, -2:], atol=1e-12)
    cache.move(torch.tensor([0, 0]), torch.tensor([5, 6]), torch.tensor([3, 4]))
    fresh = target.new_cache(8)
    target(texts[0], fresh)
    cache.select(0, 1, 5)
    for layer, other in zip(cache.hf.layers, fresh.hf.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)
    cache.copy_row(1, 0, 7)
    cache.clear(1, 2)
    for layer in cache.hf.layers:
        assert layer.key_buffer[1, :, 2:].abs().sum() == 0 != layer.key_buffer[1, :, :2].abs().sum()
    cache.select(0, 1, 7)
    found = target(torch.tensor([[17]]), cache).logits[0, -1]
    assert torch.allclose(found, full(target, torch.cat([texts[1], torch.tensor([[17]])], 1))[0, -1], atol=1e-12)


def test_rows_without_room_are_refused() -> None:
    """A forward of as many rows as are selected, among those that there is room for."""
    target = TARGETS["llama"]
    cache = target.new_cache(8, rows=2)
    with pytest.raises(ValueError, match="Got 1 rows of token ids for a cache of 2 rows"):
        target(torch.tensor([[5]]), cache)
    for first, last, length in ((1, 3, 0), (1, 1, 0), (0, 1, 9)):
        with pytest.raises(ValueError, match="room for 2 rows of 8 positions"):
            cache.select(first, last, length)
