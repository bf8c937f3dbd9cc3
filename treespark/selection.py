"""Selecting the likeliest tokens and normalising only what was selected.

Shapes: V vocabulary, k tokens, T selected tokens; leading dimensions are free. No normalised V-sized tensor is made.
Source: arXiv 2610.20175 §D.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Numbers of a block of rows that is worked on at a time: on a CPU it stays in the cache, elsewhere it bounds memory.
_CACHED, _LAUNCHED = 2**20, 2**26
# Widths of the blocks whose maxima are ranked first: a sort then sees few blocks instead of the whole vocabulary.
_LARGE_BLOCK, _SMALL_BLOCK = 64, 16


def at_least_float32(values: Tensor) -> Tensor:
    """Returns float64 as it is and everything narrower as float32."""
    return values if values.dtype == torch.float64 else values.float()


def row_blocks(values: Tensor) -> Iterator[slice]:
    """Yields slices of the first dimension of values [n, ..., V], to be worked on one at a time."""
    most = _CACHED if values.device.type == "cpu" else _LAUNCHED
    size = max(1, most // max(1, values[:1].numel()))
    for start in range(0, len(values), size):
        yield slice(start, min(start + size, len(values)))


class _LogNormalizer(torch.autograd.Function):
    """logsumexp over the last dimension without V-sized tensors beyond a block of rows, forward and backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        rows = logits if logits.dim() > 1 else logits.unsqueeze(0)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        found = torch.empty(rows.shape[:-1], dtype=dtype, device=logits.device)
        for block in row_blocks(rows):
            values = rows[block]
            best = values.amax(-1, keepdim=True).to(dtype)
            found[block] = torch.sub(values, best).exp_().sum(-1).log_() + best.squeeze(-1)
        return found.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return at_least_float32(logits).softmax(-1).mul_(gradients[0].unsqueeze(-1)).to(logits.dtype)


def log_normalizer(logits: Tensor) -> Tensor:
    """Returns logsumexp of logits [..., V] in float32 at least: [...]."""
    normalizer: Tensor = _LogNormalizer.apply(logits)  # type: ignore[no-untyped-call]
    return normalizer


def selected_log_probs(logits: Tensor, tokens: Tensor, normalizer: Tensor | None = None) -> Tensor:
    """Returns log softmax(logits) [..., V] at tokens [..., T], at most 0.

    Args:
        logits: [..., V].
        tokens: [..., T].
        normalizer: [...] `log_normalizer(logits)`, if at hand.
    """
    normalizer = log_normalizer(logits) if normalizer is None else normalizer
    return (at_least_float32(logits.gather(-1, tokens)) - normalizer.unsqueeze(-1)).clamp(max=0)


def top_children(logits: Tensor, k: int, normalizer: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the k likeliest tokens of logits [..., V], best first, and their log-probabilities: [..., k] each.

    Equal logits stand in order of token id.
    """
    tokens = top_tokens(logits.detach(), k)
    return tokens, selected_log_probs(logits, tokens, normalizer)


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Returns the ids [..., k] of the k largest logits [..., V], best first; equal logits: the smaller id first.

    Nothing is read back to the host, whatever is tied: `topk` leaves the order of ties open, a stable sort does not,
    and blocks of the vocabulary keep what has to be sorted small.

    Args:
        logits: [..., V].
        k: From 1 to V.
    """
    vocab = logits.shape[-1]
    block = _LARGE_BLOCK if vocab >= _LARGE_BLOCK**2 else _SMALL_BLOCK
    if vocab < 2 * k * block:
        return logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    num_blocks = vocab // block
    end = num_blocks * block
    blocks = logits[..., :end].reshape(*logits.shape[:-1], num_blocks, block)  # a view
    # With blocks ordered by their maxima, ties by their place, the first k hold the k tokens: each of them has one that
    # comes before all tokens of the other blocks.
    chosen = top_tokens(blocks.amax(-1), k).sort(dim=-1).values
    pool = blocks.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, block)).flatten(-2)
    if end < vocab:
        pool = torch.cat([pool, logits[..., end:]], -1)
    order = pool.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # Places in the pool ascend with the ids, so that ties are in order of id; the tail stands behind the k blocks.
    ids = chosen.gather(-1, (order // block).clamp(max=k - 1)) * block + order % block
    return ids if end == vocab else torch.where(order < k * block, ids, order + (end - k * block))
