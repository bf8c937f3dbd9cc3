"""The files of generated answers: finished, partial, and the record beside them, safe from kills at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from treespark.data.prompts import hash_files
from treespark.environment import versions


class AnswerStore:
    """One output file and its companions.

    ``OUTPUT.partial`` grows by whole units under a header with the identity; a unit is kept or redone as a whole.
    The last writes are, in this order:
    the record ``OUTPUT.meta.json`` (with the hash of the output), the output by renaming, then the partial file goes.
    Whatever a kill leaves behind is either complete or continued.

    Args:
        output: the file to write.
        identity: what the answers depend on; JSON values.
        overwrite: replace an output of another identity.
        writer: the command that writes it, for messages.
    """

    def __init__(
        self, output: Path, identity: dict[str, Any], overwrite: bool, writer: str = "treespark generate"
    ) -> None:
        self.writer = writer
        self.output = output
        self.meta = output.with_name(output.name + ".meta.json")
        self.partial = output.with_name(output.name + ".partial")
        self.identity = identity
        self.overwrite = overwrite
        self.answers: dict[int, dict[str, Any]] = {}
        self._stream: Any = None

    def finished(self) -> dict[str, Any] | None:
        """The record of a complete output with this identity, or None if there is work to do.

        Raises:
            ValueError: an output stands there that must not be replaced without being asked.
        """
        if self.overwrite or not self.output.exists():
            return None
        try:
            meta = json.loads(self.meta.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            meta = {}
        if not meta:
            raise ValueError(
                f"{self.output} exists and was not written by {self.writer}. Use --overwrite, or another output."
            )
        self._check_same(meta.get("identity", {}), str(self.output))
        if meta.get("output_sha256") != hash_files([self.output]):
            raise ValueError(f"{self.output} was changed after it was written. Use --overwrite, or another output.")
        self.partial.unlink(missing_ok=True)
        return dict(meta)

    def _check_same(self, other: dict[str, Any], what: str) -> None:
        differing = sorted(key for key in {*self.identity, *other} if self.identity.get(key) != other.get(key))
        if differing:
            detail = ", ".join(f"{key}: {other.get(key)!r} there, {self.identity.get(key)!r} now" for key in differing)
            raise ValueError(f"{what} was written with other arguments ({detail}). Use --overwrite, or another output.")

    @contextmanager
    def open(self, units: list[list[int]]) -> Iterator[dict[int, dict[str, Any]]]:
        """The answers of complete units so far, by prompt index; an incomplete tail is dropped.

        Args:
            units: the prompt indices of each unit, in the order of its rows. Units may have been kept in any order.

        Raises:
            ValueError: the partial file belongs to other arguments, or another process is writing it.
        """
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.partial.open("a+b") as stream:
            _lock(stream, self.partial)
            self._stream = stream
            stream.seek(0)
            end = self._read(stream, units)
            stream.truncate(end)
            stream.seek(0, os.SEEK_END)
            if end == 0:
                self._write([{"identity": self.identity}])
            yield self.answers

    def _read(self, stream: Any, units: list[list[int]]) -> int:
        """Length of the file up to the last complete unit; 0 if it has to be begun anew."""
        header = _parse(stream.readline())
        if header is None:
            return 0
        try:
            self._check_same(header.get("identity", {}), str(self.partial))
        except ValueError:
            if self.overwrite:
                return 0
            raise
        end = stream.tell()
        waiting = {unit[0]: unit for unit in units}
        while (first := _parse(stream.readline())) is not None and (unit := waiting.pop(first.get("index", -1), [])):
            rows = [first, *(_parse(stream.readline()) for _ in unit[1:])]
            if [None if row is None else row.get("index") for row in rows] != unit:
                break
            self.answers.update({row.pop("index"): row for row in rows if row is not None})
            end = stream.tell()
        return int(end)

    def append(self, unit: dict[int, dict[str, Any]]) -> None:
        """Keep the answers of one unit, safe from a kill once this returns."""
        self._write([{"index": index, **answer} for index, answer in unit.items()])
        self.answers.update(unit)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self._stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def finish(self, lines: list[str], record: dict[str, Any]) -> None:
        """Put the output and its record in place, each at once."""
        temporary = self.output.with_name(self.output.name + ".tmp")
        _write_synced(temporary, "".join(line + "\n" for line in lines))
        meta = {
            **record,
            "identity": self.identity,
            "output_sha256": hash_files([temporary]),
            "versions": versions(),
            "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        temporary_meta = self.meta.with_name(self.meta.name + ".tmp")
        _write_synced(temporary_meta, json.dumps(meta, indent=2, ensure_ascii=False) + "\n")
        temporary_meta.replace(self.meta)
        temporary.replace(self.output)
        self.partial.unlink()


def _parse(line: bytes) -> dict[str, Any] | None:
    """A whole line's object; None for a torn or foreign line."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _lock(stream: Any, path: Path) -> None:
    """Hold the file until it is closed, also by a kill; systems without such locks go without."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"{path} is being written by another process. Wait for it, or use another output.") from None
