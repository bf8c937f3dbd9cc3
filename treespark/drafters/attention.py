"""What the slots of a draft block attend to: the cached context and their own block.

Shapes: R rows, S context positions, A anchors per row, K slots per anchor, G key-value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def block_mask(context_mask: Tensor, block_size: int) -> Tensor:
    """Returns the attention mask [R, 1, A*K, S + A*K] of all slots, True = attend.

    A slot sees what its anchor may see of the context, and every slot of its own block; two blocks never see each
    other, even when they cover the same positions (arXiv 2607.05147).

    Args:
        context_mask: [R, A, S] True where anchor a may see context position s.
        block_size: K.
    """
    rows, anchors, length = context_mask.shape
    context = context_mask.unsqueeze(2).expand(rows, anchors, block_size, length)
    block = torch.arange(anchors, device=context_mask.device).repeat_interleave(block_size)
    own = (block.unsqueeze(0) == block.unsqueeze(1)).expand(rows, -1, -1)
    return torch.cat([context.reshape(rows, anchors * block_size, length), own], dim=-1).unsqueeze(1)
