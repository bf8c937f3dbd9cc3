"""What the slots of a draft block attend to: the cached context and their own block.

Shapes: R rows, S context positions, A anchors per row, K slots per anchor, T = A*K slots of a row, G key-value heads,
g query heads per key-value head, D head width.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_log = logging.getLogger(__name__)
ATTENTION = ("auto", "dense", "chunked", "flex")
# Elements of the mask of one call of the attention kernel; above, chunks are also recomputed in the backward pass.
_MASK_ELEMENTS = 2**22
# Slots pass over each other's keys in vain, and over context that others alone see: more anchors than these are cut.
_MOST_ANCHORS = 32

KeysValues = tuple[Tensor, Tensor]


class DraftContext:
    """Keys and values of the context, of every drafter layer, already normed and rotated.

    In training it holds the plain tensors of one call. In serving, newly committed positions are appended in place:
    buffers double when they are full, so that a round copies its own positions only. `spread` makes room for several
    texts side by side, each with a length of its own.

    Args:
        keys: One [R, G, S, D] tensor per layer.
        values: Likewise.

    Attributes:
        rows: Rows that attention reads.
        length: Positions that attention reads, the same in every row; a mask hides what a row does not fill.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self._keys, self._values = keys, values
        self.rows, self.length = keys[0].shape[0], keys[0].shape[2]

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [R, G, length, D] of layer `i`."""
        return self._keys[i][: self.rows, :, : self.length], self._values[i][: self.rows, :, : self.length]

    def append(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Appends n positions to every layer: `keys` and `values` hold one [R, G, n, D] tensor per layer.

        Raises:
            ValueError: When the number of rows differs from the context's.
        """
        if keys[0].shape[0] != self._keys[0].shape[0]:
            raise ValueError(
                f"Cannot append {keys[0].shape[0]} rows to a draft context of {self._keys[0].shape[0]} rows."
            )
        start, end = self.length, self.length + keys[0].shape[2]
        for i in range(len(keys)):
            for held, new in ((self._keys, keys[i]), (self._values, values[i])):
                old = held[i]
                if torch.is_grad_enabled() and (old.requires_grad or new.requires_grad):
                    # Writing in place would break the gradient.
                    held[i] = torch.cat([old[:, :, :start], new], dim=2)
                    continue
                self._reserve(i, end)
                held[i][:, :, start:end] = new
        self.length = end

    def spread(self, rows: int) -> DraftContext:
        """Returns a context with room for `rows` texts, this one's single text in row 0."""
        room = [[t.new_zeros(rows, t.shape[1], 2 * t.shape[2], t.shape[3]) for t in ts] for ts in self._tensors()]
        spread = DraftContext(room[0], room[1])
        spread.put(0, self)
        spread.select(1, self.length)
        return spread

    def select(self, rows: int, length: int) -> None:
        """Lets attention read the first `length` positions of the first `rows` rows."""
        self.rows, self.length = rows, length

    def put(self, row: int, other: DraftContext) -> None:
        """Writes the single text of another context to a row, over what it held."""
        for i, parts in enumerate(zip(*other._tensors(), strict=True)):
            self._reserve(i, other.length)
            for held, new in zip(self._tensors(), parts, strict=True):
                held[i][row, :, : other.length] = new[0, :, : other.length]
                held[i][row, :, other.length :] = 0

    def write(self, rows: Tensor, places: Tensor, end: int, other: DraftContext) -> None:
        """Writes position i of another context's single text to `places[i]` < `end` of row `rows[i]`: [n] each."""
        for i, parts in enumerate(zip(*other._tensors(), strict=True)):
            self._reserve(i, end)
            for held, new in zip(self._tensors(), parts, strict=True):
                held[i][rows, :, places] = new[0].transpose(0, 1)

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` positions of one row to another row."""
        for tensors in self._tensors():
            for tensor in tensors:
                tensor[destination, :, :length] = tensor[source, :, :length]

    def _tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        return self._keys, self._values

    def _reserve(self, i: int, end: int) -> None:
        """Makes room for `end` positions in layer `i`."""
        for held in self._tensors():
            old = held[i]
            if end > old.shape[2]:
                # Zeros, since a place that no text has reached yet may be read behind a mask.
                grown = old.new_zeros(*old.shape[:2], max(end, 2 * old.shape[2]), old.shape[3])
                grown[:, :, : old.shape[2]] = old
                held[i] = grown


@dataclass(frozen=True)
class Chunk:
    """Some anchors, and the range of context positions that holds all that they see."""

    anchors: slice
    context: slice


class SlotMask:
    """Which keys each slot attends to: what its anchor sees of the context, and its own block.

    The [T, S + T] mask of all slots is made whole only for few anchors. Otherwise chunks of anchors attend to the
    context positions that some of them see, and where the whole is large (512 anchors of a long sequence) they are
    computed again in the backward pass; so memory is bounded by a chunk. On CUDA, `flex_attention` takes their place
    where it runs.

    Args:
        context_mask: [R, A, S] True where anchor a may see context position s.
        block_size: K.
        causal: Whether a slot is blind for the slots of its block that come after it.
        groups: g, query heads per key-value head.
        implementation: One of `ATTENTION`; "auto" chooses by size and device.
        flex_runs: Whether "auto" may choose `flex_attention`.
    """

    def __init__(
        self,
        context_mask: Tensor,
        block_size: int,
        causal: bool = False,
        groups: int = 1,
        implementation: str = "auto",
        flex_runs: bool = False,
    ) -> None:
        self.context, self.block_size, self.causal, self.groups = context_mask, block_size, causal, groups
        rows, anchors, length = context_mask.shape
        slots = anchors * block_size
        small = rows * groups * slots * (length + slots) <= _MASK_ELEMENTS
        if implementation == "auto":
            one = anchors == 1 or (small and anchors <= _MOST_ANCHORS)  # one is a chunk already
            implementation = "dense" if one else "flex" if flex_runs else "chunked"
        self.recompute = not small
        self.implementation = implementation
        self.flex = _flex_mask(self) if implementation == "flex" else None
        self.chunks = [Chunk(slice(0, anchors), slice(0, length))]
        if implementation == "chunked":
            size = _MASK_ELEMENTS // max(1, rows * groups * block_size * length)
            self.chunks = _chunks(context_mask, min(max(size, 1), _MOST_ANCHORS))
        self.whole = self.part(self.chunks[0]) if implementation == "dense" else None

    def part(self, chunk: Chunk) -> Tensor:
        """Returns the mask [R, 1, g*t, s + t] of a chunk of t slots and s context positions, once for each group."""
        mask = block_mask(self.context[:, chunk.anchors, chunk.context], self.block_size, self.causal)
        return mask.repeat(1, 1, self.groups, 1) if self.groups > 1 else mask


def _chunks(context_mask: Tensor, size: int) -> list[Chunk]:
    """Cuts the anchors into chunks of `size`, each with the range of positions that it sees."""
    anchors, length = context_mask.shape[1:]
    seen = [part.any(0) for part in torch.split(context_mask.any(0), size)]
    # Positions after the last one seen by a chunk, and before the first: one transfer for all of them.
    every = torch.arange(length, device=context_mask.device)
    columns = torch.stack(seen) if seen else context_mask.new_zeros(0, length)
    ends = torch.where(columns, every + 1, 0).amax(1) if length else columns.new_zeros(len(columns), dtype=torch.long)
    starts = torch.where(columns, every, length).amin(1) if length else ends
    ranges = torch.stack([torch.minimum(starts, ends), ends], 1).tolist()
    return [
        Chunk(slice(i * size, min((i + 1) * size, anchors)), slice(start, end)) for i, (start, end) in enumerate(ranges)
    ]


def attend(queries: Tensor, context: KeysValues, own: KeysValues, mask: SlotMask | None) -> Tensor:
    """Attends from slots to the context and to their own blocks.

    Args:
        queries: [R, G*g, T, D].
        context: Keys and values [R, G, S, D].
        own: The slots' keys and values [R, G, T, D].
        mask: What they see; None: everything, for one anchor per row.

    Returns:
        [R, G*g, T, D].
    """
    if mask is None:
        return _attend(queries, context, own, None)
    if mask.flex is not None:
        keys, values = (torch.cat(pair, 2) for pair in zip(context, own, strict=True))
        call = _flex_attention(queries.device.type)
        out: Tensor = call(queries, keys, values, block_mask=mask.flex, enable_gqa=True)
        return out
    if mask.whole is not None:
        return _attend(queries, context, own, mask.whole)
    tensors = (queries, *context, *own)
    recompute = mask.recompute and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    parts = []
    for chunk in mask.chunks:
        if recompute:
            # The chunk's copy of the keys and its mask are not kept for the backward pass.
            part = checkpoint(_attend_chunk, *tensors, mask, chunk, use_reentrant=False, preserve_rng_state=False)
        else:
            part = _attend_chunk(*tensors, mask, chunk)
        parts.append(part)
    return torch.cat(parts, 2)


def _attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, mask: SlotMask, chunk: Chunk
) -> Tensor:
    slots = slice(chunk.anchors.start * mask.block_size, chunk.anchors.stop * mask.block_size)
    context = keys[:, :, chunk.context], values[:, :, chunk.context]
    own = own_keys[:, :, slots], own_values[:, :, slots]
    return _attend(queries[:, :, slots], context, own, mask.part(chunk))


def _attend(queries: Tensor, context: KeysValues, own: KeysValues, mask: Tensor | None) -> Tensor:
    """The queries of a group of heads are just more queries of its key-value head: no key has to be repeated."""
    keys, values = (torch.cat(pair, 2) for pair in zip(context, own, strict=True))
    grouped = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[-1])
    out: Tensor = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.reshape(queries.shape)


def _flex_mask(mask: SlotMask) -> Any:
    """Returns the same rule as a sparse mask of `flex_attention`; tiles of 128 x 128 that see nothing are skipped."""
    from torch.nn.attention.flex_attention import create_block_mask

    seen, size, causal = mask.context, mask.block_size, mask.causal
    rows, anchors, length = seen.shape

    def visible(row: Tensor, head: Tensor, slot: Tensor, key: Tensor) -> Tensor:
        own = key - length
        block = slot // size
        same = (own // size == block) & (own <= slot) if causal else own // size == block
        return torch.where(key < length, seen[row, block, key.clamp(max=max(length - 1, 0))], same)

    slots = anchors * size
    compiled = seen.is_cuda  # else the whole mask is made on the way
    return create_block_mask(visible, rows, None, slots, length + slots, device=str(seen.device), _compile=compiled)


@functools.cache
def _flex_attention(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


@functools.cache
def flex_runs(device_type: str, dtype: torch.dtype, head_dim: int, groups: int) -> bool:
    """Returns whether `flex_attention` runs here, forward and backward: tried once, on CUDA only."""
    if device_type != "cuda":
        return False
    try:
        context = torch.ones(1, 32, 96, dtype=torch.bool, device=device_type)
        mask = SlotMask(context, 4, groups=groups, implementation="flex")
        shapes = [(1, groups, 128), (1, 1, 96), (1, 1, 128)]
        queries, past, own = (
            torch.randn(*shape, head_dim, dtype=dtype, device=device_type, requires_grad=True) for shape in shapes
        )
        attend(queries, (past, past), (own, own), mask).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the compiler or the kernel raises
        _log.warning("flex_attention does not run here, anchors are taken in chunks instead: %s", error)
        return False
    return True


def block_mask(context_mask: Tensor, block_size: int, causal: bool = False) -> Tensor:
    """Returns the attention mask [R, 1, A*K, S + A*K] of all slots, True = attend.

    A slot sees what its anchor may see of the context, and the slots of its own block (`causal`: up to itself); two
    blocks never see each other, even when they cover the same positions (arXiv 2607.05147).

    Args:
        context_mask: [R, A, S] True where anchor a may see context position s.
        block_size: K.
        causal: Whether a slot is blind for the slots of its block that come after it.
    """
    rows, anchors, length = context_mask.shape
    context = context_mask.unsqueeze(2).expand(rows, anchors, block_size, length)
    block = torch.arange(anchors, device=context_mask.device).repeat_interleave(block_size)
    own = block.unsqueeze(0) == block.unsqueeze(1)
    if causal:
        own = own.tril()
    own = own.expand(rows, -1, -1)
    return torch.cat([context.reshape(rows, anchors * block_size, length), own], dim=-1).unsqueeze(1)
