"""Where prompts come from: a JSONL file, or a data set that Hugging Face ``datasets`` reads.

A source is a path, a hub id (``owner/name``) or a mapping with the options of :class:`Source`::

    data.train: answers.jsonl
    data.train: {dataset: openai/gsm8k, name: main, columns: {prompt: question}, limit: 2000}
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from treespark.data.prompts import (
    CONTENT,
    DataError,
    Problems,
    PromptRecord,
    check_fields,
    check_file,
    hash_files,
    load_line,
)

Kind = Literal["jsonl", "parquet", "arrow", "disk", "folder", "hub"]
Row = tuple[int, bytes | dict[str, Any]]  # number from 1, and the line or the row

_CARRIED = ("response", "response_ids", "finish_reason", "id", "category", "source")  # columns that are kept by name
_FILE_ENDING = re.compile(r"\.(jsonl?|parquet|arrow|ya?ml|txt|csv)$")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SHUFFLE_BUFFER = 10_000  # rows of a stream among which the next one is drawn


class PromptSource(ABC):
    """Prompts in a fixed order.

    Attributes:
        label: what reports call it.
    """

    label: str

    @abstractmethod
    def records(self, problems: Problems) -> Iterator[PromptRecord]:
        """Yield the checked prompts.

        Args:
            problems: what to do with lines or rows that cannot be used.

        Raises:
            FileNotFoundError: there is no such file.
            DataError: a line cannot be used and ``problems`` stops at it.
            ValueError: the data set cannot be read, or lacks a column.
        """

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Hash of the content: of a file's bytes, else of the prompts and the options that chose them."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The source as JSON values, for the record of a run."""

    @property
    def files(self) -> list[str]:
        """The JSONL files it is made of, if it is nothing but them."""
        return []

    @property
    def parts(self) -> list[PromptSource]:
        """What is read and reported by itself."""
        return [self]


class Source(PromptSource):
    """One file or data set.

    Args:
        dataset: a JSONL, parquet or arrow file; a folder that ``Dataset.save_to_disk`` wrote or that holds data files;
            or a hub id (``owner/name``).
        name: configuration of the data set.
        split: which part of the data set; ``train`` unless given.
        revision: branch, tag or commit on the hub. A commit makes a run repeatable.
        streaming: read rows as they are needed instead of downloading all first.
        columns: our field -> column, such as ``{prompt: question}`` or ``{messages: chat}``. Of a data set, columns
            that are not named here are dropped unless they are called as our fields are.
        where: column -> value or values: other rows are left out.
        category: written into each prompt as its category.
        limit: use the first so many usable prompts only.
        weight: share within a mixture.

    Raises:
        ValueError: an option is out of range or has no meaning for the kind of source.
        FileNotFoundError: there is neither such a file nor can it be a hub id.
    """

    def __init__(
        self,
        dataset: str,
        name: str | None = None,
        split: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
        columns: Mapping[str, str] | None = None,
        where: Mapping[str, Any] | None = None,
        category: str | None = None,
        limit: int | None = None,
        weight: float = 1.0,
    ) -> None:
        self.dataset, self.name, self.split, self.revision = dataset, name, split, revision
        self.streaming, self.category, self.limit, self.weight = bool(streaming), category, limit, weight
        self.columns, self.where = dict(columns or {}), dict(where or {})
        if limit is not None and limit < 1:
            raise ValueError(f"{dataset}: limit must be at least 1, got {limit}.")
        if not 0 < weight < float("inf"):
            raise ValueError(f"{dataset}: weight must be above 0, got {weight}.")
        self.kind: Kind = _kind_of(dataset)
        no_meaning = {
            "jsonl": ("name", "split", "revision", "streaming"),
            "parquet": ("name", "split", "revision"),
            "arrow": ("name", "split", "revision"),
            "disk": ("name", "revision"),
            "folder": ("revision",),
            "hub": (),
        }[self.kind]
        if given := [option for option in no_meaning if getattr(self, option)]:
            words = _WORDS[self.kind]
            raise ValueError(f"{dataset}: {' and '.join(given)} mean nothing for a local {words}. Drop them.")
        self.label = dataset
        if self.kind not in ("jsonl", "parquet", "arrow"):
            self.label += f"{f'/{name}' if name else ''}[{split or 'train'}]"
        self._loaded: Any = None
        self._sha256: str | None = None

    # What is read ---------------------------------------------------------------------------------------------------

    def records(self, problems: Problems) -> Iterator[PromptRecord]:
        """Yield the prompts in the order of the file or data set."""
        digest, num_used = hashlib.sha256(), 0
        for record in self._checked(self._rows(), problems):
            digest.update(canonical([record.line, record.fields]))
            num_used += 1
            yield record
            if num_used == self.limit:
                break
        if self.kind != "jsonl" and num_used:
            self._sha256 = self._with_options(digest.hexdigest())

    def shuffled(self, seed: int, problems: Problems) -> Iterator[PromptRecord]:
        """Yield the prompts in an order that the seed decides; of a data set, rows are read when they are reached.

        A stream is shuffled through a buffer, without a limit; all else is permuted.

        Args:
            seed: seed of the order.
            problems: as in ``records``.
        """
        if self.limit is None and self.kind != "jsonl":
            data = self._load()
            rows: Iterable[Row]
            if self.streaming:
                numbered = data.map(lambda row, i: row | {_NUMBER: i + 1}, with_indices=True)
                mixed = numbered.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
                rows = ((row.pop(_NUMBER), row) for row in mixed)
            else:
                rows = ((i + 1, data[i]) for i in permutation(len(data), seed))
            yield from self._checked(rows, problems)
            return
        records = list(self.records(problems))
        yield from (records[i] for i in permutation(len(records), seed))

    def _checked(self, rows: Iterable[Row], problems: Problems) -> Iterator[PromptRecord]:
        for number, raw in rows:
            try:
                fields = load_line(raw, self.label, number) if isinstance(raw, bytes) else raw
                if self._is_wanted(fields):
                    record = check_fields(self._renamed(fields, number), self.label, number)
                else:
                    continue
            except DataError as error:
                problems.add(error)
                continue
            yield record

    def _rows(self) -> Iterator[Row]:
        if self.kind != "jsonl":
            yield from enumerate(self._load(), start=1)
            return
        with check_file(self.dataset).open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                if raw.strip():
                    yield number, raw

    def _is_wanted(self, fields: Mapping[str, Any]) -> bool:
        return all(
            fields.get(column) in (wanted if isinstance(wanted, list) else [wanted])
            for column, wanted in self.where.items()
        )

    def _renamed(self, fields: Mapping[str, Any], number: int) -> dict[str, Any]:
        """The row under our names; of a JSONL line, other fields stay."""
        missing = [column for column in self.columns.values() if column not in fields]
        if missing:
            raise DataError(f"{self.label}:{number}: has no field '{missing[0]}' (columns names it).")
        dropped = {*self.columns.values(), *(CONTENT if self._content() else ())}
        kept = {key: value for key, value in fields.items() if key not in dropped}
        kept |= {ours: fields[column] for ours, column in self.columns.items()}
        if self.kind != "jsonl":
            kept = {key: value for key, value in kept.items() if key in self.columns or key in (*CONTENT, *_CARRIED)}
            kept |= {key: _as_turns(kept[key]) for key in ("messages", "conversations") if key in kept}
            _check_json(kept, f"{self.label}:{number}")
        return kept if self.category is None else kept | {"category": self.category}

    def _content(self) -> list[str]:
        """The fields with content that ``columns`` names."""
        return [ours for ours in self.columns if ours in CONTENT]

    # Data sets ------------------------------------------------------------------------------------------------------

    def _load(self) -> Any:
        """The data set with the columns that are needed, opened once."""
        if self._loaded is None:
            opened = _open(self)
            self._loaded = opened.select_columns(self._needed(_column_names(opened)))
        return self._loaded

    def _needed(self, names: Sequence[str]) -> list[str]:
        """The columns to read.

        Raises:
            ValueError: a named column is not there, or nothing says which one holds the prompt.
        """
        listed = f"The data set has the columns {', '.join(names)}."
        for option, columns in (("columns", self.columns.values()), ("where", self.where)):
            for column in columns:
                if column not in names:
                    raise ValueError(f"{self.label}: {option} names the unknown column '{column}'. {listed}")
        content = [] if self._content() else [key for key in CONTENT if key in names]
        if not self._content() and len(content) != 1:
            found = f"both {' and '.join(content)}" if content else "none of prompt, messages and conversations"
            raise ValueError(
                f"{self.label}: found {found}; say which column holds the prompt, as in columns: {{prompt: "
                f"{content[0] if content else names[0]}}}. {listed}"
            )
        carried = [key for key in _CARRIED if key in names]
        return list(dict.fromkeys([*content, *self.columns.values(), *self.where, *carried]))

    # What is recorded -----------------------------------------------------------------------------------------------

    @property
    def sha256(self) -> str:
        """Of a file's bytes; of a data set, of its usable rows; with the options where they choose or rename."""
        if self.kind == "jsonl":
            return self._with_options(hash_files([self.dataset]))
        if self._sha256 is None:
            for _ in self.records(Problems("skip")):
                pass
        return self._sha256 or self._with_options("")

    def _with_options(self, digest: str) -> str:
        options = {key: getattr(self, key) for key in ("columns", "where", "category", "limit") if getattr(self, key)}
        return hashlib.sha256(canonical([options, digest])).hexdigest() if options else digest

    @property
    def files(self) -> list[str]:
        """The path of a JSONL file without options that change what is in it."""
        is_plain = self.kind == "jsonl" and not (self.columns or self.where or self.category or self.limit)
        return [self.dataset] if is_plain else []

    def describe(self) -> dict[str, Any]:
        """The options that were given, and the hash."""
        return self.options() | {"sha256": self.sha256}

    def options(self) -> dict[str, Any]:
        """The options that were given, the weight apart."""
        names = ("dataset", "name", "split", "revision", "streaming", "columns", "where", "category", "limit")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


_WORDS = {
    "jsonl": "JSONL file",
    "parquet": "parquet file",
    "arrow": "arrow file",
    "disk": "folder of save_to_disk",
    "folder": "folder",
    "hub": "data set of the hub",
}
_NUMBER = "__number__"  # of a streamed row, kept through the shuffle


def permutation(count: int, seed: int) -> list[int]:
    """The order of ``count`` things that a seed decides."""
    import numpy as np

    return list(map(int, np.random.default_rng(seed).permutation(count)))


def _kind_of(dataset: str) -> Kind:
    path = Path(dataset).expanduser()
    if path.is_dir():
        is_saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
        return "disk" if is_saved else "folder"
    if path.exists():
        endings: dict[str, Kind] = {".parquet": "parquet", ".arrow": "arrow"}
        return endings.get(path.suffix, "jsonl")
    if _HUB_ID.fullmatch(dataset) and not _FILE_ENDING.search(dataset):
        return "hub"
    check_file(dataset)  # raises
    raise AssertionError


def _open(source: Source) -> Any:
    """The data set of a source, by ``datasets``.

    Raises:
        ValueError: it cannot be read.
    """
    import datasets

    path, split = str(Path(source.dataset).expanduser()), source.split or "train"
    try:
        if source.kind == "disk":
            saved = datasets.load_from_disk(path)
            if isinstance(saved, datasets.DatasetDict):
                if split not in saved:
                    raise ValueError(f"the splits are {', '.join(saved)}; '{split}' is none of them")
                saved = saved[split]
            elif source.split:
                raise ValueError("the folder holds one data set without splits; drop 'split'")
            return saved.to_iterable_dataset() if source.streaming else saved
        options: dict[str, Any] = {"split": split, "streaming": source.streaming}
        if source.kind in ("parquet", "arrow"):
            return datasets.load_dataset(source.kind, data_files=path, **options)
        if source.kind == "hub":
            path, options["revision"] = source.dataset, source.revision
        return datasets.load_dataset(path, source.name, **options)
    except Exception as error:  # builders raise what their authors chose, and so does the network
        raise _explained(source, error) from error


def _explained(source: Source, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()) or type(error).__name__
    if source.kind != "hub":
        return ValueError(f"{source.label}: cannot be read as a {_WORDS[source.kind]}: {reason}")
    hint = f"There is no such file or folder here ({Path.cwd()}), so it was looked for on the Hugging Face hub."
    if isinstance(error, ConnectionError):
        hint += " The hub cannot be reached: check the network, or give a local file or folder."
    return ValueError(f"{source.label}: cannot be read: {reason.rstrip('.')}. {hint}")


def _column_names(data: Any) -> list[str]:
    """Column names; a stream that does not know its own is asked for its first row."""
    names = data.column_names
    return list(names if names is not None else next(iter(data), {}))


def _as_turns(value: object) -> object:
    """A conversation as a list: arrow may give a struct of lists, and fills keys that a turn lacks with None."""
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]
    if isinstance(value, list):
        return [{k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else turn for turn in value]
    return value


def _check_json(fields: Mapping[str, Any], where: str) -> None:
    for key, value in fields.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise DataError(f"{where}: column '{key}' holds {type(value).__name__}, not text or numbers.") from None


def canonical(value: object) -> bytes:
    """JSON values as bytes, for hashes."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
