"""The DSpark drafter (arXiv 2607.05147); with rank 0 and no confidence head it is DFlash (arXiv 2602.06036).

Shapes: R rows, S context positions, A anchors per row, M anchors or requests, K depths, H hidden, m tapped layers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treespark.drafters.attention import ATTENTION, DraftContext, SlotMask, flex_runs
from treespark.drafters.backbone import DraftLayer, RMSNorm, Rotary
from treespark.drafters.base import Drafter
from treespark.drafters.confidence import ConfidenceHead
from treespark.drafters.markov import build_markov_head
from treespark.drafters.proposer import DraftProposer
from treespark.drafters.reduced import ReducedProposer
from treespark.registry import unknown
from treespark.target.linear import FewRowsLinear
from treespark.target.spec import TargetSpec

if TYPE_CHECKING:
    from treespark.target import Target

_log = logging.getLogger(__name__)
_INIT_STD = 0.02
_INIT_NORM = 0.25
BLOCK_ATTENTION = ("bidirectional", "causal")


def default_layer_ids(num_layers: int, count: int) -> list[int]:
    """Returns the decoder layers of a target that are tapped by default: evenly spaced, the last ones left out.

    They are round(1 + i (L - 4) / (m - 1)), clipped to 0..L-2 and made distinct ([1, 9, 17, 25, 33] for L = 36, m = 5).

    Raises:
        ValueError: For a target of fewer than 2 layers, or a count below 1.
    """
    if num_layers < 2:
        raise ValueError(f"A target needs at least 2 layers, since the final one is not tapped; got {num_layers}.")
    if count < 1:
        raise ValueError(f"num_target_layers_tapped must be at least 1, got {count}.")
    if num_layers == 2:
        ids = [0]
    elif count == 1:
        ids = [min(num_layers // 2, num_layers - 2)]
    else:
        spaced = (round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
        ids = sorted({min(max(i, 0), num_layers - 2) for i in spaced})
    if len(ids) < count:
        _log.warning("A target of %d layers offers %d tapped layers, not %d: %s", num_layers, len(ids), count, ids)
    return ids


def _check_layer_ids(ids: list[int], num_layers: int) -> None:
    if not ids or len(set(ids)) != len(ids) or not all(0 <= i <= num_layers - 2 for i in ids):
        raise ValueError(
            f"target_layer_ids {ids} must be distinct decoder layers from 0 to {num_layers - 2}: the target has "
            f"{num_layers}, and the final one is not allowed."
        )


class DSparkDrafter(Drafter):
    """A block of K slots behind each anchor, a Markov correction by the parent token, and a confidence head.

    The defaults are the paper's (arXiv 2610.20175 §3.4, D.1).

    Args:
        target: The target that is drafted for; its sizes are the drafter's unless said otherwise.
        num_layers: Drafter layers.
        block_size: K, drafted depths, anchor excluded.
        head_dim: Width of an attention head; None takes the target's times `head_dim_ratio`.
        head_dim_ratio: 1.5 is TreeSpark's widening (128 -> 192); rounded to an even width.
        markov_rank: r; 0 for no Markov head.
        markov_head: Kind of Markov head: "vanilla" (by the parent token alone), "gated" (by the slot's state as well)
            or "rnn" (a state carried along each path).
        block_attention: "bidirectional": every slot of a block sees all of its slots; "causal": none after itself.
        attention: How many anchors attend at once: "dense" (one call with the whole mask), "chunked" (memory bounded by
            a chunk of anchors), "flex" (`flex_attention`, CUDA) or "auto" (by size and device). Changes no result, and
            is no part of a checkpoint.
        compile: Compile the layers with `torch.compile` at their first call (on a CPU this needs a C++ compiler).
            Changes results by rounding only, and is no part of a checkpoint.
        confidence: Whether there is a confidence head.
        confidence_with_markov: Whether the confidence head also sees the parent's Markov embedding.
        target_layer_ids: Decoder layers of the target whose outputs are the features; None spaces them evenly.
        num_target_layers_tapped: How many, where `target_layer_ids` is None.
        mask_token_id: Token of the masked slots; None takes one that text never produces.
        intermediate_size: Inner width of the feed-forward blocks; None for the target's.
        num_attention_heads: None for the target's.
        num_key_value_heads: None for the target's.
        sample_from_anchor: True: slot j predicts the token at anchor + j + 1, and a block has K slots. False: slot j
            predicts the token at anchor + j, so a block has K + 1 slots and the anchor's own is not read (DFlash as
            released by its authors).
        draft_vocab_size: Tokens that can be drafted at all, where these are fewer than the target's; `draft_ids` says
            which. Training takes the most frequent tokens of its data and saves the drafter in the speculators layout.

    Raises:
        ValueError: For options that contradict each other or do not fit the target.
    """

    def __init__(
        self,
        target: TargetSpec,
        num_layers: int = 5,
        block_size: int = 7,
        head_dim: int | None = None,
        head_dim_ratio: float = 1.0,
        markov_rank: int = 256,
        markov_head: str = "vanilla",
        confidence: bool = True,
        confidence_with_markov: bool = True,
        target_layer_ids: list[int] | None = None,
        num_target_layers_tapped: int = 5,
        mask_token_id: int | None = None,
        intermediate_size: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        block_attention: str = "bidirectional",
        attention: str = "auto",
        compile: bool = False,
        sample_from_anchor: bool = True,
        draft_vocab_size: int | None = None,
    ) -> None:
        if target_layer_ids is None:
            target_layer_ids = default_layer_ids(target.num_layers, num_target_layers_tapped)
        # A checkpoint from elsewhere may not say how many layers its target has (0); `bind` will know.
        _check_layer_ids(target_layer_ids, target.num_layers or max(target_layer_ids, default=0) + 2)
        if mask_token_id is None:
            mask_token_id = target.mask_token_id
        if mask_token_id is None:
            raise ValueError(
                f"The target '{target.name}' has no special token to spare for masked slots; give mask_token_id."
            )
        super().__init__(target, block_size, tuple(target_layer_ids), mask_token_id)
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {num_layers}.")
        if head_dim is not None and head_dim_ratio != 1.0:
            raise ValueError(f"Give head_dim ({head_dim}) or head_dim_ratio ({head_dim_ratio}), not both.")
        if confidence and confidence_with_markov and markov_rank == 0:
            raise ValueError(
                "confidence_with_markov: true needs a Markov head; set confidence_with_markov: false or markov_rank "
                "above 0."
            )
        if block_attention not in BLOCK_ATTENTION:
            raise unknown("block_attention", block_attention, BLOCK_ATTENTION)
        if attention not in ATTENTION:
            raise unknown("attention", attention, ATTENTION)
        self.attention = attention
        self.num_layers, self.block_attention = num_layers, block_attention
        self.head_dim = head_dim if head_dim is not None else 2 * round(target.head_dim * head_dim_ratio / 2)
        self.num_attention_heads = num_attention_heads or target.num_attention_heads
        self.num_key_value_heads = num_key_value_heads or target.num_key_value_heads
        self.intermediate_size = intermediate_size or target.intermediate_size
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be an even number above 0, got {self.head_dim}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})."
            )
        self.markov_rank, self.markov_head = markov_rank, markov_head
        self.sample_from_anchor, self.draft_vocab_size = sample_from_anchor, draft_vocab_size
        self.num_slots = block_size if sample_from_anchor else block_size + 1
        self.has_confidence = confidence
        self.confidence_with_markov = confidence and confidence_with_markov
        # A drafter rotates its whole head, also where the target rotates a part.
        self.rope_parameters = {k: v for k, v in target.rope_parameters.items() if k != "partial_rotary_factor"}
        self._rotary = Rotary(self.rope_parameters, self.head_dim, target.max_position_embeddings)

        hidden, eps = target.hidden_size, target.rms_norm_eps
        self.fc = FewRowsLinear(len(self.layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        self.layers = nn.ModuleList(
            DraftLayer(hidden, self.intermediate_size, heads, kv_heads, self.head_dim, eps) for _ in range(num_layers)
        )
        self.norm = RMSNorm(hidden, eps)
        self.markov = build_markov_head(markov_head, target.vocab_size, markov_rank, hidden)
        rank = markov_rank if confidence_with_markov else 0
        self.confidence_head = ConfidenceHead(hidden, rank) if confidence else None
        if draft_vocab_size is not None:
            self._reduce_vocabulary(draft_vocab_size)
        self._reset_parameters()
        if compile:
            for layer in self._layer_list():
                # Chunks of anchors differ from batch to batch: attention stays out of the compiled part.
                layer.self_attn.attend = torch.compiler.disable(layer.self_attn.attend)  # type: ignore[no-untyped-call]
                layer.compile()

    def _reset_parameters(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("lm_head"):
                nn.init.normal_(module.weight, std=_INIT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # A slot begins as its token's embedding, and under a tied head that predicts the token itself with certainty:
        # a small final norm starts near a flat distribution instead.
        nn.init.constant_(self.norm.weight, _INIT_NORM)
        if self.markov is not None:
            self.markov.reset_parameters(_INIT_STD)

    def _reduce_vocabulary(self, size: int) -> None:
        """Output head and W2 get rows for `size` tokens only; W1 keeps all, since any token can be a parent."""
        if not 1 <= size < self.spec.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be from 1 to {self.spec.vocab_size - 1}, below the target's vocabulary, got "
                f"{size}; leave it out where all tokens can be drafted."
            )
        del self.draft_ids
        self.register_buffer("draft_ids", torch.arange(size))
        self.format_name = "SpeculatorsFormat"  # the one layout that can say which tokens they are
        self.lm_head = nn.Linear(self.spec.hidden_size, size, bias=False, device="meta").requires_grad_(False)
        if self.markov is not None:
            self.markov.markov_w2 = nn.Linear(self.markov_rank, size, bias=False)

    def _head_of(self, target: Target) -> Tensor:
        """The target's output head; of a reduced vocabulary, the rows that the file holds, or else the target's."""
        if self.draft_ids is None:
            return super()._head_of(target)
        if not self.lm_head.weight.is_meta:
            return self.lm_head.weight
        return self._rows_of(target)

    def _rows_of(self, target: Target) -> Tensor:
        assert self.draft_ids is not None
        rows = target.output_head().weight.detach()[self.draft_ids.to(target.device)]
        return nn.Parameter(rows, requires_grad=False)

    def select_tokens(self, draft_ids: Tensor, target: Target | None = None) -> None:
        """Sets the tokens [V_draft] that can be drafted, ascending, with the target's head of them where one is given.

        Raises:
            ValueError: For a full vocabulary, or another number of tokens than `draft_vocab_size`.
        """
        if self.draft_ids is None:
            return super().select_tokens(draft_ids, target)
        if draft_ids.shape != self.draft_ids.shape:
            raise ValueError(f"Expected {len(self.draft_ids)} tokens that can be drafted, got {len(draft_ids)}.")
        self.draft_ids = draft_ids.to(self.draft_ids.device)
        if target is not None:
            self.lm_head.weight = self._rows_of(target)

    def config(self) -> dict[str, Any]:
        """Returns the class and its resolved options, without the target."""
        return {
            "class_path": type(self).__name__,
            "init_args": {
                "num_layers": self.num_layers,
                "block_size": self.block_size,
                "head_dim": self.head_dim,
                "markov_rank": self.markov_rank,
                "markov_head": self.markov_head,
                "confidence": self.has_confidence,
                "confidence_with_markov": self.confidence_with_markov,
                "target_layer_ids": list(self.layer_ids),
                "mask_token_id": self.mask_token_id,
                "intermediate_size": self.intermediate_size,
                "num_attention_heads": self.num_attention_heads,
                "num_key_value_heads": self.num_key_value_heads,
                "block_attention": self.block_attention,
                "sample_from_anchor": self.sample_from_anchor,
                "draft_vocab_size": self.draft_vocab_size,
            },
        }

    def encode(self, features: Tensor, positions: Tensor, context: DraftContext | None = None) -> DraftContext:
        """Projects features [R, S, m*H] once, and gives each layer its keys and values of them."""
        states = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        rotary = self._rotary(positions, states.dtype)
        pairs = [layer.self_attn.keys_values(states, rotary) for layer in self._layer_list()]
        keys, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if context is None:
            return DraftContext(keys, values)
        context.append(keys, values)
        return context

    def draft(
        self,
        context: DraftContext,
        anchor_tokens: Tensor,
        anchor_positions: Tensor,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Runs the slots of all anchors in one pass: states [R, A, K, H] after the final norm."""
        rows, anchors = anchor_tokens.shape
        size = self.num_slots
        tokens = anchor_tokens.new_full((rows, anchors, size), self.mask_token_id)
        tokens[:, :, 0] = anchor_tokens
        offsets = torch.arange(size, device=anchor_positions.device)
        positions = (anchor_positions.unsqueeze(-1) + offsets).view(rows, anchors * size)
        x = self.embed_tokens(tokens.view(rows, anchors * size)).to(self.fc.weight.dtype)
        rotary = self._rotary(positions, x.dtype)
        mask = self._mask(context, context_mask, rows, anchors, x)
        for i, layer in enumerate(self._layer_list()):
            x = layer(x, rotary, context.layer(i), mask)
        states: Tensor = self.norm(x)
        return states.view(rows, anchors, size, -1)[:, :, -self.block_size :]  # depth d: slot d-1, or slot d

    def propose(self, hidden: Tensor, root_tokens: Tensor) -> DraftProposer:
        """Returns the distributions of M anchors from their slots' states [M, K, H]."""
        heads = (self.base_logits, self.markov, self.confidence_head)
        return DraftProposer(hidden, root_tokens, *heads, self.draft_ids, self.spec.vocab_size)

    def propose_reduced(self, hidden: Tensor, root_tokens: Tensor) -> ReducedProposer:
        """Returns the same over the draft vocabulary's own numbers; see the base class."""
        if self.draft_ids is None:
            return super().propose_reduced(hidden, root_tokens)
        inner = DraftProposer(hidden, root_tokens, self.base_logits, self.markov, self.confidence_head)
        return ReducedProposer(inner, self.draft_ids)

    def _layer_list(self) -> list[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _mask(
        self, context: DraftContext, context_mask: Tensor | None, rows: int, anchors: int, x: Tensor
    ) -> SlotMask | None:
        causal = self.block_attention == "causal"
        if context_mask is None:
            if anchors == 1 and not causal:
                return None
            context_mask = torch.ones(rows, anchors, context.length, dtype=torch.bool, device=x.device)
        elif context_mask.shape != (rows, anchors, context.length):
            raise ValueError(
                f"Expected a context mask of shape {[rows, anchors, context.length]}, got {list(context_mask.shape)}."
            )
        groups = self.num_attention_heads // self.num_key_value_heads
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        runs = anchors > 1 and self.attention == "auto" and flex_runs(x.device.type, dtype, self.head_dim, groups)
        return SlotMask(context_mask, self.num_slots, causal, groups, self.attention, runs)
