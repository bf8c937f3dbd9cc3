"""Wrong calls in one line: what was expected, and the closest names to what came.

jsonargparse answers a misspelt class with "Expected a dot import path string"; here the registry answers.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from treespark.registry import load_all, not_imported, unknown

# Options that take a class -> where the base of their classes is.
_BASES = {
    "model.drafter": ("treespark.drafters", "Drafter"),
    "model.policy": ("treespark.policies", "TreePolicy"),
    "model.losses": ("treespark.losses", "LossTerm"),
    "model.features": ("treespark.features", "FeatureSource"),
}
# The same for Lightning's own, with the one that tracking adds.
_LIBRARIES = {
    "trainer.callbacks": ("callback", "lightning.pytorch.callbacks", "RunRecord"),
    "trainer.logger": ("logger", "lightning.pytorch.loggers", "Tracking"),
}


class UsageError(ValueError):
    """A wrong call of the command line, or a configuration that cannot be read."""


class HelpfulParser(ArgumentParser):
    """A parser whose errors are one line with suggestions, raised as `UsageError`."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises the error that `explain` words."""
        raise UsageError(explain(message, options_of(self, _search(r"^Subcommand '(\w+)'", message)))) from ex


def options_of(parser: argparse.ArgumentParser, subcommand: str | None = None) -> list[str]:
    """Option names, without dashes, of a parser and of its subcommands, or of the one named."""
    names: set[str] = set()
    for action in parser._actions:
        names |= {option.lstrip("-") for option in action.option_strings if option.startswith("--")}
        if isinstance(action.choices, dict):
            for name, child in action.choices.items():
                names |= set(options_of(child)) if subcommand in (None, name) else set()
    own = {"help", "config", "print_config"}  # and NAME.help, NAME+ (append to a list): spellings of the option NAME
    return sorted(name for name in names - own if not name.endswith((".help", "+")))


def explain(message: str, options: Iterable[str] = ()) -> str:
    """Turns a message of jsonargparse into one line.

    Args:
        message: The message.
        options: Names of all options of the command.
    """
    key = _search(r'[Kk]ey "([\w.+]+)"', message)
    base = _base_of(key)
    if base is not None:
        kind, choices = base
        name = _search(r"Expected a dot import path string: (\S+)", message)
        if name is not None and "." not in name:
            return f"{key}: {unknown(kind, name, choices)}"
        path = _search(r"Problem with given class_path '([\w.]+)'", message)
        missing = _search(r"(No module named '[\w.]+'|module '[\w.]+' has no attribute '\w+')", message)
        if path and missing:
            return f"{key}: {not_imported(kind, path, missing)}"
    refused = _search(r"^Option '([\w.]+)' is not accepted$", message)  # an option of a class: said by its own parser
    if refused:
        return str(unknown("option", refused, options))
    stray = _search(r"[Uu]nrecognized arguments: (.+)", message)
    if stray:
        wrong = stray.split()[0].partition("=")[0].lstrip("-")
        return f"Unknown option --{wrong}.{_closest(wrong, options, '--')}"
    stray = _search(r"does not accept option '([\w.]+)'", message)
    if stray:
        return f"Unknown option '{stray}'.{_closest(stray, options)}"
    if key and re.search(r"Got value: None\s*$", message):
        return f"{key} is missing: give it in the --config file or as --{key}."
    return _one_line(message)


def _base_of(key: str | None) -> tuple[str, dict[str, Any]] | None:
    """Kind and classes that an option takes, by name."""
    for option, (module, base_name) in _BASES.items():
        if key is not None and key.startswith(option):
            load_all()
            base: Any = getattr(importlib.import_module(module), base_name)
            return base.kind, dict(base.available())
    for option, (kind, module, own) in _LIBRARIES.items():
        if key is not None and key.startswith(option):
            library = importlib.import_module(module)
            classes = {name: getattr(library, name) for name in library.__all__}
            return kind, classes | {own: getattr(importlib.import_module("treespark.tracking"), own)}
    return None


def _closest(name: str, options: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name, list(options), n=2, cutoff=0.7)
    if not close:  # the right name at another place
        close = [option for option in options if _last(option) == _last(name)][:3]
    return f" Did you mean: {', '.join(prefix + item for item in close)}?" if close else ""


def _search(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _one_line(message: str) -> str:
    """The message without line breaks and without jsonargparse's vain try to read a value as a file."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    kept = [line for line in lines if line and not line.startswith("Expected a path but")]
    return re.sub(r'Parser key "([^"]+)"', r"\1", re.sub(r"\s+", " ", " ".join(kept)))
