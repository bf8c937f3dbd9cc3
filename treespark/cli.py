"""The command `treespark`: a table of subcommands, each loaded only when it runs.

This file imports neither torch nor Lightning, so that `treespark --help` answers at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

# subcommand -> (module, its function, one line of help)
COMMANDS = {
    "fit": ("training", "run", "Train a drafter: treespark fit --config recipes/demo.yaml"),
    "validate": ("training", "run", "Validation metrics of a checkpoint: --config R --ckpt_path C"),
    "test": ("training", "run", "The test file: the same metrics, then live decoding: --config R --ckpt_path C"),
    "mix": ("functions", "run", "A prompt file drawn from sources by weight, without what evaluation suites hold"),
    "generate": ("functions", "run", "The target's own answers to a prompt file, as training and validation data"),
    "cache": (
        "caching",
        "run",
        "The target's features on disk: cache plan or build --config R --output D, cache verify D",
    ),
    "bench": ("functions", "run", "Compare plain, chain and tree decoding on prompt files"),
    "compare": ("functions", "run", "Set two results of bench against each other: compare a.json b.json"),
    "export": ("functions", "run", "Write a drafter for other engines: deepspec, speculators or specforge"),
    "doctor": ("doctor", "run", "What would ruin a training, before it starts: --config R"),
    "list": ("listing", "run", "Registered losses, policies, drafters and formats, one line each"),
}

_EPILOG = """R is a recipe (YAML), C a checkpoint (.ckpt), D a folder.
Options of a subcommand: treespark SUBCOMMAND --help
Errors are one line; TREESPARK_DEBUG=1 adds the traceback."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with 0, or 1 after an error."""
    sys.exit(dispatch(list(sys.argv[1:] if argv is None else argv)))


def dispatch(argv: list[str]) -> int:
    """Runs one subcommand; returns the exit status."""
    name = argv[0] if argv else "--help"
    try:
        return _run(name, argv[1:])
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the interpreter flushes it at exit
        return 1
    except (ValueError, OSError, ImportError) as error:
        return _report(name, error)
    except KeyboardInterrupt:
        return _fail(name, "interrupted.", 130)


def _run(name: str, arguments: list[str]) -> int:
    if name in ("-h", "--help", "help"):
        print(usage(), flush=True)
        return 0
    if name == "--version":
        import treespark

        print(f"treespark {treespark.__version__}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean: {close[0]}?" if close else ""
        raise ValueError(f"Unknown subcommand '{name}'.{hint} Available: {', '.join(COMMANDS)}.")
    module, function, _ = COMMANDS[name]
    if os.getcwd() not in sys.path:
        # A user's class is found by its dotted path. Last, so that no folder here hides an installed package.
        sys.path.append(os.getcwd())
    status = getattr(importlib.import_module(f"treespark.commands.{module}"), function)(name, arguments)
    return int(status or 0)


def usage() -> str:
    """The help text: one line a subcommand."""
    lines = [f"  {name:<10} {text}" for name, (_, _, text) in COMMANDS.items()]
    head = "usage: treespark SUBCOMMAND [options]\n\nTrain and measure tree drafters for speculative decoding."
    return "\n".join([head, "", *lines, "", _EPILOG])


def _report(name: str, error: Exception) -> int:
    """One line for an error; the traceback if asked for."""
    if os.environ.get("TREESPARK_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
        return 1
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    ours = raised_in.partition(".")[0] == "treespark"
    # An error that we did not word ourselves may need more than its line.
    hint = "" if ours or isinstance(error, OSError) else " (TREESPARK_DEBUG=1 shows where.)"
    return _fail(name if name in COMMANDS else "", f"{' '.join(str(error).split()) or type(error).__name__}{hint}", 1)


def _fail(name: str, message: str, status: int) -> int:
    print(f"treespark{' ' + name if name else ''}: {message}", file=sys.stderr)
    return status
