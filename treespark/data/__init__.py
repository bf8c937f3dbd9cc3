"""Prompt sources, chat templates, batches and the resumable loader.

Importing this package stays cheap: the Lightning datamodule is loaded when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treespark.data.collate import MicroBatch, collate, eligible_anchors, sample_anchors
from treespark.data.loader import BatchLoader, TrainLoader
from treespark.data.mixture import Mixture, SourceSpec, open_source, read_records
from treespark.data.prompts import DataError, PromptRecord, hash_files
from treespark.data.samples import Sample, load_samples
from treespark.data.sources import PromptSource, Source
from treespark.data.template import ChatEncoder, Encoded, render

if TYPE_CHECKING:
    from treespark.data.datamodule import DraftingData

__all__ = [
    "BatchLoader",
    "ChatEncoder",
    "DataError",
    "DraftingData",
    "Encoded",
    "MicroBatch",
    "Mixture",
    "PromptRecord",
    "PromptSource",
    "Sample",
    "Source",
    "SourceSpec",
    "TrainLoader",
    "collate",
    "eligible_anchors",
    "hash_files",
    "load_samples",
    "open_source",
    "read_records",
    "render",
    "sample_anchors",
]


def __getattr__(name: str) -> object:
    if name == "DraftingData":  # needs lightning, which takes seconds to import
        from treespark.data.datamodule import DraftingData

        return DraftingData
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
