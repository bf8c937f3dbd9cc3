"""The target's key-value cache: preallocated, rolled back and compacted in place."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class _BufferLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values in buffers that double when they are full; `length` positions are filled."""

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity, self.length = max(capacity, 1), 0
        self.key_buffer: Tensor
        self.value_buffer: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, width = key_states.shape
        self.key_buffer = key_states.new_empty(rows, heads, self.capacity, width)
        self.value_buffer = value_states.new_empty(*value_states.shape[:2], self.capacity, value_states.shape[3])
        self.device, self.is_initialized = key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.capacity:
            self._grow(max(end, 2 * self.capacity))
        self.key_buffer[:, :, start:end] = key_states
        self.value_buffer[:, :, start:end] = value_states
        self.length = end
        # Views: attention reads the filled part, nothing is copied.
        self.keys, self.values = self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]
        return self.keys, self.values

    def _grow(self, capacity: int) -> None:
        for name in ("key_buffer", "value_buffer"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)
        self.capacity = capacity

    def keep(self, start: int, sources: Tensor | None, length: int) -> None:
        if self.is_initialized and sources is not None:
            index = sources.to(self.key_buffer.device)
            self.key_buffer[:, :, start:length] = self.key_buffer.index_select(2, index)
            self.value_buffer[:, :, start:length] = self.value_buffer.index_select(2, index)
        self.length = length
        if self.is_initialized:
            self.keys, self.values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]

    def get_seq_length(self) -> int:
        return self.length


class TargetCache:
    """Keys and values of the committed text, of every layer of the target.

    Attributes:
        hf: The same storage as a `transformers` cache, as the model takes it.
    """

    def __init__(self, num_layers: int, capacity: int, rows: int = 1) -> None:
        self.rows = rows
        self._layers = [_BufferLayer(capacity) for _ in range(num_layers)]
        self.hf = Cache(layers=list(self._layers))

    @property
    def length(self) -> int:
        """Positions that are filled, the same in every row and layer."""
        return self._layers[0].length

    @property
    def capacity(self) -> int:
        """Positions that fit before the buffers double."""
        return self._layers[0].capacity

    def keep(self, start: int, kept: Tensor) -> None:
        """Keeps positions `start + kept` of what came after `start` and drops the rest, in place.

        Args:
            start: Positions before it stay as they are.
            kept: [n] long, ascending offsets from `start` (the accepted path of a packed tree: not contiguous).
                Afterwards `length` is `start + n`.

        Raises:
            ValueError: For positions that are not in the cache, or not ascending.
        """
        offsets = kept.tolist()
        last = start + offsets[-1] if offsets else start - 1
        if not 0 <= start <= self.length or last >= self.length or (offsets and offsets[0] < 0):
            raise ValueError(f"Cannot keep offsets {offsets} after position {start}: the cache has {self.length}.")
        if any(b <= a for a, b in itertools.pairwise(offsets)):
            raise ValueError(f"Kept offsets must be ascending, got {offsets}.")
        length = start + len(offsets)
        # A leading run stays where it is: only what follows a gap moves.
        run = next((i for i, offset in enumerate(offsets) if offset != i), len(offsets))
        moved = None if run == len(offsets) else torch.tensor(offsets[run:]) + start
        for layer in self._layers:
            layer.keep(start + run, moved, length)
