"""Where suites come from: a JSONL file, a folder of such files, or a YAML that names files and data sets of the hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treespark.data.prompts import DataError, check_file, hash_files
from treespark.registry import unknown


@dataclass(frozen=True)
class SuiteSource:
    """A suite that is about to be read.

    One of `path`, `hub` and `url` says where its rows are. Rows are JSON objects as prompt files hold them, unless
    `column` or `template` says what the prompt is.

    Attributes:
        name: What the tables call it.
        category: Suites of one category are also averaged alone.
        path: A JSONL file.
        hub: A data set's id on the Hugging Face hub.
        url: An https address of a JSONL file, which is kept in the cache.
        revision: Of the hub's data set, a commit at best.
        config: Configuration of the hub's data set.
        split: Split of the hub's data set.
        files: JSONL files inside the hub's data set, instead of a configuration and a split.
        column: The column that holds the prompt, or a list of turns of which the first is the prompt.
        template: The prompt, with {column} where a column's text goes.
        id: The column that identifies a row.
        where: Values that columns must have; other rows are left out.
        limit: The first so many prompts; None takes all.
    """

    name: str
    category: str = ""
    path: str = ""
    hub: str = ""
    url: str = ""
    revision: str = "main"
    config: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()
    column: str = ""
    template: str = ""
    id: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None

    @property
    def place(self) -> str:
        """Where the rows are, as errors and results name it."""
        if not self.hub:
            return self.path or self.url
        parts = (self.config, *self.files, *([] if self.files else [self.split]))
        return f"{self.hub}@{self.revision}:{'/'.join(part for part in parts if part)}"

    def lines(self, limit: int | None = None) -> tuple[list[tuple[int, bytes | str]], str]:
        """Reads the suite.

        Args:
            limit: The first so many prompts; with the suite's own limit the smaller counts.

        Returns:
            (number, line) of each prompt, and a SHA-256: of the file as it is, or of the lines that were made of rows.

        Raises:
            FileNotFoundError: When there is no such file.
            DataError: For a row without the column.
            ValueError: When the data set cannot be had.
        """
        limits = [number for number in (limit, self.limit) if number is not None]
        most = min(limits) if limits else None
        found: list[tuple[int, bytes | str]] = []
        mapped = bool(self.column or self.template or self.where)
        for number, row in self._rows():
            if most is not None and len(found) >= most:
                break
            line = self._line(row, number) if mapped or self.hub else row
            if line is not None:
                found.append((number, line))
        if self.path and not mapped:
            return found, hash_files([self.path])
        digest = hashlib.sha256()
        for _, line in found:
            digest.update(line if isinstance(line, bytes) else line.encode())
            digest.update(b"\n")
        return found, digest.hexdigest()

    def _rows(self) -> Iterator[tuple[int, Any]]:
        """Yields (number, row): lines of files, or objects of a data set."""
        if self.hub and not self.files:
            yield from enumerate(_hub_rows(self), start=1)
            return
        number = 0
        for file in [_hub_file(self, name) for name in self.files] or [Path(self.path or _download(self.url))]:
            for raw in check_file(file).read_bytes().split(b"\n"):
                number += 1
                if raw.strip():
                    yield number, raw

    def _line(self, row: Any, number: int) -> str | None:
        """Turns a row into a line with `prompt`, or None where it is left out."""
        if isinstance(row, (bytes, str)):
            try:
                row = json.loads(row)
            except ValueError as error:
                raise DataError(f"{self.place}:{number}: not valid JSON ({error}).") from None
        if not isinstance(row, Mapping):
            raise DataError(f"{self.place}:{number}: expected a JSON object.")
        row = dict(row)
        if any(self._value(row, key, number) != value for key, value in self.where.items()):
            return None
        if not (self.column or self.template):
            return json.dumps(row)
        if self.template:
            pieces = re.split(r"\{(\w+)\}", self.template)
            pieces[1::2] = [str(self._value(row, key, number) or "") for key in pieces[1::2]]
            text = "".join(pieces).strip()
        else:
            text = _first_turn(self._value(row, self.column, number))
        return json.dumps({"id": self._value(row, self.id, number) if self.id else number, "prompt": text})

    def _value(self, row: dict[str, Any], key: str, number: int) -> Any:
        if key not in row:
            raise DataError(f"{self.place}:{number}: no column '{key}'. Available: {', '.join(row)}.")
        return row[key]


def find_sources(names: Sequence[str]) -> list[SuiteSource]:
    """Turns what the user named into suites, without reading their prompts.

    Args:
        names: JSONL files; folders, whose JSONL files are suites of the category "general", those in a folder
            "writing…" of the category "writing", and those in other folders of the category called after the folder;
            and YAML files with a list `suites`, whose entries have the fields of `SuiteSource` (paths relative to the
            YAML).

    Raises:
        FileNotFoundError: For a name that does not exist, or a file that a YAML names.
        ValueError: For a folder without JSONL files, or a YAML that is not such a list.
    """
    found: list[SuiteSource] = []
    for name in names:
        place = Path(name).expanduser()
        if place.is_dir():
            found += _of_folder(place)
        elif place.suffix in (".yaml", ".yml"):
            found += _of_yaml(place)
        else:
            found.append(SuiteSource(place.stem, path=str(check_file(place))))
    for source in found:
        if source.path:
            check_file(source.path)  # before the models are loaded, which takes a while
    return found


def _of_folder(folder: Path) -> list[SuiteSource]:
    files = sorted(folder.rglob("*.jsonl"), key=lambda file: (len(file.parts), file))
    if not files:
        raise ValueError(f"Nothing to evaluate: the folder {folder} holds no JSONL file.")

    def category(file: Path) -> str:
        inner = file.relative_to(folder).parts[:-1]
        if not inner:
            return "general"
        return "writing" if inner[0].startswith("writing") else inner[0]

    return [SuiteSource(file.stem, category(file), str(file)) for file in files]


def _of_yaml(file: Path) -> list[SuiteSource]:
    import yaml

    try:
        record = yaml.safe_load(check_file(file).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not valid YAML ({' '.join(str(error).split())}).") from None
    entries = record.get("suites") if isinstance(record, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{file}: nothing to evaluate, expected a list `suites` with at least one entry.")
    for key in record:
        if key != "suites":
            raise ValueError(f"{file}: {unknown('key', str(key), ['suites'])}")
    return [_of_entry(entry, file, number) for number, entry in enumerate(entries, start=1)]


def _of_entry(entry: Any, file: Path, number: int) -> SuiteSource:
    where = f"{file}, suite {number}"
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise ValueError(f"{where}: expected an entry with a name, got {entry!r}.")
    fields = SuiteSource.__dataclass_fields__
    for key, value in entry.items():
        if key not in fields:
            raise ValueError(f"{where} ({entry['name']}): {unknown('key', str(key), list(fields))}")
        kind = {"limit": int, "where": dict, "files": list}.get(key, str)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(f"{where} ({entry['name']}): {key} must be of type {kind.__name__}, got {value!r}.")
    for name in entry.get("files") or ():
        if not isinstance(name, str):
            raise ValueError(f"{where} ({entry['name']}): files must name files, got {name!r}.")
    given = [key for key in ("path", "hub", "url") if entry.get(key)]
    if len(given) != 1:
        raise ValueError(f"{where} ({entry['name']}): expected one of path, hub and url, got {given or 'none'}.")
    if entry.get("files") and not entry.get("hub"):
        raise ValueError(f"{where} ({entry['name']}): files are those of a hub's data set; a local file is its `path`.")
    if entry.get("column") and entry.get("template"):
        raise ValueError(f"{where} ({entry['name']}): give column or template, not both.")
    if entry.get("limit") is not None and entry["limit"] < 1:
        raise ValueError(f"{where} ({entry['name']}): limit must be at least 1, got {entry['limit']}.")
    if entry.get("url") and not entry["url"].startswith("https://"):
        raise ValueError(f"{where} ({entry['name']}): url must begin with https://, got {entry['url']}.")
    options = {key: value for key, value in entry.items() if value is not None}
    options["files"] = tuple(options.get("files", ()))
    if entry.get("path"):
        options["path"] = str(file.parent / Path(entry["path"]).expanduser())
    return SuiteSource(**options)


def _first_turn(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        value = value[0]
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _hub_rows(source: SuiteSource) -> Iterable[Mapping[str, Any]]:
    from datasets import load_dataset

    try:
        rows: Iterable[Mapping[str, Any]] = load_dataset(
            source.hub, source.config, split=source.split, revision=source.revision
        )
    except Exception as error:  # of many kinds, by what the network and the hub answer
        raise _unavailable(source.name, source.place, error) from error
    return rows


def _hub_file(source: SuiteSource, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source.hub, name, repo_type="dataset", revision=source.revision))
    except Exception as error:
        raise _unavailable(source.name, source.place, error) from error


def _download(url: str) -> Path:
    """The file behind an address, fetched once into the cache."""
    from urllib.request import urlopen

    from treespark.target.loading import cache_folder

    file = cache_folder() / "suites" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.jsonl"
    if not file.is_file():
        try:
            with urlopen(url, timeout=60) as stream:
                data = stream.read()
        except OSError as error:
            raise _unavailable(url, url, error) from error
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(data)
        part.replace(file)
    return file


def _unavailable(name: str, place: str, error: Exception) -> ValueError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(
        f"The suite '{name}' cannot be had from {place} ({type(error).__name__}: {reason}). Check the name and the "
        "network, or give a local JSONL file with `path`."
    )
