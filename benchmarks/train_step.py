"""Time and peak memory of one training step, as one JSON object.

    python benchmarks/train_step.py                                  # the loss stage, chain and tree
    python benchmarks/train_step.py --part step --cases chain,tree   # the whole optimiser step, target included

`loss` is the loss stage: from the drafter's slot states to their gradient and the heads'. `step` is one optimiser step
of `DraftingModule` on random text with a random Qwen3 target: target forward, backbone, loss stage, backward, AdamW.

Cases: `chain` is DSpark (cross-entropy, L1, confidence), `tree` is TreeSpark (survival and coverage besides, under
Budgeted), `plain` has the losses of `chain` as straightforward autograd over all anchors at once.

Timings of the cases are interleaved. Peak memory is that of one run in a fresh process, above its inputs (weights,
states, labels; the heads' gradients are not inputs). Products are those that the stage itself sends to the matrix
kernels, recorded in a run of their own and timed again one by one into standing outputs.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from matrix_products import Products
from stages import Options, counted_flops, prepared, runner

from treespark.environment import environment


def synchronize(options: Options) -> None:
    """Waits for the accelerator."""
    if options.device != "cpu":
        torch.cuda.synchronize()


def seconds(run: Callable[[], Any], options: Options) -> float:
    """Returns the wall time of one run."""
    gc.collect()
    synchronize(options)
    start = time.perf_counter()
    run()
    synchronize(options)
    return time.perf_counter() - start


def resident(name: str) -> int:
    """Returns VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak_memory(case: str, options: Options) -> dict[str, float]:
    """Runs a case once in this process, which must be fresh, and returns what it took, in MiB."""
    shared = prepared(options)
    run = runner(case, options, shared)
    gc.collect()
    if options.device == "cpu":
        before, built = resident("VmRSS"), resident("VmHWM")
        run()
        peak = resident("VmHWM")
    else:
        synchronize(options)
        before = built = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        synchronize(options)
        peak = torch.cuda.max_memory_allocated()
    found = {"inputs": before, "inputs_peak": built, "peak": peak, "above_inputs": peak - before}
    return {name: round(value / 2**20, 1) for name, value in found.items()}


def timings(options: Options) -> dict[str, Any]:
    """Times the cases in turn, and the loss stage's own products beside them."""
    shared = prepared(options)
    names = options.cases.split(",")
    runs = {name: runner(name, options, shared) for name in names}
    kept: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, Any] = {name: {} for name in names}
    products: dict[str, Callable[[], None]] = {}
    for name, run in runs.items():
        if options.part == "loss":
            recorder = Products([shared.head, *shared.parameters])
            with recorder:
                run()
            found[name] |= {
                "products": recorder.shapes(),
                "recorded_flops": recorder.num_flops(),
                "counted_flops": counted_flops(name, options),
            }
            products[name] = recorder.again(options.device)
            kept[f"{name} products"] = []
        else:
            run()
    for _ in range(options.repeats):
        for name, run in runs.items():
            kept[name].append(seconds(run, options))
            if name in products:
                kept[f"{name} products"].append(seconds(products[name], options))
    for name in names:
        found[name] |= summary(kept[name])
        if name in products:
            found[name]["products_s"] = summary(kept[f"{name} products"])
            found[name]["over_products"] = round(paired(kept[name], kept[f"{name} products"]), 3)
    for above, below in (("tree", "chain"), ("chain", "plain")):
        if above in names and below in names:
            found[f"{above}/{below}"] = round(paired(kept[above], kept[below]), 3)
    return found


def summary(times: list[float]) -> dict[str, Any]:
    """Returns the median and the least of the times."""
    return {"median_s": round(statistics.median(times), 3), "min_s": round(min(times), 3)}


def paired(above: list[float], below: list[float]) -> float:
    """Returns the median of the ratios of neighbouring runs."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def memory(options: Options) -> dict[str, Any]:
    """Measures each case in a process of its own."""
    found = {}
    for case in options.cases.split(","):
        given = [
            f"--{field.name}={getattr(options, field.name)}" for field in fields(options) if field.name != "worker"
        ]
        command = [sys.executable, __file__, *given, f"--worker={case}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"The measurement of {case} failed:\n{done.stderr}")
        found[case] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measures and prints."""
    from jsonargparse import auto_cli

    options: Options = auto_cli(Options)
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
    if options.worker is not None:
        print(json.dumps(peak_memory(options.worker, options)))
        return
    report: dict[str, Any] = {"options": asdict(options), "environment": environment()}
    if options.memory:
        report["memory_mib"] = memory(options)
    if options.time:
        report["time"] = timings(options)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
