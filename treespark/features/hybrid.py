"""Features that are computed once and kept, in memory and on disk, up to a limit each."""

from __future__ import annotations

import heapq
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from treespark.features.build import free_bytes, readable
from treespark.features.identity import FeatureIdentity, check_dtype, document_key
from treespark.features.shards import HEADER_BYTES, KEY_BYTES, Shard, compute, write_shard
from treespark.features.source import Stored, unique_documents
from treespark.features.store import locked
from treespark.target import Target
from treespark.target.loading import cache_folder

_log = logging.getLogger(__name__)
_STALE = 3600  # seconds after which an unfinished file has no writer any more
_OURS = re.compile(r"[0-9a-f]{16}/[0-9a-f]{2}/[0-9a-f]{64}\.safetensors")  # nothing else in the folder is ever deleted


class Hybrid(Stored):
    """Computes a document's features when it first comes, and keeps them for later epochs and runs.

    Each document is computed by itself and comes back as it is stored, also the first time, so that a resumed
    training sees the same numbers. Several processes share one folder.

    Args:
        memory: GiB of the host's memory, per process. What comes first stays: an epoch uses each document once, so
            making room would drop what is needed next.
        disk: GiB of the folder, for all targets and runs together; the least recently used documents make room.
        folder: Where documents are kept; None takes `features` in treespark's cache folder.
        dtype: Of the kept numbers: float16, bfloat16 or float32; None takes the target's own.

    Raises:
        ValueError: For limits below 0, or both 0.
    """

    runs_evenly = False

    def __init__(
        self, memory: float = 0.0, disk: float = 20.0, folder: str | None = None, dtype: str | None = None
    ) -> None:
        super().__init__()
        if min(memory, disk) < 0 or memory == disk == 0:
            raise ValueError(
                f"Hybrid: memory and disk are GiB of at least 0, not both 0; got {memory} and {disk}. Use Online to "
                "keep nothing."
            )
        self.memory, self.disk, self.folder = memory, disk, folder
        self.dtype = dtype if dtype is None else check_dtype(dtype)
        self.num_bytes = 0
        self._kept: dict[bytes, Tensor] = {}
        self._files: DocumentFolder | None = None

    def open(self, target: Target, layer_ids: Sequence[int]) -> None:
        """Opens the folder, if the disk is used; see `FeatureSource.open`."""
        super().open(target, layer_ids)
        self.identity = FeatureIdentity.of(target, layer_ids, self.dtype)
        self._kept, self.num_bytes = {}, 0
        if self.disk:
            folder = Path(self.folder).expanduser() if self.folder else cache_folder() / "features"
            self._files = DocumentFolder(folder, self.identity, int(self.disk * 2**30))

    def check(self, documents: Iterable[Tensor], rendering: dict[str, Any] | None = None) -> None:
        """Refuses a disk that is smaller than the limit and than the documents that are not there yet.

        Raises:
            ValueError: With both sizes.
        """
        if self._files is None:
            return
        unique = unique_documents(documents)
        files = self._files
        size = sum(files.size_of(ids) for key, ids in unique.items() if not files.path(key).is_file())
        needed, free = min(size, files.limit - files.usage()), free_bytes(files.root)
        if needed > free:
            raise ValueError(
                f"Hybrid: {readable(needed)} of features are to be kept, {files.root} has {readable(free)} free. Lower "
                "disk, or give another folder."
            )

    def _fetch(self, documents: list[Tensor]) -> list[Tensor]:
        return [self._document(document_key(ids), ids) for ids in documents]

    def _document(self, key: bytes, ids: Tensor) -> Tensor:
        rows = self._kept.get(key)
        if rows is None and self._files is not None:
            rows = self._files.get(key)
        if rows is not None:
            self.num_found += 1
        else:
            rows = compute(self._target, self.identity, ids)
            self.num_computed += 1
            if self._files is not None:
                self._files.put(key, ids, rows)
        size = rows.numel() * rows.element_size()
        if key not in self._kept and self.num_bytes + size <= self.memory * 2**30:
            self._kept[key] = rows.cpu()
            self.num_bytes += size
        return rows


class DocumentFolder:
    """One file per document, shared by processes and bounded in bytes, least recently used out.

    A file's modification time is its last use. Files appear by renaming; sizes are counted under a lock.

    Args:
        root: The folder; the limit is for all of it.
        identity: Of the features; documents of each identity have a folder of their own.
        limit: Bytes.
    """

    def __init__(self, root: Path, identity: FeatureIdentity, limit: int) -> None:
        self.root, self.identity, self.limit = root, identity, limit
        self._counter = root / ".bytes"
        self._oldest: list[tuple[int, str, int]] = []  # a heap of (last use, file, bytes)
        self._started = time.time_ns()
        self._verified: set[bytes] = set()
        self._is_full = self._has_warned = False
        self._unfinished = root / ".unfinished"
        self._unfinished.mkdir(parents=True, exist_ok=True)
        with locked(root / ".lock"):
            self._scan()
            self._make_room(0)  # the limit may have been lowered

    def path(self, key: bytes) -> Path:
        """File of a document."""
        name = key.hex()
        return self.root / self.identity.digest / name[:2] / f"{name}.safetensors"

    def size_of(self, ids: Tensor) -> int:
        """Bytes of a document's file, to about a hundred."""
        return len(ids) * self.identity.bytes_per_token + KEY_BYTES + HEADER_BYTES

    def usage(self) -> int:
        """Bytes in the folder, by the count that all processes keep."""
        try:
            return int(self._counter.read_text())
        except (OSError, ValueError):  # never counted, or torn by a kill
            return self._scan()

    def get(self, key: bytes) -> Tensor | None:
        """Returns the rows of a document and notes its use, or None if it is not here (any more)."""
        path = self.path(key)
        try:
            shard = Shard(path)
            if key not in self._verified and not (shard.keys == [key] and shard.is_intact()):
                raise ValueError(f"{path} is damaged: its content does not have its checksum.")
            rows = shard.read(0)
            os.utime(path)
        except FileNotFoundError:  # never kept, or another process made room
            return None
        except ValueError as error:  # a power cut can leave such a file
            _log.warning("%s It is computed again.", error)
            path.unlink(missing_ok=True)
            return None
        self._verified.add(key)
        return rows

    def put(self, key: bytes, ids: Tensor, rows: Tensor) -> None:
        """Keeps a document, unless it alone passes the limit; a disk that fills up is said once, and nothing kept."""
        path = self.path(key)
        if self._is_full or self.size_of(ids) > self.limit:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._unfinished) as scratch:
                # Written aside first, so that other processes wait for a rename only.
                aside = Path(scratch) / f"whole-{path.name}"
                write_shard(aside, self.identity, [ids], [rows], Path(scratch))
                with locked(self.root / ".lock"):
                    if path.exists():  # another process was faster
                        return
                    size = aside.stat().st_size
                    self._make_room(size)
                    self._counter.write_text(str(self.usage() + size))
                    aside.replace(path)
        except OSError as error:
            self._is_full = True
            _log.warning("Features are computed but no longer kept: %s", error)
            return
        heapq.heappush(self._oldest, (path.stat().st_mtime_ns, str(path), size))
        self._verified.add(key)

    def _scan(self) -> int:
        """Counts what is there, drops what killed writers left, and returns the bytes."""
        for left in self._unfinished.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STALE:
                    shutil.rmtree(left, ignore_errors=True)
        self._oldest = []
        for path in self.root.glob("*/*/*.safetensors"):
            if _OURS.fullmatch(path.relative_to(self.root).as_posix()):
                with suppress(FileNotFoundError):
                    state = path.stat()
                    self._oldest.append((state.st_mtime_ns, str(path), state.st_size))
        heapq.heapify(self._oldest)
        total = sum(size for _, _, size in self._oldest)
        self._counter.write_text(str(total))
        return total

    def _make_room(self, size: int) -> None:
        """Drops the least recently used documents until `size` bytes fit; the caller holds the lock."""
        total, has_scanned = self.usage(), False
        while total + size > self.limit:
            if not self._oldest:
                if has_scanned:
                    break
                total, has_scanned = self._scan(), True
                continue
            last_use, name, _ = heapq.heappop(self._oldest)
            try:
                state = os.stat(name)
            except FileNotFoundError:  # another process dropped and counted it
                continue
            if state.st_mtime_ns > last_use:  # used since
                heapq.heappush(self._oldest, (state.st_mtime_ns, name, state.st_size))
                continue
            self._warn_if_used(last_use)
            os.unlink(name)
            total -= state.st_size
            self._counter.write_text(str(max(0, total)))

    def _warn_if_used(self, last_use: int) -> None:
        if last_use > self._started and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Hybrid: %s hold less than what this run uses, so that features are dropped before they are needed "
                "again. Raise disk; `treespark cache plan` says how much an epoch takes.",
                readable(self.limit),
            )
