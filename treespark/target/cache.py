"""The target's key-value cache: preallocated, rolled back and compacted in place.

Rows may hold texts of different lengths. A forward appends to all rows at one place, behind the longest text; what is
kept of it moves to the end of each row's own text. What lies between is for the attention mask to hide.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from treespark.target.transfer import send


class _BufferLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values in buffers that double when they are full.

    `length` positions are filled, in the rows from `first` to before `last`.
    """

    def __init__(self, capacity: int, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity, self.length = max(capacity, 1), 0
        self.rows, self.first, self.last = rows, 0, rows
        self.key_buffer: Tensor
        self.value_buffer: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros: a place that no text has reached yet may be read behind a mask, and NaN would pass through that.
        self.key_buffer = self._zeros(key_states)
        self.value_buffer = self._zeros(value_states)
        self.device, self.is_initialized = key_states.device, True

    def _zeros(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.rows, states.shape[1], self.capacity, states.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.capacity:
            self._grow(max(end, 2 * self.capacity))
        self.key_buffer[self.first : self.last, :, start:end] = key_states
        self.value_buffer[self.first : self.last, :, start:end] = value_states
        self.select(self.first, self.last, end)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _grow(self, capacity: int) -> None:
        former, self.capacity = self.capacity, capacity
        for name in ("key_buffer", "value_buffer"):
            old: Tensor = getattr(self, name)
            new = self._zeros(old)
            new[:, :, :former] = old
            setattr(self, name, new)

    def select(self, first: int, last: int, length: int) -> None:
        self.first, self.last, self.length = first, last, length
        if self.is_initialized:
            # Views: attention reads the filled part, nothing is copied.
            self.keys = self.key_buffer[first:last, :, :length]
            self.values = self.value_buffer[first:last, :, :length]

    def keep(self, start: int, sources: Tensor | None, length: int) -> None:
        if self.is_initialized and sources is not None:
            index = sources.to(self.key_buffer.device)  # layers may sit on several devices
            for buffer in (self.key_buffer[self.first : self.last], self.value_buffer[self.first : self.last]):
                buffer[:, :, start:length] = buffer.index_select(2, index)
        self.select(self.first, self.last, length)

    def get_seq_length(self) -> int:
        return self.length


class TargetCache:
    """Keys and values of the committed text, of every layer of the target.

    Args:
        num_layers: Layers of the target.
        capacity: Positions to make room for.
        rows: Rows to make room for.

    Attributes:
        rows: Rows that there is room for.
        hf: The same storage as a `transformers` cache, as the model takes it.
    """

    def __init__(self, num_layers: int, capacity: int, rows: int = 1) -> None:
        self.rows = rows
        self._layers = [_BufferLayer(capacity, rows) for _ in range(num_layers)]
        self.hf = Cache(layers=list(self._layers))

    @property
    def length(self) -> int:
        """Positions that the next forward appends to: the longest selected text, or more."""
        return self._layers[0].length

    @property
    def capacity(self) -> int:
        """Positions that fit before the buffers double."""
        return self._layers[0].capacity

    @property
    def num_selected(self) -> int:
        """Rows that the next forward computes."""
        return self._layers[0].last - self._layers[0].first

    def select(self, first: int, last: int, length: int) -> None:
        """Chooses the rows from `first` to before `last`, and appends after `length` positions from now on.

        Raises:
            ValueError: For rows or positions that there is no room for.
        """
        if not 0 <= first < last <= self.rows or not 0 <= length <= self.capacity:
            raise ValueError(
                f"Cannot select rows {first} to {last} at length {length}: there is room for {self.rows} rows of "
                f"{self.capacity} positions."
            )
        for layer in self._layers:
            layer.select(first, last, length)

    def move(self, rows: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Copies position `sources[i]` of row `rows[i]` to position `destinations[i]`, all at once: [n] each."""
        for layer in self._layers:
            for buffer in (layer.key_buffer, layer.value_buffer):
                buffer[rows, :, destinations] = buffer[rows, :, sources]

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` positions of one row to another row."""
        for layer in self._layers:
            for buffer in (layer.key_buffer, layer.value_buffer):
                buffer[destination, :, :length] = buffer[source, :, :length]

    def clear(self, row: int, start: int) -> None:
        """Writes zeros to a row from `start` on, over what a former text may have left there."""
        for layer in self._layers:
            for buffer in (layer.key_buffer, layer.value_buffer):
                buffer[row, :, start:] = 0

    def keep(self, start: int, kept: Sequence[int]) -> None:
        """Keeps positions `start + kept` of what came after `start` and drops the rest, in place, in all selected rows.

        Args:
            start: Positions before it stay as they are.
            kept: n ascending offsets from `start` (the accepted path of a packed tree: not contiguous).
                Afterwards `length` is `start + n`.

        Raises:
            ValueError: For positions that are not in the cache, or not ascending.
        """
        offsets = list(kept)
        last = start + offsets[-1] if offsets else start - 1
        if not 0 <= start <= self.length or last >= self.length or (offsets and offsets[0] < 0):
            raise ValueError(f"Cannot keep offsets {offsets} after position {start}: the cache has {self.length}.")
        if any(b <= a for a, b in itertools.pairwise(offsets)):
            raise ValueError(f"Kept offsets must be ascending, got {offsets}.")
        length = start + len(offsets)
        # A leading run stays where it is: only what follows a gap moves.
        run = next((i for i, offset in enumerate(offsets) if offset != i), len(offsets))
        moved = None
        if run < len(offsets) and self._layers[0].is_initialized:
            moved = send([start + offset for offset in offsets[run:]], self._layers[0].key_buffer.device)
        for layer in self._layers:
            layer.keep(start + run, moved, length)
