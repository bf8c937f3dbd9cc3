"""Memory that the chunks of a step use in turn, and sums of gradients that outlive them.

Large tensors that are made anew for each chunk cost more than what is computed in them: on a CPU every page of them is
a fault. Inside a workspace the chunks' large tensors are buffers that the next chunk fills again, a chunk's graph is
used once, so that a gradient may be written over the values that it comes from, and gradients of large weights are
added up in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from types import TracebackType

import torch
from torch import Tensor

_current: ContextVar[Workspace | None] = ContextVar("workspace", default=None)


class Workspace:
    """Buffers for one chunk at a time, and one sum of gradients for each weight that asks for it.

    Used as a context around the chunks; `clear` between two of them gives all buffers back, after which nothing of the
    chunk before may be read.

    Args:
        parameters: Weights whose gradients may be summed here instead of going through autograd.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._sums: dict[int, Tensor | None] = {id(parameter): None for parameter in parameters}
        self._free: list[Tensor] = []
        self._taken: list[Tensor] = []
        self._scratch: set[int] = set()

    def __enter__(self) -> Workspace:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._token)
        self.clear()
        self._free.clear()

    def clear(self) -> None:
        """Gives back the buffers of a chunk that is done."""
        self._free += self._taken
        self._taken.clear()
        self._scratch.clear()

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, scratch: bool = False) -> Tensor:
        """Returns an uninitialised tensor of the shape.

        Args:
            shape: Of the tensor.
            dtype: Of the tensor.
            device: Of the tensor.
            scratch: Whether its gradient may be written over it, once the graph's other readers are done.
        """
        size = torch.Size(shape).numel()
        fitting = [
            (buffer.numel(), place)
            for place, buffer in enumerate(self._free)
            if buffer.dtype == dtype and buffer.device == device and size <= buffer.numel()
        ]
        buffer = self._free.pop(min(fitting)[1]) if fitting else torch.empty(size, dtype=dtype, device=device)
        self._taken.append(buffer)
        if scratch:
            self._scratch.add(buffer.untyped_storage().data_ptr())
        return buffer[:size].view(*shape)

    def may_overwrite(self, values: Tensor) -> bool:
        """Whether a tensor was taken as scratch."""
        return values.untyped_storage().data_ptr() in self._scratch

    def sum_of(self, weight: Tensor) -> Tensor | None:
        """Returns the sum to which the gradient of a weight is to be added in place, or None to return it instead."""
        if id(weight) not in self._sums:
            return None
        known = self._sums[id(weight)]
        if known is None:
            known = self._sums[id(weight)] = torch.zeros_like(weight)
        return known

    def collected(self, weight: Tensor) -> Tensor | None:
        """Returns the sum of a weight's gradients, or None where none was added."""
        return self._sums.get(id(weight))


def current() -> Workspace | None:
    """Returns the workspace that is in use, or None."""
    return _current.get()


def buffer(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    workspace: Workspace | None,
    *,
    scratch: bool = False,
) -> Tensor:
    """Returns an uninitialised tensor from a workspace, or a new one where there is none; see `Workspace.take`."""
    if workspace is None:
        return torch.empty(*shape, dtype=dtype, device=device)
    return workspace.take(shape, dtype, device, scratch=scratch)
