"""SpecForge's layout of DSpark drafters: the heads' settings are nested, the target's tensors are left out."""

from __future__ import annotations

from typing import Any

from treespark.drafters import DSparkDrafter
from treespark.drafters.fields import Fields
from treespark.drafters.native import FlatFormat, backbone_options, head_options, qwen3_config, target_spec
from treespark.export.dflash import DFlashFormat, block_depths, slot_layout
from treespark.target.spec import TargetSpec


class SpecForgeFormat(FlatFormat):
    """`DSparkDraftModel`; a drafter without heads whose slots predict their own position is a `DFlashDraftModel`.

    Files with `projector_type: "dspark"` were trained on the next token (slot j predicts anchor + j + 1). Older ones
    without it do not tell, and engines guess differently: those are refused unless they carry `sample_from_anchor`.
    """

    name = "specforge"
    architectures = ("DSparkDraftModel",)
    holds_embeddings = False

    def parse(self, fields: Fields) -> tuple[TargetSpec, dict[str, Any]]:
        """See the base class."""
        section = fields.section("dflash_config")
        projector = section.get("projector_type")
        section.only(projector_type="dspark")
        sample_from_anchor = slot_layout(fields, True if projector == "dspark" else None)
        if not sample_from_anchor:
            raise ValueError(
                f"{fields.place}: a DSparkDraftModel with sample_from_anchor: false is read in two ways by engines "
                "(block_size with or without the anchor's slot); it cannot be told which is meant."
            )
        # Older files have the heads' fields at the top.
        nested = Fields({**fields.values, **section.values}, fields.place)
        options = backbone_options(fields) | head_options(nested)
        options["block_size"] = block_depths(fields, True)
        options["target_layer_ids"] = nested.integers("target_layer_ids")
        options["mask_token_id"] = nested.integer("mask_token_id")
        return target_spec(fields, fields, fields.integer("num_target_layers"), options["mask_token_id"]), options

    def describe(self, drafter: DSparkDrafter) -> dict[str, Any]:
        """See the base class."""
        if not drafter.sample_from_anchor:
            if not drafter.markov_rank and not drafter.has_confidence:
                return DFlashFormat().describe(drafter)
            raise ValueError(
                "The specforge layout has no unambiguous form for sample_from_anchor: false with a Markov or "
                "confidence head. Export it as speculators."
            )
        return qwen3_config(drafter) | {
            "architectures": list(self.architectures),
            "block_size": drafter.block_size,
            "num_target_layers": drafter.spec.num_layers,
            "dflash_config": {
                "mask_token_id": drafter.mask_token_id,
                "target_layer_ids": list(drafter.layer_ids),
                "projector_type": "dspark",
                "markov_rank": drafter.markov_rank,
                "markov_head_type": drafter.markov_head,
                "enable_confidence_head": drafter.has_confidence,
                "confidence_head_with_markov": drafter.confidence_with_markov,
            },
        }
