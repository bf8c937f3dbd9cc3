"""The layout of the `speculators` package, which vLLM serves; it alone knows reduced draft vocabularies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treespark.drafters import DSparkDrafter
from treespark.drafters.fields import Fields
from treespark.drafters.native import FlatFormat, backbone_options, head_options, qwen3_config, target_spec
from treespark.export.dflash import block_depths, slot_layout
from treespark.target.spec import TargetSpec

# Version of the package whose layout is written.
_VERSION = "0.9.0"


class SpeculatorsFormat(FlatFormat):
    """The drafter's layers are nested in `transformer_layer_config`; tapped layers are counted from 1.

    `block_size` counts slots. A reduced vocabulary is described by `d2t` (target token minus draft token, for each
    draft token) and `t2d` (True for target tokens that can be drafted).
    """

    name = "speculators"
    architectures = ("DSparkSpeculator", "DFlashSpeculator")
    ignored_tensors = ("rotary_emb.", "verifier_norm.", "verifier_lm_head.")

    def parse(self, fields: Fields) -> tuple[TargetSpec, dict[str, Any]]:
        """See the base class."""
        kind = fields.get("speculators_model_type")
        if kind not in ("dspark", "dflash"):
            raise ValueError(f"{fields.place}: speculators_model_type is {kind!r}; expected 'dspark' or 'dflash'.")
        fields.only(projector_type="dflash", draft_adapter_rank=0)
        layers = fields.section("transformer_layer_config")
        # Before the field existed, DFlash slots predicted their own position; DSpark files of that time look alike
        # but engines read them as the opposite.
        sample_from_anchor = slot_layout(_without(fields, "shift_label"), False if kind == "dflash" else None)
        options = backbone_options(layers) | head_options(fields)
        options["block_size"] = block_depths(fields, sample_from_anchor)
        options["target_layer_ids"] = [i - 1 for i in fields.integers("aux_hidden_state_layer_ids")]
        options["mask_token_id"] = fields.integer("mask_token_id")
        options["sample_from_anchor"] = sample_from_anchor
        size, full = fields.integer("draft_vocab_size"), layers.integer("vocab_size")
        if size != full:
            options["draft_vocab_size"] = size
        hidden = layers.integer("hidden_size")
        if fields.integer("target_hidden_size", hidden) != hidden:
            raise ValueError(f"{fields.place}: target_hidden_size differs from hidden_size {hidden}; not supported.")
        name = str(fields.section("speculators_config").section("verifier").get("name_or_path", ""))
        return target_spec(fields, layers, 0, options["mask_token_id"], name), options

    def describe(self, drafter: DSparkDrafter) -> dict[str, Any]:
        """See the base class."""
        spec, size = drafter.spec, drafter.draft_vocab_size or drafter.spec.vocab_size
        verifier = {"name_or_path": spec.name or None, "architectures": _architectures(spec.model_type)}
        layers = qwen3_config(drafter)
        return {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "speculators_version": _VERSION,
            "aux_hidden_state_layer_ids": [i + 1 for i in drafter.layer_ids],
            "block_size": drafter.num_slots,
            "confidence_head_with_markov": drafter.confidence_with_markov,
            "draft_vocab_size": size,
            "dtype": layers.pop("dtype"),
            "enable_confidence_head": drafter.has_confidence,
            "markov_head_type": drafter.markov_head,
            "markov_rank": drafter.markov_rank,
            "mask_token_id": drafter.mask_token_id,
            "target_hidden_size": spec.hidden_size,
            "tie_word_embeddings": False,
            "transformer_layer_config": layers,
            "speculators_config": {
                "algorithm": "dspark",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.block_size}],
                "verifier": verifier,
            },
        }

    def tensors(self, drafter: DSparkDrafter) -> dict[str, Tensor]:
        """See the base class."""
        ids = drafter.draft_ids
        if ids is None:
            return super().tensors(drafter)
        drafter.draft_ids = None
        try:
            found = super().tensors(drafter)
        finally:
            drafter.draft_ids = ids
        possible = torch.zeros(drafter.spec.vocab_size, dtype=torch.bool)
        possible[ids.cpu()] = True
        return found | {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": possible}

    def vocabulary_shapes(self, spec: TargetSpec, options: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """See the base class."""
        size = options.get("draft_vocab_size")
        return {} if size is None else {"d2t": (size,), "t2d": (spec.vocab_size,)}

    def vocabulary(self, fields: Fields, tensors: dict[str, Tensor]) -> Tensor | None:
        """See the base class.

        Raises:
            ValueError: When `d2t` and `t2d` do not describe the same tokens.
        """
        if "d2t" not in tensors:
            return None
        offsets, possible = tensors.pop("d2t").long(), tensors.pop("t2d").bool()
        ids = torch.arange(len(offsets)) + offsets
        if not torch.equal(ids, possible.nonzero()[:, 0]):
            raise ValueError(
                f"{fields.place}: `d2t` and `t2d` of the file name different tokens; expected d2t[i] + i to be the "
                "i-th token where t2d is true."
            )
        return ids


def _without(fields: Fields, key: str) -> Fields:
    return Fields({name: value for name, value in fields.values.items() if name != key}, fields.place)


def _architectures(model_type: str) -> list[str]:
    """The target's class in `transformers`, which engines compare with the target that they serve."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return [] if name is None else [name] if isinstance(name, str) else list(name)
