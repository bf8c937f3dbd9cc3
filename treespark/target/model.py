"""The frozen target in one place: tapped hidden states, final norm, own output head, decoding with a cache.

Shapes: R rows, S sequence, q new positions, L cached positions, H hidden, m tapped layers, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from treespark.target import loading
from treespark.target.linear import apply_head, speed_up_few_rows
from treespark.target.spec import TargetSpec, default_mask_token, end_tokens, fingerprint, rope_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from treespark.target.cache import TargetCache


class TargetFeatures(NamedTuple):
    """What one forward pass of the target leaves for the drafter.

    Attributes:
        context: [R, S, m*H] outputs of the tapped decoder layers, concatenated in the order of the ids.
        final: [R, S, H] hidden states after the final norm; the target's head on them gives its logits.
    """

    context: Tensor
    final: Tensor


class TargetOutput(NamedTuple):
    """Logits [R, q, V] and features of the q new positions."""

    logits: Tensor
    features: TargetFeatures


class Target(nn.Module):
    """A frozen Hugging Face causal language model.

    It stays in evaluation mode and its parameters take no gradient.

    Args:
        model: The language model; Llama- and Qwen-like decoders with full attention.
        tokenizer: Its tokenizer, if texts are to be encoded or decoded.
        name: What messages and checkpoints call it.

    Raises:
        ValueError: For a model whose logits are not a plain linear head on the final-normed hidden state, whose
            attention slides, or whose attention implementation takes no tree mask.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = ""
    ) -> None:
        super().__init__()
        config = model.config.get_text_config(decoder=True)
        label = name or str(getattr(config, "name_or_path", "") or config.model_type)
        # `transformers` leaves many of its methods untyped.
        untyped: Any = model
        self.model: Any = untyped.eval().requires_grad_(False)
        speed_up_few_rows(self.model)
        self._tokenizer = tokenizer
        decoder = untyped.get_decoder()
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError(
                f"Target '{label}' ({config.model_type}): expected a decoder with a list of `layers`, as Llama and "
                f"Qwen3 have."
            )
        # Plain references, not registered twice: `model` owns the parameters.
        self._decoder_call: Any = [decoder]
        self._layers: Any = [layers]
        parameters = inspect.signature(decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        _check_supported(untyped.get_output_embeddings(), config, label)
        self.spec = _spec(untyped, config, tokenizer, label, len(layers))
        self._check_own_head()

    @classmethod
    def load(
        cls,
        name: str,
        dtype: str | torch.dtype = "float32",
        device_map: str | dict[str, Any] | None = None,
        attn_implementation: str = "sdpa",
        revision: str | None = None,
    ) -> Self:
        """Loads a target and its tokenizer.

        Args:
            name: "smollm2-135m-instruct" (converted by `make target`), a local folder, or a hub id.
            dtype: Of the weights and of the hidden states.
            device_map: As in `transformers`; None keeps the model on the CPU.
            attn_implementation: "sdpa" or "eager".
            revision: Of a hub id.

        Raises:
            FileNotFoundError: When a known target has not been fetched yet, or the folder does not exist.
            ValueError: When the model cannot be loaded or is not supported.
        """
        model = loading.load_model(name, loading.parse_dtype(dtype), device_map, attn_implementation, revision)
        return cls(model, loading.load_tokenizer(name, revision), name)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer.

        Raises:
            ValueError: When the target was built without one.
        """
        if self._tokenizer is None:
            raise ValueError(f"The target '{self.spec.name}' has no tokenizer; give one to Target(model, tokenizer).")
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the target was built with a tokenizer."""
        return self._tokenizer is not None

    @property
    def device(self) -> torch.device:
        """Where token ids must be."""
        return self.input_embedding().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and hidden states."""
        return self.input_embedding().weight.dtype

    def train(self, mode: bool = True) -> Self:
        """Keeps evaluation mode, whatever a trainer asks for: the target is frozen."""
        return super().train(False)

    def input_embedding(self) -> nn.Embedding:
        """Returns the model's token embedding."""
        embedding: nn.Embedding = self.model.get_input_embeddings()
        return embedding

    def output_head(self) -> nn.Linear:
        """Returns the model's output head; tied models share its weight with the embedding."""
        head: nn.Linear = self.model.get_output_embeddings()
        return head

    def logits(self, final: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns the target's logits [..., V] of final-normed hidden states [..., H], in the target's own dtype.

        With rows [T, H] of the output head, the logits [..., T] of their tokens alone.
        """
        weight = self.output_head().weight if rows is None else rows
        with self._own_precision():
            return apply_head(final.to(weight.dtype), weight)

    @property
    def decoder(self) -> nn.Module:
        """The model without its output head."""
        decoder: nn.Module = self._decoder_call[0]
        return decoder

    def layers(self) -> Iterator[nn.Module]:
        """Yields the decoder layers."""
        yield from self._layers[0]

    def layer_state(self, layer_id: int) -> dict[str, Tensor]:
        """Returns the tensors of a decoder layer, by their names inside the layer.

        Raises:
            ValueError: When there is no such layer.
        """
        if not 0 <= layer_id < self.spec.num_layers:
            raise ValueError(
                f"The target '{self.spec.name}' has layers 0 to {self.spec.num_layers - 1}, not {layer_id}."
            )
        state: dict[str, Tensor] = self._layers[0][layer_id].state_dict()
        return state

    def final_norm(self) -> Tensor:
        """Returns the weight [H] of the norm before the output head."""
        weight: Tensor = self._decoder_call[0].norm.weight
        return weight

    @torch.no_grad()
    def features(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> TargetFeatures:
        """Runs the target over right-padded rows, without a cache and without gradients.

        Args:
            input_ids: [R, S] token ids.
            layer_ids: Decoder layers whose outputs are tapped, 0-based; the final layer is not allowed.
            attention_mask: [R, S] True for tokens; padding must stand on the right. Its features mean nothing.
            position_ids: [R, S]; where it restarts inside a row, another document begins, and neither attends to the
                other.

        Raises:
            ValueError: For padding that is not on the right, or layer ids that the target does not have.
        """
        options: dict[str, Any] = {}
        if attention_mask is not None:
            real = attention_mask.to(torch.bool)
            if bool((real[:, 1:] & ~real[:, :-1]).any()):
                raise ValueError("Rows must be padded on the right: attention_mask goes from False to True in a row.")
        if position_ids is not None:
            steps = position_ids[:, 1:] != position_ids[:, :-1] + 1
            if attention_mask is not None:
                steps = steps & real[:, 1:]
            if bool(steps.any()):
                # Several documents in a row: from positions that restart, `transformers` makes the mask that keeps
                # them apart (masking_utils.find_packed_sequence_indices), in the form that the attention takes.
                options = {"position_ids": position_ids}
            elif bool((position_ids[:, 0] != 0).any()):
                offsets = torch.arange(input_ids.shape[1], device=input_ids.device)
                options = {"position_ids": position_ids[:, :1] + offsets}
        # Causal attention never lets a token see the padding on its right, so no padding mask is needed.
        with self._taps(layer_ids) as tapped, self._own_precision():
            final = self._decoder_call[0](input_ids=input_ids, use_cache=False, **options).last_hidden_state
        return TargetFeatures(_joined(tapped, layer_ids, final), final)

    def new_cache(self, capacity: int, rows: int = 1) -> TargetCache:
        """Returns an empty cache with room for `capacity` positions in each of `rows` rows; it grows when full."""
        from treespark.target.cache import TargetCache

        return TargetCache(self.spec.num_layers, capacity, rows)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        cache: TargetCache,
        layer_ids: Sequence[int] = (),
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        num_logits: int | None = None,
    ) -> TargetOutput:
        """Decodes q new positions after the L cached ones, and appends them to the cache.

        Args:
            input_ids: [R, q] token ids.
            cache: From `new_cache`; L = cache.length. R is the number of rows that it has selected.
            layer_ids: Decoder layers whose outputs are tapped; may be empty.
            position_ids: [R, q]; None counts on from the cache (siblings of a tree share a position).
            mask: [R, q, L + q] True where a new position sees a key; None is causal.
            num_logits: Logits of the last so many positions only (a prefill needs one); None for all.

        Raises:
            ValueError: For a mask of another shape, layer ids that the target does not have, or another number of rows
                than the cache has selected.
        """
        rows, width = input_ids.shape
        length = cache.length
        if rows != cache.num_selected:
            raise ValueError(f"Got {rows} rows of token ids for a cache of {cache.num_selected} rows.")
        options: dict[str, Any] = {self._cache_argument: cache.hf, "use_cache": True}
        if mask is not None:
            if mask.shape != (rows, width, length + width) or mask.dtype != torch.bool:
                raise ValueError(
                    f"Expected a bool mask of shape {[rows, width, length + width]} for {width} new positions after "
                    f"{length} cached ones, got {mask.dtype} {list(mask.shape)}."
                )
        elif length > 0 and width > 1:
            total = torch.ones(width, length + width, dtype=torch.bool, device=input_ids.device)
            mask = total.tril(length).expand(rows, -1, -1)
        if mask is not None:
            options["attention_mask"] = self._additive(mask)
        if position_ids is None:
            position_ids = torch.arange(length, length + width, device=input_ids.device).expand(rows, -1)
        with self._taps(layer_ids) as tapped, self._own_precision():
            final = self._decoder_call[0](input_ids=input_ids, position_ids=position_ids, **options).last_hidden_state
        shown = final if num_logits is None else final[:, width - num_logits :]
        return TargetOutput(self.logits(shown), TargetFeatures(_joined(tapped, layer_ids, final), final))

    def _additive(self, mask: Tensor) -> Tensor:
        """Turns a bool mask [R, q, n] into what every attention implementation adds: [R, 1, q, n] in the dtype."""
        added = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        return added.masked_fill_(~mask, torch.finfo(self.dtype).min).unsqueeze(1)

    def _own_precision(self) -> torch.autocast:
        """Switches autocast off: a trainer's mixed precision is the drafter's, and the target keeps its dtype.

        Else text that the target wrote in float32 would not be its own text under a bfloat16 trainer.
        """
        return torch.autocast(self.device.type, enabled=False)

    @contextmanager
    def _taps(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        tapped: dict[int, Tensor] = {}
        handles = []
        for i in layer_ids:
            if not 0 <= i < self.spec.num_layers - 1:
                raise ValueError(
                    f"Tapped layer {i} is not allowed: a target of {self.spec.num_layers} layers offers 0 to "
                    f"{self.spec.num_layers - 2} (the final layer excluded)."
                )

            def record(module: nn.Module, args: Any, output: Any, i: int = i) -> None:
                tapped[i] = output[0] if isinstance(output, tuple) else output

            handles.append(self._layers[0][i].register_forward_hook(record))
        try:
            yield tapped
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _check_own_head(self) -> None:
        """Compares the own head with the model's logits once, which no list of known config keys can replace."""
        ids = torch.tensor([[self.spec.vocab_size // 3, self.spec.vocab_size // 2]], device=self.device)
        expected = self.model(input_ids=ids, use_cache=False).logits
        got = self.logits(self.features(ids, ()).final).to(expected.device)
        if not torch.allclose(got.float(), expected.float(), rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"Target '{self.spec.name}' ({self.spec.model_type}): its logits are not its output head applied to "
                f"the final-normed hidden state; such a model is not supported."
            )


def _joined(tapped: dict[int, Tensor], layer_ids: Sequence[int], final: Tensor) -> Tensor:
    if not layer_ids:
        return final[..., :0]
    # Layers may sit on several devices; the drafter lives with the final hidden states.
    return torch.cat([tapped[i].to(final.device) for i in layer_ids], dim=-1)


def _check_supported(head: Any, config: PretrainedConfig, label: str) -> None:
    where = f"Target '{label}' ({config.model_type})"
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        value = getattr(config, key, None)
        if value is not None and value != 1:
            raise ValueError(f"{where}: {key}={value} changes the logits, which is not supported.")
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{where}: expected a linear output head, got {type(head).__name__}.")
    if head.bias is not None:
        raise ValueError(f"{where}: its output head has a bias, which drafters cannot store; not supported.")
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds if kinds else window is not None
    if slides and (window is None or window < config.max_position_embeddings):
        raise ValueError(
            f"{where}: its attention slides over {window} tokens, fewer than its {config.max_position_embeddings} "
            f"positions; only full attention is supported."
        )
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{where}: layers of type {sorted(kinds)} found; only full attention is supported.")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"{where}: attn_implementation={config._attn_implementation!r} takes no tree mask; use 'sdpa' or 'eager'."
        )


def _spec(
    model: Any,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    label: str,
    num_layers: int,
) -> TargetSpec:
    weight: Tensor = model.get_output_embeddings().weight
    heads = int(config.num_attention_heads)
    sizes = {
        "vocab_size": int(weight.shape[0]),
        "hidden_size": int(weight.shape[1]),
        "num_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or weight.shape[1] // heads),
        "intermediate_size": int(getattr(config, "intermediate_size", None) or 4 * weight.shape[1]),
    }
    # The generation config knows every end token of a chat model; the plain config is the fallback.
    ends = end_tokens(model.generation_config) or end_tokens(config)
    known = dict.fromkeys((*ends, *end_tokens(tokenizer)))
    pad = config.pad_token_id if config.pad_token_id is not None else getattr(tokenizer, "pad_token_id", None)
    fields: dict[str, Any] = {
        **sizes,
        "name": label,
        "model_type": str(config.model_type),
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-6),
        "rope_parameters": rope_parameters(config),
        "max_position_embeddings": int(config.max_position_embeddings),
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": tuple(known),
        "pad_token_id": pad,
        "fingerprint": fingerprint(sizes, weight),
    }
    spec = TargetSpec(**fields)
    return dataclasses.replace(spec, mask_token_id=default_mask_token(tokenizer, spec))
