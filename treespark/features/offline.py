"""Features from a cache that `treespark cache build` wrote: the target's layers never run in training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from treespark.features.identity import FeatureIdentity, document_key
from treespark.features.shards import Shard
from treespark.features.source import Stored, unique_documents
from treespark.features.store import CacheIndex
from treespark.target import Target


class Offline(Stored):
    """Reads memory-mapped shards; a document that they do not hold is an error, never computed silently.

    Args:
        folder: The cache, from `treespark cache build`.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self._index: CacheIndex
        self._shards: list[Shard] = []
        self._places: dict[bytes, tuple[int, int]] = {}

    def open(self, target: Target, layer_ids: Sequence[int]) -> None:
        """Opens the cache.

        Raises:
            FileNotFoundError: When there is none.
            ValueError: When it is not finished, is damaged, or belongs to another target or other layers.
        """
        super().open(target, layer_ids)
        folder = Path(self.folder).expanduser()
        index = CacheIndex.read(folder)
        index.check_complete(folder)
        difference = index.identity.differences(FeatureIdentity.of(target, layer_ids, index.identity.dtype))
        if difference:
            raise ValueError(
                f"The feature cache {folder} was built for something else: it differs in {difference}. Build another "
                "one (treespark cache build), or set model.features to Online."
            )
        self._index, self.identity = index, index.identity
        self._shards = [Shard(folder / entry["file"]) for entry in index.shards]
        for number, shard in enumerate(self._shards):
            if shard.identity != index.identity or shard.sha256 != index.shards[number]["sha256"]:
                raise ValueError(
                    f"{shard.path} is not the shard that the index names. Run treespark cache build again."
                )
        self._places = {
            key: (number, place) for number, shard in enumerate(self._shards) for place, key in enumerate(shard.keys)
        }

    def check(self, documents: Iterable[Tensor], rendering: dict[str, Any] | None = None) -> None:
        """Looks for every training document.

        Raises:
            ValueError: When some are missing, with their number and what differs.
        """
        unique = unique_documents(documents)
        self._require(unique, "training documents", rendering)

    def _require(self, documents: dict[bytes, Tensor], words: str, rendering: dict[str, Any] | None = None) -> None:
        missing = sum(key not in self._places for key in documents)
        if missing == 0:
            return
        difference = self._index.rendering_differences(rendering) if rendering else ""
        reason = f" Its documents were rendered with another {difference}." if difference else ""
        raise ValueError(
            f"{missing} of {len(documents)} {words} are missing in the feature cache {self.folder}.{reason} Build a "
            "cache for this data (treespark cache build), or set model.features to Hybrid or Online."
        )

    def _fetch(self, documents: list[Tensor]) -> list[Tensor]:
        keys = [document_key(ids) for ids in documents]
        self._require(dict(zip(keys, documents, strict=True)), "documents of a batch")
        self.num_found += len(keys)
        places = [self._places[key] for key in keys]
        return [self._shards[shard].read(place) for shard, place in places]
