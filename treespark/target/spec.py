"""What a drafter must know of its target: sizes, token ids, identity, and which token may stand for a mask."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Rows of the embedding that are hashed at a time: bounds the memory that a large vocabulary needs.
_HASHED_ROWS = 8192


@dataclass(frozen=True)
class TargetSpec:
    """Sizes and identity of a target.

    Attributes:
        name: What the user called the target.
        model_type: The target's `model_type` ("llama", "qwen3", ...).
        vocab_size: Rows of the output embedding (may exceed the tokenizer's length).
        hidden_size: Width H of a hidden state.
        num_layers: Decoder layers.
        num_attention_heads: Query heads of a layer.
        num_key_value_heads: Key-value heads of a layer.
        head_dim: Width of one attention head.
        intermediate_size: Inner width of the feed-forward block.
        rms_norm_eps: Epsilon of the norms.
        rope_parameters: `rope_type`, `rope_theta` and what the type needs.
        max_position_embeddings: Longest context, in tokens.
        bos_token_id: First token of a text, or None.
        eos_token_ids: Tokens that end an answer.
        pad_token_id: Padding token, or None.
        fingerprint: SHA-256 of the sizes and of the output embedding, never a path.
        mask_token_id: A token that plain text never produces, or None if the target has none to offer.
    """

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    fingerprint: str
    mask_token_id: int | None = None


def fingerprint(sizes: dict[str, int], embedding: Tensor) -> str:
    """Returns the SHA-256 over a target's sizes and its output embedding [V, H].

    The embedding is hashed as bfloat16, so that one target loaded in float32 and in bfloat16 is the same target.
    """
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode())
    for start in range(0, len(embedding), _HASHED_ROWS):
        rows = embedding.detach()[start : start + _HASHED_ROWS]
        digest.update(rows.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the plain rotary settings of a model config; older configs hold `rope_theta` alone."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parameters = {key: value for key, value in dict(found).items() if value is not None}
    parameters.setdefault("rope_type", "default")
    parameters.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    return parameters


def end_tokens(*sources: Any) -> tuple[int, ...]:
    """Joins the `eos_token_id` of configs and tokenizers (None, an id, or a list of ids) in order, without repeats."""
    ids: dict[int, None] = {}
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids.update(dict.fromkeys(value if isinstance(value, (list, tuple)) else [value]))
    return tuple(int(i) for i in ids)


def _reserved(spec: TargetSpec, tokenizer: PreTrainedTokenizerBase | None) -> dict[int, str]:
    reserved = {i: "an end token" for i in spec.eos_token_ids}
    for source in (spec, tokenizer):
        for name, words in (("bos_token_id", "the first token of a text"), ("pad_token_id", "the padding token")):
            value = getattr(source, name, None)
            if value is not None:
                reserved.setdefault(int(value), words)
    for value in end_tokens(tokenizer):
        reserved.setdefault(value, "an end token")
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None:
        reserved.setdefault(int(unknown), "the token for unknown text")
    return reserved


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(getattr(tokenizer, "chat_template", None) or "")


def default_mask_token(tokenizer: PreTrainedTokenizerBase | None, spec: TargetSpec) -> int | None:
    """Chooses a token for the masked slots of a draft block; None when the target has no token to spare.

    The first embedding row above the tokenizer's length if there is one (151669 for Qwen3, as in the released
    drafters, arXiv 2607.05147), else the first special token that the chat template does not use. Without a
    tokenizer: the last row that is not reserved.
    """
    reserved = _reserved(spec, tokenizer)
    if tokenizer is None:
        return next((i for i in reversed(range(spec.vocab_size)) if i not in reserved), None)
    for i in range(len(tokenizer), spec.vocab_size):
        if i not in reserved:
            return i
    template = _template(tokenizer)
    for i, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and i < spec.vocab_size and i not in reserved and token.content not in template:
            return int(i)
    return None


def check_mask_token(tokenizer: PreTrainedTokenizerBase | None, token_id: int, spec: TargetSpec) -> None:
    """Refuses a mask token that could also be a token of a text.

    Raises:
        ValueError: When the id lies outside the embedding's rows, is an end, first, padding or unknown token, belongs
            to the chat template, or is an ordinary token that plain text can produce.
    """
    hint = f"Leave mask_token_id out to use {spec.mask_token_id}." if spec.mask_token_id is not None else ""
    if not 0 <= token_id < spec.vocab_size:
        raise ValueError(
            f"mask_token_id {token_id} lies outside the target's embedding, which has rows 0 to "
            f"{spec.vocab_size - 1}. {hint}".strip()
        )
    reserved = _reserved(spec, tokenizer)
    if token_id in reserved:
        raise ValueError(f"mask_token_id {token_id} is {reserved[token_id]} of the target. {hint}".strip())
    if tokenizer is None or token_id >= len(tokenizer):
        return
    added = tokenizer.added_tokens_decoder.get(token_id)
    if added is None or not added.special:
        shown = tokenizer.convert_ids_to_tokens(token_id)
        raise ValueError(
            f"mask_token_id {token_id} is the ordinary token {shown!r}, which plain text can produce; a mask token "
            f"must be a special token. {hint}".strip()
        )
    if added.content in _template(tokenizer):
        raise ValueError(
            f"mask_token_id {token_id} is {added.content!r}, which the chat template writes into every prompt. "
            f"{hint}".strip()
        )
