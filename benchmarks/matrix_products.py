"""The matrix products of a piece of work: recorded while it runs, counted, and done again by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """Records the matrix products of a run: what they multiply, by shape, layout and, for weights, by themselves."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = {weight.untyped_storage().data_ptr(): weight for weight in weights}
        self.calls: list[tuple[str, list[tuple[Any, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            factors = [item for item in args if isinstance(item, Tensor)][-2:]
            self.calls.append((name, [self._described(item) for item in factors]))
        return func(*args, **(kwargs or {}))

    def _described(self, item: Tensor) -> tuple[Any, ...]:
        weight = self.weights.get(item.untyped_storage().data_ptr())
        return tuple(item.shape), tuple(item.stride()), item.storage_offset(), weight, item.dtype

    def num_flops(self) -> float:
        """Floating-point operations, two for each multiplication and addition."""
        return float(sum(2 * a[0][-2] * a[0][-1] * b[0][-1] * (a[0][0] if len(a[0]) == 3 else 1)
                         for _, (a, b) in self.calls))  # fmt: skip

    def shapes(self) -> dict[str, int]:
        """How often each product occurs."""
        text = (f"{name} {list(a[0])} x {list(b[0])}" for name, (a, b) in self.calls)
        return dict(Counter(text).most_common())

    def again(self, device: str) -> Callable[[], None]:
        """Returns a function that does all the products again, into outputs that are allocated once."""
        random: dict[Any, Tensor] = {}
        outputs: dict[Any, Tensor] = {}

        def operand(description: tuple[Any, ...], place: int) -> Tensor:
            shape, stride, offset, weight, dtype = description
            if weight is not None:
                return torch.as_strided(weight.detach(), shape, stride, offset)
            size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            known = random.get((place, dtype))
            if known is None or known.numel() < size:
                random[place, dtype] = known = torch.randn(size, device=device, dtype=dtype)
            return torch.as_strided(known, shape, stride)

        def output(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            size = torch.Size(shape).numel()
            known = outputs.get(dtype)
            if known is None or known.numel() < size:
                outputs[dtype] = known = torch.zeros(size, device=device, dtype=dtype)
            return known[:size].view(shape)

        prepared = []
        for name, (a, b) in self.calls:
            left, right = operand(a, 0), operand(b, 1)
            prepared.append((name, left, right))

        @torch.no_grad()
        def run() -> None:
            for name, left, right in prepared:
                out = output((*left.shape[:-1], right.shape[-1]), left.dtype)
                if name in ("addmm", "baddbmm"):
                    (out.addmm_ if name == "addmm" else out.baddbmm_)(left, right, beta=1)
                else:
                    (torch.mm if name == "mm" else torch.bmm)(left, right, out=out)

        return run
