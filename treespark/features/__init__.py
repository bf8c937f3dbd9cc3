"""Where target features come from: computed at every step, read from a cache, or computed once and kept."""

from __future__ import annotations

from treespark.features.build import CacheBuilder, CachePlan, CacheSummary, readable
from treespark.features.hybrid import Hybrid
from treespark.features.identity import FeatureIdentity, document_key
from treespark.features.offline import Offline
from treespark.features.source import FeatureSource, Online, Stored
from treespark.features.store import CacheIndex, damaged_shards

__all__ = [
    "CacheBuilder",
    "CacheIndex",
    "CachePlan",
    "CacheSummary",
    "FeatureIdentity",
    "FeatureSource",
    "Hybrid",
    "Offline",
    "Online",
    "Stored",
    "damaged_shards",
    "document_key",
    "readable",
]
