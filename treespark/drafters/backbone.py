"""The drafter's transformer layers: Qwen3's layer, with keys and values of the context injected.

Shapes: R rows, T positions, S context positions, H hidden, D head width, G key-value heads.
Source: arXiv 2602.06036 (context injection), arXiv 2607.05147 (the DSpark backbone).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespark.drafters.attention import KeysValues, SlotMask, attend
from treespark.target.linear import FewRowsLinear

# Types whose frequencies are fixed; others change with the length of the text.
_FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32 at least; float64 stays float64."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norms x [..., size] and keeps its dtype."""
        if x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = _at_least_float32(torch.promote_types(x.dtype, self.weight.dtype))
        normed = F.rms_norm(x.to(wide), self.weight.shape, None, self.eps)
        if self.weight.dtype == x.dtype:
            return self.weight * normed.to(x.dtype)  # rounded where Qwen3's own layer rounds
        # Under autocast a float32 weight meets bfloat16 states: the weight is not rounded.
        return (self.weight.to(wide) * normed).to(x.dtype)


class Rotary:
    """Rotary position embedding for a head width of its own.

    Not a module: frequencies stay in float32 when the drafter is cast to bfloat16.

    Args:
        parameters: `rope_type`, `rope_theta` and what the type needs, as in the target's config.
        head_dim: Width D of the drafter's heads, which may differ from the target's.
        max_position_embeddings: The target's.

    Raises:
        ValueError: For a rope type whose frequencies depend on the length of the text.
    """

    def __init__(self, parameters: dict[str, Any], head_dim: int, max_position_embeddings: int) -> None:
        kind = parameters["rope_type"]
        if kind not in _FIXED_ROPE_TYPES:
            raise ValueError(
                f"rope_type '{kind}' of the target is not supported in a drafter; expected one of "
                f"{', '.join(_FIXED_ROPE_TYPES)}."
            )
        self.scaling = 1.0
        if kind == "default":
            # On the CPU also where the drafter is built without memory, on the meta device.
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
            self.inverse_frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
        else:
            from transformers import Qwen3Config
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            config = Qwen3Config(
                head_dim=head_dim, rope_parameters=dict(parameters), max_position_embeddings=max_position_embeddings
            )
            self.inverse_frequencies, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [R, 1, T, D] of positions [R, T], for hidden states of `dtype`."""
        compute = _at_least_float32(dtype)
        if self.inverse_frequencies.device != positions.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions.to(compute).unsqueeze(-1) * self.inverse_frequencies.to(compute)
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates x [R, heads, T, D] by cosines and sines [R, 1, T, D]; the result has x's dtype."""
    cos, sin = rotary
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


class DraftAttention(nn.Module):
    """Attention of slots over the context and over their own block, with q/k norm and grouped heads."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.attend = attend
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = FewRowsLinear(hidden_size, heads * head_dim, bias=False)
        self.k_proj = FewRowsLinear(hidden_size, kv_heads * head_dim, bias=False)
        self.v_proj = FewRowsLinear(hidden_size, kv_heads * head_dim, bias=False)
        self.o_proj = FewRowsLinear(heads * head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Projects x [R, T, H] to normed and rotated keys, and to values, both [R, G, T, D]."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return rotate(keys, rotary), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: KeysValues, mask: SlotMask | None) -> Tensor:
        """Attends from slots x [R, T, H] to the context [R, G, S, D] and to the slots themselves; see `attend`."""
        rows, length = x.shape[:2]
        queries = self.q_norm(self.q_proj(x).view(rows, length, self.heads, self.head_dim)).transpose(1, 2)
        queries = rotate(queries, rotary)
        keys, values = self.keys_values(x, rotary)
        past = context[0].to(keys.dtype), context[1].to(values.dtype)
        out = self.attend(queries, past, (keys, values), mask)
        out = out.transpose(1, 2).reshape(rows, length, self.heads * self.head_dim)
        projected: Tensor = self.o_proj(out)
        return projected


class DraftMLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = FewRowsLinear(hidden_size, intermediate_size, bias=False)
        self.up_proj = FewRowsLinear(hidden_size, intermediate_size, bias=False)
        self.down_proj = FewRowsLinear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., H] to [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One layer. Slots go through `input_layernorm`; the context's keys and values come ready made."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, heads: int, kv_heads: int, head_dim: int, eps: float
    ) -> None:
        super().__init__()
        self.self_attn = DraftAttention(hidden_size, heads, kv_heads, head_dim, eps)
        self.mlp = DraftMLP(hidden_size, intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: KeysValues, mask: SlotMask | None) -> Tensor:
        """Maps the slots x [R, T, H] to [R, T, H]."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, context, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
