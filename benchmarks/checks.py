"""Runs a list of checks of a device: one JSON line each, and an exit status."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from treespark.environment import environment

R = TypeVar("R")
Outcome = tuple[bool, dict[str, Any]]


class Skipped(Exception):
    """A check that means nothing on this device; the message says why."""


def perform(check: Callable[[R], Outcome], run: R) -> dict[str, Any]:
    """Runs a check; whatever it raises is a failure, and the others go on."""
    start = time.perf_counter()
    try:
        passed, figures = check(run)
        result = "PASS" if passed else "FAIL"
    except Skipped as reason:
        result, figures = "SKIP", {"reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        result, figures = "FAIL", {"error": f"{type(error).__name__}: {error}"}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    name = check.__name__.removeprefix("check_")
    return {"check": name, "result": result, "wall_seconds": round(time.perf_counter() - start, 2)} | figures


def run_checks(
    checks: Sequence[Callable[[R], Outcome]],
    make_run: Callable[[torch.device, bool], R],
    description: str,
    argv: Sequence[str] | None = None,
) -> int:
    """Reads the command line and runs the checks; returns the exit status.

    Args:
        checks: Functions called `check_…`.
        make_run: What they get, from the device and whether sizes are to be tiny.
        description: The first line of `--help`.
        argv: Arguments; None takes the command line's.

    Returns:
        0 when none failed, 1 when one did, 2 without the device.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes everywhere")
    parser.add_argument("--only", nargs="*", help="names of checks")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: run this on a machine with a GPU, or try it with --device cpu --tiny", file=sys.stderr)
        return 2
    known = [check.__name__.removeprefix("check_") for check in checks]
    if unknown := sorted(set(options.only or []) - set(known)):
        parser.error(f"unknown checks {', '.join(unknown)}; available: {', '.join(known)}")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    run = make_run(device, options.tiny)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(json.dumps({"device": name, "versions": environment().get("versions")}), flush=True)
    failed = False
    for check, label in zip(checks, known, strict=True):
        if not options.only or label in options.only:
            line = perform(check, run)
            failed |= line["result"] == "FAIL"
            print(json.dumps(line), flush=True)
    return int(failed)
