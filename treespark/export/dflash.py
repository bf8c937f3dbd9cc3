"""DFlash as its authors release it (arXiv 2602.06036): slot j predicts the token at anchor + j, no Markov head."""

from __future__ import annotations

from typing import Any

from treespark.drafters import DSparkDrafter
from treespark.drafters.fields import Fields
from treespark.drafters.native import FlatFormat, backbone_options, qwen3_config, target_spec
from treespark.target.spec import TargetSpec

# Of their later models: what would change the drafter's function, and has no counterpart here.
_PLAIN = {"input_embedding_scale": 1.0, "is_causal": False, "final_logit_softcapping": 0.0}


def slot_layout(fields: Fields, known: bool | None) -> bool:
    """Returns `sample_from_anchor` of a config: its own field, or `shift_label`, or what the format fixes.

    Args:
        fields: The configuration; a nested `dflash_config` may hold the fields.
        known: What the format fixes; None if it leaves it open.

    Raises:
        ValueError: When fields contradict each other, or the layout cannot be told.
    """
    places = (fields, fields.section("dflash_config"))
    names = ("sample_from_anchor", "shift_label")
    said = {place.flag(name) for place in places for name in names if place.get(name) is not None}
    if len(said) == 1:
        return said.pop()
    if said or known is None:
        raise ValueError(
            f"{fields.place}: {'contradicting fields say' if said else 'nothing says'} which token a slot predicts, "
            "and a wrong guess accepts next to nothing without any error. Add `sample_from_anchor` to config.json: "
            "true if slot j predicts the token at anchor + j + 1 (all slots draft), false if it predicts the one at "
            "anchor + j (the anchor's own slot is unread)."
        )
    return known


def block_depths(fields: Fields, sample_from_anchor: bool) -> int:
    """Returns the drafted depths K of a format whose `block_size` counts slots."""
    slots = fields.integer("block_size", fields.section("dflash_config").get("block_size"))
    return slots if sample_from_anchor else slots - 1


class DFlashFormat(FlatFormat):
    """Block 16 is the anchor's slot and 15 depths; the file holds no embedding and no output head. Read only.

    SpecForge's DFlash files are the same.
    """

    architectures = ("DFlashDraftModel",)

    def parse(self, fields: Fields) -> tuple[TargetSpec, dict[str, Any]]:
        """See the base class."""
        section = fields.section("dflash_config")
        fields.only(**_PLAIN)
        section.only(projector_type="dflash", markov_rank=0, enable_confidence_head=False, **_PLAIN)
        sample_from_anchor = slot_layout(fields, False)
        options = backbone_options(fields) | {
            "block_size": block_depths(fields, sample_from_anchor),
            "target_layer_ids": section.integers("target_layer_ids"),
            "mask_token_id": section.integer("mask_token_id"),
            "markov_rank": 0,
            "confidence": False,
            "sample_from_anchor": sample_from_anchor,
        }
        return target_spec(fields, fields, fields.integer("num_target_layers"), options["mask_token_id"]), options

    def describe(self, drafter: DSparkDrafter) -> dict[str, Any]:
        """See the base class."""
        if drafter.markov_rank or drafter.has_confidence:
            raise ValueError("A DFlash file has neither a Markov head nor a confidence head; this drafter has one.")
        return qwen3_config(drafter) | {
            "architectures": list(self.architectures),
            "block_size": drafter.num_slots,
            "num_target_layers": drafter.spec.num_layers,
            "dflash_config": {
                "mask_token_id": drafter.mask_token_id,
                "target_layer_ids": list(drafter.layer_ids),
            },
        }
