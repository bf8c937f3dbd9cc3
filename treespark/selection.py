"""Selecting the likeliest tokens and normalising only what was selected.

Shapes: V vocabulary, k tokens, T selected tokens; leading dimensions are free. No normalised V-sized tensor is made.
Source: arXiv 2610.20175 §D.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Width of the blocks whose maxima are ranked first: top-k then looks at few blocks instead of the whole vocabulary.
_BLOCK = 64
# Numbers of a block of rows that is worked on at a time: on a CPU it stays in the cache, elsewhere it bounds memory.
_CACHED, _LAUNCHED = 2**20, 2**26


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

    Args:
        logits: [..., V].
        k: From 1 to V.
    """
    vocab = logits.shape[-1]
    # One more than asked for tells whether the last place is tied.
    width = min(k + 1, vocab)
    values, tokens = _largest(logits, width)
    # Selected ties in order of id: ids ascending first, then a stable sort by value.
    tokens, order = tokens[..., :k].sort(dim=-1)
    ranked = values[..., :k].gather(-1, order).sort(dim=-1, descending=True, stable=True)
    tokens = tokens.gather(-1, ranked.indices)
    if width > k:
        tied = values[..., k] == values[..., k - 1]
        if bool(tied.any()):
            # Rare: which of the tied tokens came first is undefined, so those rows are sorted in full.
            tokens[tied] = logits[tied].sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return tokens


def _largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `torch.topk`; on the CPU through block maxima, which is several times faster for large vocabularies."""
    vocab = logits.shape[-1]
    blocks = vocab // _BLOCK
    if logits.device.type != "cpu" or blocks < 8 * k:
        best = logits.topk(k, dim=-1)
        return best.values, best.indices
    head = logits[..., : blocks * _BLOCK].reshape(*logits.shape[:-1], blocks, _BLOCK)
    # The k best tokens lie in the k blocks with the largest maxima (or in the tail).
    chosen = head.amax(dim=-1).topk(k, dim=-1).indices
    offsets = torch.arange(_BLOCK, device=logits.device)
    ids = (chosen.unsqueeze(-1) * _BLOCK + offsets).flatten(-2)
    if vocab > blocks * _BLOCK:
        tail = torch.arange(blocks * _BLOCK, vocab, device=logits.device)
        ids = torch.cat([ids, tail.expand(*ids.shape[:-1], -1)], dim=-1)
    best = logits.gather(-1, ids).topk(k, dim=-1)
    return best.values, ids.gather(-1, best.indices)
