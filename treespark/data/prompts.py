"""One prompt: what a line of a file, or a row of a data set, may hold; every error names its place.

A line holds ``prompt`` (text), ``messages`` (``[{"role", "content"}, ...]``) or ``conversations`` (ShareGPT's
``[{"from", "value"}, ...]``, which is turned into ``messages``), optionally ``response`` (the answer's text),
``response_ids`` (its exact tokens, the end token included if it was reached), ``finish_reason`` (``"stop"`` or
``"length"``), and any other field, such as ``id`` or ``category``, which is carried along.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

OnError = Literal["stop", "skip"]
Message = dict[str, Any]

_log = logging.getLogger(__name__)
_FINISH_REASONS = ("stop", "length")
_MAX_LISTED = 20
CONTENT = ("prompt", "messages", "conversations")
# ShareGPT's speakers -> roles.
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"} | {
    role: role for role in ("user", "assistant", "system", "tool")
}


class DataError(ValueError):
    """A line of a data file that cannot be used; the message opens with ``file:line``."""


@dataclass(frozen=True)
class PromptRecord:
    """One checked line of a prompt file, or row of a data set.

    Attributes:
        path: file or data set it comes from.
        line: number of the line or row, counted from 1.
        messages: the conversation up to the answer (the answer itself excluded).
        response: the answer's text, or None.
        response_ids: the answer's exact tokens, or None.
        finish_reason: ``"stop"``, ``"length"`` or None if the file does not say.
        fields: the line as it was read, with ``conversations`` turned into ``messages``.
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
    """Collects unusable lines: ``"stop"`` raises at the first, ``"skip"`` keeps them for one report.

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
        """Log the skipped lines, each with its reason; nothing usable left is an error whatever ``on_error`` says.

        Raises:
            DataError: no line is left.
        """
        listed = [str(error) for error in self.errors[:_MAX_LISTED]]
        if len(self.errors) > _MAX_LISTED:
            listed.append(f"and {len(self.errors) - _MAX_LISTED} more")
        if num_used == 0:
            detail = f" ({len(self.errors)} lines skipped: {'; '.join(listed)})" if self.errors else ""
            raise DataError(
                f"{source}: no usable line{detail}. Expected one JSON object a line with 'prompt' or 'messages'."
            )
        if self.errors:
            _log.warning(
                "%s: %d lines used, %d skipped:\n  %s", source, num_used, len(self.errors), "\n  ".join(listed)
            )


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
    """Check one line of a file.

    Raises:
        DataError: the line is not what the module's docstring describes.
    """
    return check_fields(load_line(raw, path, line), path, line)


def load_line(raw: bytes | str, path: str, line: int) -> dict[str, Any]:
    """The JSON object of one line.

    Raises:
        DataError: the line is none.
    """
    bad = _errors_at(path, line)
    try:
        text = raw.decode("utf-8-sig") if isinstance(raw, bytes) else raw
        fields = json.loads(text)
    except UnicodeDecodeError as error:
        raise bad(f"not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise bad(f"not valid JSON ({error}). Expected one JSON object a line.") from None
    if not isinstance(fields, dict):
        raise bad(f"expected a JSON object, got {_kind(fields)}.")
    return fields


def check_fields(fields: dict[str, Any], path: str, line: int) -> PromptRecord:
    """Check the fields of a line or row.

    Args:
        fields: what was read.
        path: file or data set, as errors name it.
        line: number of the line or row.

    Raises:
        DataError: the fields are not what the module's docstring describes.
    """
    bad = _errors_at(path, line)
    given = [key for key in CONTENT if fields.get(key) is not None]
    if len(given) != 1:
        raise bad(
            f"expected exactly one of 'prompt', 'messages' and 'conversations', got {' and '.join(given) or 'neither'}."
        )

    response = _optional(fields, "response", str, bad)
    if given == ["prompt"]:
        prompt = fields["prompt"]
        if not isinstance(prompt, str):
            raise bad(f"'prompt' must be text, got {_kind(prompt)}.")
        if not prompt.strip():
            raise bad("'prompt' is empty.")
        messages: list[Message] = [{"role": "user", "content": prompt}]
    else:
        messages = _turns(fields[given[0]], given[0], bad)
        fields = {("messages" if key == given[0] else key): value for key, value in fields.items()}
        fields["messages"] = list(messages)
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


def _errors_at(path: str, line: int) -> Callable[[str], DataError]:
    return lambda what: DataError(f"{path}:{line}: {what}")


def _turns(turns: object, key: str, bad: Callable[[str], DataError]) -> list[Message]:
    """The checked messages of a conversation in either spelling."""
    if not isinstance(turns, list) or not turns:
        raise bad(f"'{key}' must be a non-empty list, got {_kind(turns)}.")
    messages = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise bad(f"'{key}[{index}]' must be an object with 'role' and 'content', got {_kind(turn)}.")
        is_sharegpt = "role" not in turn and "from" in turn
        names = ("from", "value") if is_sharegpt else ("role", "content")
        for name in names:
            if not isinstance(turn.get(name), str):
                raise bad(f"'{key}[{index}].{name}' must be text, got {_kind(turn.get(name))}.")
        if is_sharegpt:
            if turn["from"] not in _SPEAKERS:
                raise bad(f"'{key}[{index}].from' must be one of {', '.join(_SPEAKERS)}, got {turn['from']!r}.")
            turn = {"role": _SPEAKERS[turn["from"]], "content": turn["value"]}
        messages.append(turn)
    return messages


def _optional(fields: dict[str, Any], key: str, kind: type, bad: Callable[[str], DataError]) -> Any:
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
