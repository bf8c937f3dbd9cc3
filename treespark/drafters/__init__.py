"""Drafters: models that propose the next K tokens of a target from its hidden states."""

from __future__ import annotations

from treespark.drafters.attention import DraftContext
from treespark.drafters.base import Drafter
from treespark.drafters.dspark import DSparkDrafter
from treespark.drafters.formats import CheckpointFormat, writable_formats
from treespark.drafters.native import DeepSpecFormat
from treespark.drafters.proposer import DraftProposer

__all__ = [
    "CheckpointFormat",
    "DSparkDrafter",
    "DeepSpecFormat",
    "DraftContext",
    "DraftProposer",
    "Drafter",
    "writable_formats",
]
