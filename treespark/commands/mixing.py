"""`treespark mix`: a prompt file drawn from several sources, without what evaluation suites hold."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treespark.data.mixture import Mixture, check_output, open_source
from treespark.data.prompts import OnError, Problems, PromptRecord, hash_files
from treespark.data.sources import PromptSource, Source

if TYPE_CHECKING:
    from treespark.data.overlap import Duplicates


@dataclass(frozen=True)
class MixSummary:
    """What a call of :func:`mix` did.

    Attributes:
        output: the prompt file.
        num_prompts: its lines.
        drawn: for a mixture, label, weight and number of prompts of each source.
        num_skipped: unusable lines and rows.
        removed: prompts that were left out, by reason: ``suite``, ``exact`` and ``near``.
        suites: prompts that were left out because of each suite.
    """

    output: str
    num_prompts: int
    drawn: list[dict[str, Any]]
    num_skipped: int
    removed: dict[str, int]
    suites: dict[str, int]


def mix(
    sources: str | list[Any] | dict[str, Any],
    output: str,
    suites: str | list[str] | None = None,
    num_prompts: int | None = None,
    seed: int | None = None,
    ngram: int = 8,
    suite_overlap: float = 0.5,
    near: float = 0.8,
    on_error: OnError = "stop",
    overwrite: bool = False,
) -> MixSummary:
    """Writes a prompt file: drawn from sources by weight, without repeats and without what evaluation suites hold.

    OUTPUT.removed.jsonl lists every prompt that was left out, with its place, its reason and what it resembles;
    OUTPUT.meta.json holds the counts, the options and the hashes. The same sources, seed and options give the same
    file, to the byte.

    Args:
        sources: A file, a hub id, a mapping, a list, a mixture, or a YAML file with any of them. Where it is no mixture
            and `num_prompts` is not given, all prompts are taken, in order.
        output: JSONL file to write. Lines gain `origin`, the place that the prompt comes from.
        suites: Evaluation suites (JSONL; lines with prompt, messages or turns), several separated by commas.
        num_prompts: Prompts to draw; by default what the mixture says.
        seed: Of the draw and the order; by default the mixture's.
        ngram: Words of an n-gram.
        suite_overlap: Share of n-grams, of the shorter text, from which a prompt counts as held by a suite.
        near: Jaccard similarity of n-grams from which a prompt counts as a repeat of one before.
        on_error: `stop` at the first unusable line, or `skip` such lines with a report.
        overwrite: Replace an output that other options wrote.

    Raises:
        FileNotFoundError: For a file that does not exist.
        ValueError: For a source that cannot be read or is too small for its share, and options out of range.
    """
    from treespark.bench.arms import split_names
    from treespark.data.answers import AnswerStore
    from treespark.data.overlap import Duplicates, read_suite, write_removals

    source = _with_draw(open_source(sources), num_prompts, seed)
    check_output(output, source)
    paths = split_names(suites or [])
    texts = [text for path in paths for text in read_suite(path)]
    duplicates = Duplicates(texts, ngram, suite_overlap, near)
    problems = Problems(on_error)
    options = {"ngram": ngram, "suite_overlap": suite_overlap, "near": near, "on_error": on_error}
    identity = {"sources": _identity(source), "suites_sha256": hash_files(paths), **options}
    store = AnswerStore(Path(output), identity, overwrite, writer="treespark mix")
    if (done := store.finished()) is not None:
        keys = ("num_prompts", "drawn", "num_skipped", "removed", "suites")
        return _shown(MixSummary(output, **{key: done[key] for key in keys}), "; it was there already")

    started = time.monotonic()
    records = _records(source, problems, duplicates)
    problems.report(source.label, len(records))
    removed = Counter(removal.reason for removal in duplicates.removals)
    summary = MixSummary(
        output=output,
        num_prompts=len(records),
        drawn=source.drawn if isinstance(source, Mixture) else [],
        num_skipped=len(problems.errors),
        removed={reason: removed[reason] for reason in ("suite", "exact", "near")},
        suites=duplicates.by_suite(),
    )
    with store.open([]):
        write_removals(Path(output + ".removed.jsonl"), duplicates.removals)
        counts = {key: value for key, value in vars(summary).items() if key != "output"}
        skipped = [str(error) for error in problems.errors]
        seconds = round(time.monotonic() - started, 3)
        store.finish([_line(r) for r in records], {**counts, "skipped": skipped, "seconds": seconds})
    return _shown(summary)


def _with_draw(source: PromptSource, num_prompts: int | None, seed: int | None) -> PromptSource:
    if isinstance(source, Mixture):
        same = source.num_prompts if num_prompts is None else num_prompts
        return Mixture(source.sources, same, source.seed if seed is None else seed)
    if num_prompts is None and seed is None:
        return source
    parts = [part for part in source.parts if isinstance(part, Source)]
    if len(parts) < len(source.parts):
        raise ValueError("num_prompts and seed need a mixture or a list of single sources.")
    return Mixture(parts, num_prompts, seed or 0)


def _identity(source: PromptSource) -> dict[str, Any]:
    """What is known of the sources before they are read: their options, and the hashes of files."""
    if isinstance(source, Mixture):
        parts = [{**_identity(part), "weight": part.weight} for part in source.sources]
        return {"mixture": parts, "num_prompts": source.num_prompts, "seed": source.seed}
    if isinstance(source, Source):
        is_file = source.kind in ("jsonl", "parquet", "arrow")
        return source.options() | ({"sha256": hash_files([source.dataset])} if is_file else {})
    return {"sources": [_identity(part) for part in source.parts]}


def _records(source: PromptSource, problems: Problems, duplicates: Duplicates) -> list[PromptRecord]:
    if isinstance(source, Mixture):
        return source.draw(problems, duplicates.is_new)
    return [record for record in source.records(problems) if duplicates.is_new(record)]


def _line(record: PromptRecord) -> str:
    return json.dumps({**record.fields, "origin": record.where}, ensure_ascii=False)


def _shown(summary: MixSummary, note: str = "") -> MixSummary:
    removed = ", ".join(f"{count} {_WORDS[reason]}" for reason, count in summary.removed.items() if count)
    print(f"{summary.output}: {summary.num_prompts} prompts{note}; left out: {removed or 'none'}")
    for row in summary.drawn:
        print(f"  {row['num_prompts']:>7} {row['num_prompts'] / summary.num_prompts:7.2%}  {row['source']}")
    for suite, count in summary.suites.items():
        print(f"  {count:>7} left out for suite {suite}")
    return summary


_WORDS = {"suite": "held by a suite", "exact": "repeated", "near": "nearly repeated"}
