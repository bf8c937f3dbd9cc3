"""Prompt files: one JSON object a line, checked field by field, every error with its file and line.

A line holds ``prompt`` (text) or ``messages`` (``[{"role", "content"}, ...]``), optionally ``response`` (the
answer's text), ``response_ids`` (its exact tokens, the end token included if it was reached), ``finish_reason``
(``"stop"`` or ``"length"``), and any other field, such as ``id`` or ``category``, which is carried along.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

OnError = Literal["stop", "skip"]
Message = dict[str, Any]

_log = logging.getLogger(__name__)
_FINISH_REASONS = ("stop", "length")
_MAX_LISTED = 20


class DataError(ValueError):
    """A line of a data file that cannot be used; the message opens with ``file:line``."""


@dataclass(frozen=True)
class PromptRecord:
    """One checked line of a prompt file.

    Attributes:
        path: file the line comes from.
        line: its number, counted from 1.
        messages: the conversation up to the answer (the answer itself excluded).
        response: the answer's text, or None.
        response_ids: the answer's exact tokens, or None.
        finish_reason: ``"stop"``, ``"length"`` or None if the file does not say.
        fields: the line as it was read.
    """

    path: str
    line: int
    messages: tuple[Message, ...]
    response: str | None
    response_ids: tuple[int, ...] | None
    finish_reason: str | None
    fields: dict[str, Any]

    @property
    def where(self) -> str:
        """``file:line``, as errors name it."""
        return f"{self.path}:{self.line}"

    @property
    def has_answer(self) -> bool:
        """Whether the line carries an answer, as text or as tokens."""
        return self.response is not None or self.response_ids is not None

    def error(self, what: str) -> DataError:
        """An error about this line."""
        return DataError(f"{self.where}: {what}")


class Problems:
    """Collects unusable lines: ``"stop"`` raises at the first, ``"skip"`` counts them for one log line.

    Args:
        on_error: ``"stop"`` or ``"skip"``.
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in ("stop", "skip"):
            raise ValueError(f"on_error must be 'stop' or 'skip', got {on_error!r}.")
        self.on_error = on_error
        self.errors: list[DataError] = []

    def add(self, error: DataError) -> None:
        """Raise ``error``, or remember it."""
        if self.on_error == "stop":
            raise error
        self.errors.append(error)

    def report(self, source: str, num_used: int) -> None:
        """Log the skipped lines in one line; nothing usable left is an error whatever ``on_error`` says.

        Raises:
            DataError: no line is left.
        """
        reasons = "; ".join(str(error) for error in self.errors[:_MAX_LISTED])
        more = f"; and {len(self.errors) - _MAX_LISTED} more" if len(self.errors) > _MAX_LISTED else ""
        if num_used == 0:
            detail = f" ({len(self.errors)} lines skipped: {reasons}{more})" if self.errors else ""
            raise DataError(
                f"{source}: no usable line{detail}. Expected one JSON object a line with 'prompt' or 'messages'."
            )
        if self.errors:
            _log.warning("%s: %d lines used, %d skipped: %s%s", source, num_used, len(self.errors), reasons, more)


def read_records(path: str | Path, problems: Problems, limit: int | None = None) -> Iterator[PromptRecord]:
    """Yield the checked lines of a file; blank lines are ignored.

    Args:
        path: JSONL file in UTF-8.
        problems: what to do with lines that cannot be used.
        limit: stop after so many usable lines.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: the path is not a file, or a line is unusable and ``problems`` stops at it.
    """
    file = check_file(path)
    num_used = 0
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if limit is not None and num_used >= limit:
                return
            if not raw.strip():
                continue
            try:
                record = parse_line(raw, str(path), number)
            except DataError as error:
                problems.add(error)
                continue
            num_used += 1
            yield record


def check_file(path: str | Path) -> Path:
    """The path, if it names a file.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it is a directory.
    """
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"{path}: no such data file. Give the path of a JSONL file, relative to {Path.cwd()}.")
    if not file.is_file():
        raise DataError(f"{path}: is not a file. Expected a JSONL file.")
    return file


def parse_line(raw: bytes | str, path: str, line: int) -> PromptRecord:
    """Check one line.

    Raises:
        DataError: the line is not what the module's docstring describes.
    """

    def bad(what: str) -> DataError:
        return DataError(f"{path}:{line}: {what}")

    try:
        text = raw.decode("utf-8-sig") if isinstance(raw, bytes) else raw
        fields = json.loads(text)
    except UnicodeDecodeError as error:
        raise bad(f"not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise bad(f"not valid JSON ({error}). Expected one JSON object a line.") from None
    if not isinstance(fields, dict):
        raise bad(f"expected a JSON object, got {_kind(fields)}.")
    given = [key for key in ("prompt", "messages") if fields.get(key) is not None]
    if len(given) != 1:
        raise bad(f"expected exactly one of 'prompt' and 'messages', got {' and '.join(given) or 'neither'}.")

    response = _optional(fields, "response", str, bad)
    if given == ["prompt"]:
        prompt = fields["prompt"]
        if not isinstance(prompt, str):
            raise bad(f"'prompt' must be text, got {_kind(prompt)}.")
        if not prompt.strip():
            raise bad("'prompt' is empty.")
        messages: list[Message] = [{"role": "user", "content": prompt}]
    else:
        messages = _check_messages(fields["messages"], bad)
        if messages[-1]["role"] == "assistant":
            if response is not None or fields.get("response_ids") is not None:
                raise bad("the answer is given twice: 'messages' ends with an assistant message and 'response' is set.")
            response = messages.pop()["content"]
        if not any(message["role"] == "user" for message in messages):
            raise bad("'messages' has no user message before the answer.")

    ids = _optional(fields, "response_ids", list, bad)
    if ids is not None and not (ids and all(type(token) is int and token >= 0 for token in ids)):
        raise bad("'response_ids' must be a non-empty list of token ids (integers from 0).")
    finish_reason = _optional(fields, "finish_reason", str, bad)
    if finish_reason is not None and finish_reason not in _FINISH_REASONS:
        raise bad(f"'finish_reason' must be 'stop' or 'length', got {finish_reason!r}.")
    return PromptRecord(
        path, line, tuple(messages), response, None if ids is None else tuple(ids), finish_reason, fields
    )


def _check_messages(messages: object, bad: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise bad(f"'messages' must be a non-empty list, got {_kind(messages)}.")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise bad(f"'messages[{index}]' must be an object with 'role' and 'content', got {_kind(message)}.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise bad(f"'messages[{index}].{key}' must be text, got {_kind(message.get(key))}.")
    return list(messages)


def _optional(fields: dict[str, Any], key: str, kind: type, bad: Any) -> Any:
    value = fields.get(key)
    if value is not None and not isinstance(value, kind):
        raise bad(f"'{key}' must be {'text' if kind is str else 'a list'}, got {_kind(value)}.")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def hash_files(paths: Iterable[str | Path]) -> str:
    """SHA-256 over the bytes of the files in the given order, as hexadecimal text.

    Raises:
        FileNotFoundError: one of them does not exist.
    """
    total = hashlib.sha256()
    for path in paths:
        digest = hashlib.sha256()
        with check_file(path).open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        total.update(digest.digest())  # per file, so that moving a line to the next file changes the result
    return total.hexdigest()


def as_paths(paths: str | Sequence[str] | None) -> list[str]:
    """One path, several, or none, as a list."""
    if paths is None:
        return []
    return [paths] if isinstance(paths, str) else list(paths)
