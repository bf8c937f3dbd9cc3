"""Building a cache: shard by shard, resumable, by several processes, and never without room for it."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from treespark.features.identity import FeatureIdentity
from treespark.features.shards import Shard, compute, write_shard
from treespark.features.source import unique_documents
from treespark.features.store import CacheIndex, Layout, list_shards, locked
from treespark.target import Target

_log = logging.getLogger(__name__)
_TIMED = 12  # documents that a plan runs the target over


@dataclass(frozen=True)
class CachePlan:
    """What a cache will cost.

    Attributes:
        identity: Of its features.
        num_documents: Documents, each counted once.
        num_repeated: Documents that are there already and are not stored again.
        num_tokens: Tokens.
        num_bytes: On disk.
        num_shards: Files.
        tokens_per_second: Measured on a sample, 0 if nothing was measured.
        seconds: For all shards, in one process.
        free: Bytes free where the cache will be.
    """

    identity: FeatureIdentity
    num_documents: int
    num_repeated: int
    num_tokens: int
    num_bytes: int
    num_shards: int
    tokens_per_second: float
    seconds: float
    free: int


@dataclass(frozen=True)
class CacheSummary:
    """What a call of `build_cache` did.

    Attributes:
        folder: The cache.
        num_shards: Shards of the whole cache.
        num_built: Shards that this call wrote.
        num_reused: Shards of this part that were there, with the right checksum.
        num_missing: Shards that other parts still have to write.
        num_tokens: Tokens of the whole cache.
        num_bytes: Bytes of the whole cache; planned ones while shards are missing.
        seconds: Spent on the shards.
    """

    folder: str
    num_shards: int
    num_built: int
    num_reused: int
    num_missing: int
    num_tokens: int
    num_bytes: int
    seconds: float


class CacheBuilder:
    """Features of a target on given documents, for one folder.

    Args:
        target: The target.
        layer_ids: Its tapped layers.
        documents: Token ids [S] of each document; repeated ones are stored once.
        folder: The cache.
        dtype: Of the stored numbers; None takes the target's own.
        shard_bytes: Size of a shard; a kill loses one shard's work at most.
        rendering: What the documents' tokens depend on, kept to explain differences.

    Raises:
        ValueError: When there are no documents, or for an unknown dtype.
    """

    def __init__(
        self,
        target: Target,
        layer_ids: Sequence[int],
        documents: Iterable[Tensor],
        folder: str | Path,
        dtype: str | None = None,
        shard_bytes: int = 2**28,
        rendering: dict[str, Any] | None = None,
    ) -> None:
        given = list(documents)
        unique = unique_documents(given)
        if not unique:
            raise ValueError("There are no documents to build a feature cache for.")
        self.target, self.folder = target, Path(folder).expanduser()
        self.identity = FeatureIdentity.of(target, layer_ids, dtype)
        self.num_repeated = len(given) - len(unique)
        self._documents = list(unique.values())
        lengths = [len(ids) for ids in self._documents]
        self.layout = Layout.of(list(unique), lengths, self.identity.bytes_per_token, shard_bytes)
        self._index = CacheIndex(self.identity, target.spec.name, dict(rendering or {}), self.layout.content())

    def plan(self, num_timed: int = _TIMED) -> CachePlan:
        """Counts tokens and bytes and times the target on a sample; writes nothing.

        Args:
            num_timed: Documents of evenly spread lengths that the target runs over; 0 leaves the time out.
        """
        shards, layout = range(self.layout.num_shards), self.layout
        rate = self._tokens_per_second(num_timed) if num_timed > 0 else 0.0
        tokens = layout.num_tokens(shards)
        return CachePlan(
            self.identity,
            len(layout.keys),
            self.num_repeated,
            tokens,
            layout.num_bytes(shards),
            layout.num_shards,
            rate,
            tokens / rate if rate else 0.0,
            free_bytes(self.folder),
        )

    def _tokens_per_second(self, count: int) -> float:
        by_length = sorted(self._documents, key=len)
        count = min(count, len(by_length))
        chosen = [by_length[(2 * i + 1) * len(by_length) // (2 * count)] for i in range(count)]
        compute(self.target, self.identity, chosen[-1])  # the first call of a device allocates
        started = time.perf_counter()
        for ids in chosen:
            compute(self.target, self.identity, ids).cpu()
        return sum(map(len, chosen)) / (time.perf_counter() - started)

    def build(
        self, part: tuple[int, int] = (1, 1), advance: Callable[[int, bool], None] = lambda tokens, reused: None
    ) -> CacheSummary:
        """Writes the shards of a part that are missing, and the index once all shards of all parts are there.

        Args:
            part: (i, n): of n processes, this one has the shards i - 1, i - 1 + n, ... They write into one folder, or
                into several whose files are put together afterwards; a last call without a part then lists them.
            advance: Called with the tokens of each shard that is done, and whether it was there already.

        Raises:
            ValueError: When the disk has no room, the folder holds another cache or other files, or another process
                builds this part.
        """
        number, count = part
        if not 1 <= number <= count:
            raise ValueError(f"part: expected i/n with 1 <= i <= n, got {number}/{count}.")
        mine = range(number - 1, self.layout.num_shards, count)
        self._check_folder()
        absent = [shard for shard in mine if not self._path(shard).is_file()]
        self._check_room(absent)
        self.folder.mkdir(parents=True, exist_ok=True)
        busy = f"{self.folder}: part {number}/{count} is being built by another process."
        scratch = self.folder / f".part-{number}-of-{count}"
        scratch.mkdir(exist_ok=True)
        with locked(scratch, busy):
            for leftover in scratch.iterdir():  # of a kill
                leftover.unlink()
            with locked(self.folder):
                self._check_folder()
                if not (self.folder / "index.json").exists():
                    self._index.write(self.folder)
            summary = self._build(mine, scratch, advance)
            scratch.rmdir()
        return summary

    def _build(self, mine: range, scratch: Path, advance: Callable[[int, bool], None]) -> CacheSummary:
        started, num_built = time.monotonic(), 0
        for shard in mine:
            reused = self._is_done(shard)
            if not reused:
                documents = [self._documents[number] for number in self.layout.documents(shard)]
                rows = [compute(self.target, self.identity, ids).cpu() for ids in documents]
                write_shard(self._path(shard), self.identity, documents, rows, scratch)
                num_built += 1
            advance(self.layout.num_tokens([shard]), reused)
        seconds = time.monotonic() - started
        every = range(self.layout.num_shards)
        num_missing = sum(not self._path(shard).is_file() for shard in every)
        num_bytes = self.layout.num_bytes(every)
        with locked(self.folder):
            entries = list_shards(self.folder, self.layout)
            if entries is not None:
                num_bytes = sum(entry["num_bytes"] for entry in entries)
                begun = CacheIndex.read(self.folder)  # whose words on target and rendering stay
                replace(begun, num_bytes=num_bytes, shards=entries).write(self.folder)
        return CacheSummary(
            str(self.folder),
            len(every),
            num_built,
            len(mine) - num_built,
            num_missing,
            self.layout.num_tokens(every),
            num_bytes,
            seconds,
        )

    def _path(self, shard: int) -> Path:
        return self.folder / self.layout.file(shard)

    def _is_done(self, shard: int) -> bool:
        """Whether a shard is there with the right documents and checksum; a damaged one is said and built again."""
        path = self._path(shard)
        if not path.is_file():
            return False
        wanted = [self.layout.keys[number] for number in self.layout.documents(shard)]
        try:
            found = Shard(path)
            if found.identity == self.identity and found.keys == wanted and found.is_intact():
                return True
        except ValueError:
            pass
        _log.warning("%s is damaged or belongs to another cache; it is built again", path)
        return False

    def _check_folder(self) -> None:
        """Refuses a folder that holds something else."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"output: {self.folder} is a file; give the name of a folder.")
        try:
            CacheIndex.read(self.folder).check_same(self._index, self.folder)
        except FileNotFoundError:
            if not self.folder.is_dir():
                return
            others = [path.name for path in self.folder.iterdir() if not path.name.startswith((".", "shard-"))]
            if others:
                raise ValueError(
                    f"output: {self.folder} holds other files ({', '.join(sorted(others)[:3])}); give a folder of its "
                    "own."
                ) from None

    def _check_room(self, shards: Sequence[int]) -> None:
        needed, free = self.layout.num_bytes(shards), free_bytes(self.folder)
        if needed > free:
            raise ValueError(
                f"The feature cache needs {readable(needed)} more, {self.folder} has {readable(free)} free. Give "
                "another --output, a smaller --dtype (float16, bfloat16) or less data, or build it in parts on several "
                "disks."
            )


def free_bytes(folder: Path) -> int:
    """Bytes free on the disk where a folder is or would be."""
    place = folder.expanduser().absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def readable(num_bytes: float) -> str:
    """A number of bytes for people.

    >>> readable(3 * 2**20)
    '3.00 MiB'
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    power = 0
    while num_bytes >= 1024 and power < len(units) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.0f} B" if power == 0 else f"{num_bytes:.2f} {units[power]}"
