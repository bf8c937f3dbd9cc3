"""What the slots of a draft block attend to: the cached context and their own block.

Shapes: R rows, S context positions, A anchors per row, K slots per anchor, G key-value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DraftContext:
    """Keys and values of the context, of every drafter layer, already normed and rotated.

    In training it holds the plain tensors of one call. In serving, newly committed positions are appended in place:
    buffers double when they are full, so that a round copies its own positions only.

    Args:
        keys: One [R, G, S, D] tensor per layer.
        values: Likewise.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self._keys, self._values = keys, values
        self.length = keys[0].shape[2]

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [R, G, length, D] of layer `i`."""
        return self._keys[i][:, :, : self.length], self._values[i][:, :, : self.length]

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
        for held, new in ((self._keys, keys), (self._values, values)):
            for i, tensor in enumerate(new):
                old = held[i]
                if torch.is_grad_enabled() and (old.requires_grad or tensor.requires_grad):
                    # Writing in place would break the gradient.
                    held[i] = torch.cat([old[:, :, :start], tensor], dim=2)
                    continue
                if end > old.shape[2]:
                    grown = old.new_empty(*old.shape[:2], max(end, 2 * old.shape[2]), old.shape[3])
                    grown[:, :, :start] = old[:, :, :start]
                    held[i] = old = grown
                old[:, :, start:end] = tensor
        self.length = end


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
