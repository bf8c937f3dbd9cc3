"""Suites: prompts rendered to the tokens that decoding starts from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treespark.bench.sources import SuiteSource
from treespark.data.prompts import DataError, check_file, parse_line
from treespark.data.template import render

if TYPE_CHECKING:
    from treespark.target import Target


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt of a suite.

    Attributes:
        id: The line's `id`, else its number.
        ids: Tokens that decoding starts from.
        where: `file:line`, as errors name it.
    """

    id: str
    ids: tuple[int, ...]
    where: str

    @property
    def sha256(self) -> str:
        """Hash of the tokens, by which results are paired."""
        return hashlib.sha256(repr(self.ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Suite:
    """Prompts that are reported together.

    Attributes:
        name: What the tables call it: the file's name without its ending, or what the YAML says.
        prompts: At least one prompt.
        path: The file or data set they come from; empty when they come from elsewhere.
        sha256: Of the file's bytes, or of the prompts of a data set.
        category: Suites of one category are also averaged alone.
    """

    name: str
    prompts: tuple[BenchPrompt, ...]
    path: str = ""
    sha256: str = ""
    category: str = ""


def load_suite(
    source: SuiteSource | str | Path,
    target: Target,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int = 0,
) -> Suite:
    """Reads a suite: a line holds `prompt`, `messages`, or `turns` (a list of user turns, of which the first is used).

    Answers in the file are not used.

    Args:
        source: JSONL file, or what `find_sources` returned.
        target: The target, for its tokenizer and its longest context.
        chat_template_kwargs: Options that the chat template reads.
        num_prompts: The first so many prompts; None takes all.
        max_new_tokens: Room that the answer needs within the target's context.

    Raises:
        FileNotFoundError: When there is no such file.
        DataError: For a line that cannot be used (with file and line), a prompt that is too long, or an empty file.
        ValueError: When `num_prompts` is below 1, or a data set cannot be had.
    """
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"num_prompts must be at least 1, got {num_prompts}: nothing would be evaluated.")
    if not isinstance(source, SuiteSource):
        source = SuiteSource(Path(source).stem, path=str(check_file(source)))
    lines, sha256 = source.lines(num_prompts)
    if not lines:
        missing = "no row has the values of `where`" if source.where else "the suite has no row"
        raise DataError(
            f"{source.place}: nothing to evaluate, "
            f"{'the file has no line' if source.path and not source.where else missing}. "
            "Expected one JSON object a line with 'prompt', 'messages' or 'turns'."
        )
    prompts = tuple(
        _prompt(line, source.place, number, target, chat_template_kwargs, max_new_tokens) for number, line in lines
    )
    return Suite(source.name, prompts, source.place, sha256, source.category)


def check_suites(suites: Sequence[Suite]) -> None:
    """Checks that there is something to evaluate and that the names differ.

    Raises:
        ValueError: Otherwise.
    """
    if not any(suite.prompts for suite in suites):
        raise ValueError("Nothing to evaluate: give at least one suite with at least one prompt.")
    names = [suite.name for suite in suites]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"Two suites are called '{name}': rename one of their files, or one in the YAML.")


def _prompt(
    raw: bytes | str,
    path: str,
    line: int,
    target: Target,
    chat_template_kwargs: Mapping[str, Any] | None,
    max_new_tokens: int,
) -> BenchPrompt:
    record = parse_line(_first_turn(raw, path, line), path, line)
    try:
        ids = render(target.tokenizer, record.messages, chat_template_kwargs, add_generation_prompt=True)
    except ValueError as error:
        raise record.error(str(error)) from error
    longest = target.spec.max_position_embeddings
    if len(ids) + max_new_tokens > longest:
        raise record.error(
            f"the prompt has {len(ids)} tokens, which with max_new_tokens = {max_new_tokens} exceeds the {longest} "
            f"positions of '{target.spec.name}'. Shorten the prompt or lower max_new_tokens."
        )
    if not ids:
        raise record.error("the prompt has no token.")
    return BenchPrompt(str(record.fields.get("id", line)), tuple(ids), record.where)


def _first_turn(raw: bytes | str, path: str, line: int) -> bytes | str:
    """Returns the line with `turns` replaced by its first turn as `prompt`; other lines as they are."""
    if (b'"turns"' if isinstance(raw, bytes) else '"turns"') not in raw:  # type: ignore[operator]
        return raw
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return raw  # parse_line says what is wrong
    if not isinstance(fields, dict) or "turns" not in fields:
        return raw
    turns = fields.pop("turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise DataError(f"{path}:{line}: 'turns' must be a non-empty list of texts.")
    if fields.get("prompt") is not None or fields.get("messages") is not None:
        raise DataError(f"{path}:{line}: expected exactly one of 'prompt', 'messages' and 'turns'.")
    return json.dumps(fields | {"prompt": turns[0]})
