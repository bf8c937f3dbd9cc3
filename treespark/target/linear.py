"""Linear layers, applied fast where only a few positions go through a large weight on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treespark.workspace import buffer, current

# Below so many rows a large weight is bound by being read, and BLAS reads it faster when it is the left factor
# (measured on 2 x86 cores, SmolLM2-135M over 4 positions 99 -> 54 ms, 6: 119 -> 74, 8: 104 -> 80, 9: 114 -> 98,
# 11: 163 -> 124; from 13 on no gain).
_FEW_ROWS = 12
_LARGE_WEIGHT = 2**16
# A head over a vocabulary is a left factor too, a block of tokens at a time, while BLAS would spend more on packing it
# than on multiplying (float32, 151,936 x 1,024: 16 rows 147 -> 73 ms, 56 rows 312 -> 208 ms, 224 rows 697 -> 605 ms;
# no gain at 49,152 x 576).
_MANY_TOKENS, _WIDE, _SOME_ROWS, _TOKENS = 2**15, 1024, 256, 4096


def apply_head(states: Tensor, weight: Tensor) -> Tensor:
    """Returns states [..., H] times a weight [V, H]: [..., V]."""
    rows = states.numel() // max(states.shape[-1], 1)
    fast = 1 < rows < _FEW_ROWS and weight.numel() >= _LARGE_WEIGHT and weight.device.type == "cpu"
    if fast and not (torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)):
        product = (weight @ states.reshape(rows, -1).t()).t().contiguous()
        return product.view(*states.shape[:-1], len(weight))
    if rows and _is_frozen_head(states, weight):
        logits: Tensor = _FrozenHead.apply(states, weight)  # type: ignore[no-untyped-call]
        return logits
    return F.linear(states, weight)


def _is_frozen_head(states: Tensor, weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == states.dtype in (torch.float32, torch.float64)
    return plain and len(weight) >= _MANY_TOKENS and not (weight.requires_grad or torch.is_autocast_enabled("cpu"))


class _FrozenHead(torch.autograd.Function):
    """Logits of a head without a gradient of its own, in the workspace's memory if there is one."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        flat = states.reshape(-1, states.shape[-1])
        logits = buffer((len(flat), len(weight)), weight.dtype, weight.device, current())
        if flat.shape[1] >= _WIDE and len(flat) < _SOME_ROWS:
            for start in range(0, len(weight), _TOKENS):
                logits[:, start : start + _TOKENS] = (weight[start : start + _TOKENS] @ flat.t()).t()
        else:
            torch.mm(flat, weight.t(), out=logits)
        return logits.view(*states.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None


class FewRowsLinear(nn.Linear):
    """A linear layer without bias that takes the fast way for a few positions."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns `input` [..., in] times the weight: [..., out]."""
        return apply_head(input, self.weight)


def speed_up_few_rows(model: nn.Module) -> None:
    """Lets the plain linear layers without bias of a model take the fast way, in place."""
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is None:
            module.__class__ = FewRowsLinear
