"""Several sources as one: one after the other, or drawn by weight; and the specification of sources.

A specification is a path, a hub id, a mapping with the options of :class:`Source`, a list of these (read one after
the other), a mixture, or the name of a YAML file that holds any of these. A mixture::

    mixture:
      - {dataset: math.jsonl, weight: 3}
      - {dataset: owner/code, columns: {prompt: problem}, weight: 4}
    num_prompts: 7000       # null: as many as the shares allow
    seed: 0
"""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from treespark.data.prompts import Problems, PromptRecord, hash_files
from treespark.data.sources import PromptSource, Source, canonical, permutation

SourceSpec = str | dict[str, Any] | list[Any]

_log = logging.getLogger(__name__)


class Concatenation(PromptSource):
    """Sources one after the other.

    Args:
        sources: at least one.
        limit: use the first so many usable prompts only.
    """

    def __init__(self, sources: Sequence[PromptSource], limit: int | None = None) -> None:
        self.sources, self.limit = list(sources), limit
        self.label = ", ".join(source.label for source in sources)
        self._sha256: str | None = None

    def records(self, problems: Problems) -> Iterator[PromptRecord]:
        """Yield the prompts of the first source, then of the next."""
        digest = hashlib.sha256()
        for record in islice((r for source in self.sources for r in source.records(problems)), self.limit):
            digest.update(canonical([record.path, record.line, record.fields]))
            yield record
        self._sha256 = digest.hexdigest()

    @property
    def parts(self) -> list[PromptSource]:
        """The sources, unless a limit spans them."""
        return self.sources if self.limit is None else [self]

    @property
    def files(self) -> list[str]:
        """The JSONL files, if all sources are nothing but them."""
        files = [source.files for source in self.sources]
        return [path for paths in files for path in paths] if all(files) else []

    @property
    def sha256(self) -> str:
        """Of the files' bytes where there is nothing but files (whatever the limit), else of what they gave."""
        if self.files or self.limit is None:
            return hash_sources(self.sources)
        if self._sha256 is None:
            for _ in self.records(Problems("skip")):
                pass
        return str(self._sha256)

    def describe(self) -> dict[str, Any]:
        """Each of the sources."""
        if self.limit is not None:  # the hash is of the first prompts alone: the sources may be streams
            return {
                "sources": [_options(source) for source in self.sources],
                "limit": self.limit,
                "sha256": self.sha256,
            }
        return {"sources": [source.describe() for source in self.sources], "sha256": self.sha256}


class Mixture(PromptSource):
    """Prompts from several sources in fixed shares, in an order that the seed decides.

    The shares are exact up to rounding (largest remainders). Each source is shuffled by the seed and read until its
    share is full; then the shares are interleaved by the seed. The same sources, weights and seed give the same
    prompts in the same order, so that whatever reads them can continue at any of them.

    Args:
        sources: at least one, each with its weight.
        num_prompts: how many are drawn; None takes as many as the shares allow, which reads all sources to their end.
        seed: of the choice and the order.

    Attributes:
        drawn: after the draw, label, weight and number of drawn prompts of each source.

    Raises:
        ValueError: there is no source, or ``num_prompts`` is out of range.
    """

    def __init__(self, sources: Sequence[Source], num_prompts: int | None = None, seed: int = 0) -> None:
        if not sources:
            raise ValueError("A mixture needs at least one source.")
        if num_prompts is not None and num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {num_prompts}.")
        if seed < 0:
            raise ValueError(f"The seed of a mixture must be at least 0, got {seed}.")
        if num_prompts is None and (endless := [source.label for source in sources if source.streaming]):
            raise ValueError(f"num_prompts must be given: {endless[0]} is streamed and would be read to its end.")
        self.sources, self.num_prompts, self.seed = list(sources), num_prompts, seed
        self.label = f"mixture of {', '.join(source.label for source in sources)}"
        self.drawn: list[dict[str, Any]] = []
        self._sha256: str | None = None

    def records(self, problems: Problems) -> Iterator[PromptRecord]:
        """Yield the drawn prompts."""
        yield from self.draw(problems)

    def draw(self, problems: Problems, keep: Callable[[PromptRecord], bool] | None = None) -> list[PromptRecord]:
        """Draw the prompts.

        Args:
            problems: what to do with lines or rows that cannot be used.
            keep: prompts for which it is false are passed over, and others drawn for them.

        Raises:
            ValueError: a source has too few prompts for its share.
        """
        weights = [source.weight for source in self.sources]
        wanted = None if self.num_prompts is None else shares(weights, self.num_prompts)
        pools: list[list[PromptRecord]] = []
        for i, source in enumerate(self.sources):
            kept = (r for r in source.shuffled(self._seed_of(i), problems) if keep is None or keep(r))
            pools.append(list(islice(kept, None if wanted is None else wanted[i])))
        counts = wanted or largest_shares(weights, [len(pool) for pool in pools])
        self._check_enough(pools, counts)
        slots = [i for i, count in enumerate(counts) for _ in range(count)]
        pending = [iter(pool) for pool in pools]
        records = [next(pending[slots[j]]) for j in permutation(len(slots), self.seed)]
        self.drawn = [
            {"source": source.category or source.label, "weight": source.weight, "num_prompts": count}
            for source, count in zip(self.sources, counts, strict=True)
        ]
        _log.info("%s", "; ".join(f"{row['source']}: {row['num_prompts']} prompts" for row in self.drawn))
        rows = [[record.path, record.line, record.fields] for record in records]
        self._sha256 = hashlib.sha256(canonical([self._options(), rows])).hexdigest()
        return records

    def _seed_of(self, index: int) -> int:
        digest = hashlib.sha256(f"{self.seed}/{index}".encode()).digest()
        return int.from_bytes(digest[:7], "big")

    def _check_enough(self, pools: list[list[PromptRecord]], counts: list[int]) -> None:
        total = sum(counts)
        short = [i for i, (pool, count) in enumerate(zip(pools, counts, strict=True)) if len(pool) < max(count, 1)]
        if short:
            i = short[0]
            share = self.sources[i].weight / sum(source.weight for source in self.sources)
            raise ValueError(
                f"{self.sources[i].label}: {len(pools[i])} usable prompts, but its share of {share:.2%} of {total} "
                f"needs {counts[i] or 'at least 1'}. Lower num_prompts to about {int(len(pools[i]) / share)}, leave it "
                "out to draw as many as the shares allow, or change the weights."
            )

    def _options(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "weights": [source.weight for source in self.sources],
        }

    @property
    def sha256(self) -> str:
        """Of the drawn prompts, the weights and the seed."""
        if self._sha256 is None:
            self.draw(Problems("skip"))
        assert self._sha256 is not None
        return self._sha256

    def describe(self) -> dict[str, Any]:
        """Weights, seed and drawn numbers of each source, and its options."""
        sha256 = self.sha256
        options = [source.options() | drawn for source, drawn in zip(self.sources, self.drawn, strict=True)]
        return {"mixture": options, "num_prompts": self.num_prompts, "seed": self.seed, "sha256": sha256}


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in the ratio of the weights that add up to ``total``, by largest remainders.

    >>> shares([29.92, 40.15, 19.94, 9.99], 50_000)
    [14960, 20075, 9970, 4995]
    >>> shares([1, 1, 1], 5)
    [2, 2, 1]
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(value + 1e-9) for value in exact]  # 40.15 % of 50,000 is 20,075, whatever floats make of it
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def largest_shares(weights: Sequence[float], available: Sequence[int]) -> list[int]:
    """The shares of the largest total, rounded to whole prompts, that are all available.

    >>> largest_shares([3, 1], [100, 20])  # of 82, 61.5 and 20.5
    [62, 20]
    """
    # Rounding takes less than one prompt more or less than the exact share.
    total = int(min((count + 1) * sum(weights) / weight for count, weight in zip(available, weights, strict=True)))
    while total and any(n > m for n, m in zip(shares(weights, total), available, strict=True)):
        total -= 1
    return shares(weights, total)


def open_source(spec: SourceSpec | PromptSource, limit: int | None = None) -> PromptSource:
    """The source that a specification describes; nothing is read but YAML files.

    Args:
        spec: see the module's docstring. Text that opens with a bracket is read as YAML.
        limit: use the first so many usable prompts only.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the specification is not one.
    """
    if limit is not None:
        return Concatenation([open_source(spec)], limit)
    if isinstance(spec, PromptSource):
        return spec
    if isinstance(spec, str):
        spec = _read_text(spec)
    if isinstance(spec, list):
        if not spec:
            raise ValueError("A list of sources must name at least one.")
        sources = [open_source(item) for item in spec]
        return sources[0] if len(sources) == 1 else Concatenation(sources)
    options = {"dataset": spec} if isinstance(spec, str) else spec
    if isinstance(options, dict) and "mixture" in options:
        return _mixture(options)
    if not isinstance(options, dict) or not isinstance(options.get("dataset"), str):
        raise ValueError(
            "A source of prompts is a path, a hub id, a mapping with 'dataset' or 'mixture', or a list of these; got "
            f"{spec!r}."
        )
    _check_options(options, _SOURCE_OPTIONS)
    return Source(**options)


def read_records(
    spec: SourceSpec | Path | PromptSource, problems: Problems, limit: int | None = None
) -> Iterator[PromptRecord]:
    """Yield the checked prompts of a source; blank lines of a file are ignored.

    Args:
        spec: see the module's docstring.
        problems: what to do with lines that cannot be used.
        limit: stop after so many usable prompts.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: a line is unusable and ``problems`` stops at it.
        ValueError: the source cannot be read.
    """
    yield from open_source(str(spec) if isinstance(spec, Path) else spec, limit).records(problems)


def hash_sources(sources: Sequence[PromptSource]) -> str:
    """One hash for several sources: of the files' bytes where all are files, else of the sources' hashes."""
    files = [source.files for source in sources]
    if all(files):
        return hash_files([path for paths in files for path in paths])
    return hashlib.sha256(canonical([source.sha256 for source in sources])).hexdigest()


def _read_text(spec: str) -> Any:
    """What a text stands for: inline YAML, the content of a YAML file, or itself."""
    try:
        if spec.lstrip().startswith(("{", "[")):
            return yaml.safe_load(spec)
        path = Path(spec).expanduser()
        if path.suffix in (".yaml", ".yml") and path.is_file():
            return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{spec}: cannot be read as YAML ({' '.join(str(error).split())}).") from error
    return spec


def _mixture(spec: Mapping[str, Any]) -> Mixture:
    _check_options(spec, {"mixture": ("a list of sources", list)} | _DRAW_OPTIONS)
    sources = [open_source(item) for item in spec["mixture"]]
    single = [source for source in sources if isinstance(source, Source)]
    if len(single) < len(sources):
        raise ValueError("A mixture holds single sources, no lists and no other mixtures.")
    return Mixture(single, spec.get("num_prompts"), spec.get("seed") or 0)


# Option of a specification -> what it holds, in words and as types; None leaves an option at its default.
_TEXT, _WHOLE, _MAPPING = ("text", str), ("a whole number", int), ("a mapping", dict)
_SOURCE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "dataset": _TEXT,
    "name": _TEXT,
    "split": _TEXT,
    "revision": _TEXT,
    "streaming": ("true or false", bool),
    "columns": _MAPPING,
    "where": _MAPPING,
    "category": _TEXT,
    "limit": _WHOLE,
    "weight": ("a number", int, float),
}
_DRAW_OPTIONS: dict[str, tuple[Any, ...]] = {"num_prompts": _WHOLE, "seed": _WHOLE}


def _check_options(given: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]]) -> None:
    for key, value in given.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean: {close[0]}?" if close else ""
            raise ValueError(f"Unknown option '{key}' of a source.{hint} Available: {', '.join(known)}.")
        words, *kinds = known[key]
        fits = isinstance(value, tuple(kinds)) and (type(value) is not bool or bool in kinds)
        if not fits and (value is not None or key == "weight"):
            quote = f" Put it in quotes: '{value}'." if words == "text" and not isinstance(value, (list, dict)) else ""
            raise ValueError(f"'{key}' must be {words}, got {value!r}.{quote}")
    for ours, column in (given.get("columns") or {}).items():
        if not isinstance(column, str):
            raise ValueError(f"'columns' must name a column for '{ours}', got {column!r}.")


def _options(source: PromptSource) -> dict[str, Any]:
    """What was asked for, down to single sources; nothing is read."""
    if isinstance(source, Source):
        return source.options()
    if isinstance(source, Mixture):
        parts = [part.options() | {"weight": part.weight} for part in source.sources]
        return {"mixture": parts, "num_prompts": source.num_prompts, "seed": source.seed}
    assert isinstance(source, Concatenation)
    return {"sources": [_options(part) for part in source.sources]}


def check_output(output: str | Path, source: PromptSource) -> None:
    """Refuses an output that is one of the files it would be made from.

    Args:
        output: the file to write.
        source: what is read.

    Raises:
        ValueError: it is one of them.
    """
    if isinstance(source, (Mixture, Concatenation)):
        for part in source.sources:
            check_output(output, part)
    elif isinstance(source, Source) and Path(source.dataset).expanduser().resolve() == Path(output).resolve():
        raise ValueError(f"output and prompts are the same file, {output}. Give the output a file of its own.")
