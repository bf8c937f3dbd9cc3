"""Foreign checkpoint formats, in and out; they register themselves when the room is imported."""

from __future__ import annotations

from treespark.export.card import model_card
from treespark.export.dflash import DFlashFormat
from treespark.export.specforge import SpecForgeFormat
from treespark.export.speculators import SpeculatorsFormat

__all__ = ["DFlashFormat", "SpecForgeFormat", "SpeculatorsFormat", "model_card"]
