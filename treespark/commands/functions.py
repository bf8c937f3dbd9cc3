"""`treespark mix`, `generate`, `bench`, `compare` and `export`: functions whose signatures are their options."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from typing import Any

from jsonargparse import auto_cli

from treespark.commands.hints import HelpfulParser


def run(name: str, argv: list[str]) -> int:
    """Runs one of the subcommands; returns the exit status, which a result may carry as `exit_code`.

    Raises:
        ValueError: For a wrong option or value, worded for the user.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    function = _function(name)
    arguments = spell_out(function, argv)
    # `compare a.json b.json`; everything else goes by name.
    positional = name == "compare" and not {"--first", "--second"} & set(argv)
    result = auto_cli(
        function, args=arguments, as_positional=positional, parser_class=HelpfulParser, prog=f"treespark {name}"
    )
    return int(getattr(result, "exit_code", 0))


def _function(name: str) -> Callable[..., Any]:
    if name == "generate":
        from treespark.generation import generate

        return generate
    if name == "mix":
        from treespark.commands.mixing import mix

        return mix
    if name == "export":
        from treespark.commands.exporting import export

        return export
    if name == "compare":
        from treespark.bench.compare import compare

        return compare
    from treespark.bench import bench

    return bench


def spell_out(function: Callable[..., Any], argv: list[str]) -> list[str]:
    """Lets a list be given as separate words, and a switch without a word.

    `--suites a b` becomes `--suites ["a", "b"]`, `--simulate` becomes `--simulate true`.

    Args:
        function: Function whose parameters are the options.
        argv: The words of the command line.
    """
    parameters = inspect.signature(function).parameters.values()
    lists = {f"--{parameter.name}" for parameter in parameters if "list[" in str(parameter.annotation)}
    switches = {f"--{parameter.name}" for parameter in parameters if parameter.annotation in (bool, "bool")}
    joined: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        joined.append(word)
        if word in switches and (position == len(argv) or argv[position].startswith("-")):
            joined.append("true")
        if word in lists:
            end = position
            while end < len(argv) and not argv[end].startswith("-"):
                end += 1
            values = argv[position:end]
            if values and not values[0].startswith("["):
                joined.append(json.dumps(values))
                position = end
    return joined
