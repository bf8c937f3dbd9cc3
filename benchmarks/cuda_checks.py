"""Checks an accelerator against the CPU, and measures training at Qwen3-4B's shapes; one JSON line a check.

    python benchmarks/cuda_checks.py --device cuda          # random weights, nothing is downloaded
    python benchmarks/cuda_checks.py --device cpu --tiny    # the same code in seconds, to try it

The exit status is 1 when a check fails and 2 without a CUDA device. A new check is a function in `CHECKS`.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # used from a checkout

from benchmarks.checks import Outcome, Skipped, run_checks
from benchmarks.random_training import Sizes, backward, make_batch, make_module, make_target
from treespark.data import MicroBatch
from treespark.drafters.attention import flex_runs
from treespark.module import DraftingModule

TINY = Sizes(64, 32, 48, 3, 4, 2, 8, 1, 8, 3, 24, 4, 3, 9)
SMALL = Sizes(8192, 512, 1024, 6, 8, 4, 64, 2, 64, 7, 256, 24, 8, 32)  # what the CPU computes in seconds
QWEN3_4B = Sizes(151936, 2560, 9728, 36, 32, 8, 128, 5, 256, 7, 4096, 512, 32, 32)


@dataclass(frozen=True)
class Run:
    """Where and how large: `small` is compared with the CPU, `large` is measured."""

    device: torch.device
    small: Sizes
    large: Sizes

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a CUDA GPU."""
        return self.device.type == "cuda"


def losses_and_gradients(run: Run, device: torch.device, bf16: bool) -> tuple[Tensor, Tensor]:
    """Returns every loss [L], and all gradients in one vector, of a small step on fixed features; on the CPU.

    Features come from a generator: the target's rounding has a check of its own.
    """
    sizes = run.small
    module = make_module(sizes, make_target(sizes, torch.float32, torch.device("cpu")).to(device))
    generator = torch.Generator().manual_seed(3)
    width = len(module.drafter.layer_ids) * sizes.hidden
    shapes = [(1, sizes.tokens, width), (1, sizes.tokens, sizes.hidden)]
    features = type("Features", (), {})()
    features.context, features.final = (torch.randn(*shape, generator=generator).to(device) for shape in shapes)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        value = backward(module, make_batch(sizes, device), features)
    gradients = [p.grad for p in module.drafter.trainable_parameters() if p.grad is not None]
    return value.values.cpu().double(), torch.cat([g.detach().cpu().double().flatten() for g in gradients])


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((found - expected).norm() / expected.norm())


def seconds(run: Run, function: Callable[[], Any], repeats: int = 3) -> float:
    """Returns the median time of a call after two others."""
    times = []
    for _ in range(2 + repeats):
        synchronize(run)
        start = time.perf_counter()
        function()
        synchronize(run)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def synchronize(run: Run) -> None:
    """Waits for the device."""
    if run.is_cuda:
        torch.cuda.synchronize()


def peak_gib(run: Run) -> float:
    """Returns the most memory since the last reset (CUDA), or of this process (CPU)."""
    if run.is_cuda:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# Checks: each returns whether it passed, and its figures --------------------------------------------------------------


def check_features(run: Run) -> Outcome:
    """The target's features on the device, in float32 and bfloat16, against float32 on the CPU."""
    sizes, cpu = run.small, torch.device("cpu")
    layer_ids = list(range(sizes.layers - 1))
    plain = make_target(sizes, torch.float32, cpu)
    expected = plain.features(make_batch(sizes, cpu).input_ids, layer_ids)
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        target = make_target(sizes, torch.float32, cpu).to(device=run.device, dtype=dtype)
        got = target.features(make_batch(sizes, run.device).input_ids, layer_ids)
        name = str(dtype).removeprefix("torch.")
        for part, left, right in zip(got._fields, got, expected, strict=True):
            found[f"{part}_{name}"] = relative(left.cpu().double(), right.double())
    limits = {"float32": 1e-4, "bfloat16": 5e-2}
    return all(value <= limits[key.rpartition("_")[2]] for key, value in found.items()), {"relative_error": found}


def check_losses_float32(run: Run) -> Outcome:
    """Every loss and all gradients in float32 on the device against the CPU."""
    (losses, gradients), (plain, expected) = (
        losses_and_gradients(run, device, False) for device in (run.device, torch.device("cpu"))
    )
    found = {"losses": relative(losses, plain), "gradients": relative(gradients, expected)}
    return found["losses"] <= 1e-4 and found["gradients"] <= 1e-3, {"relative_error": found, "values": losses.tolist()}


def check_losses_bf16(run: Run) -> Outcome:
    """bfloat16 autocast over float32 weights on the device, against float32 on the CPU."""
    losses, gradients = losses_and_gradients(run, run.device, True)
    plain, expected = losses_and_gradients(run, torch.device("cpu"), False)
    error = float(((losses - plain) / plain).abs().max())
    cosine = float(gradients @ expected / (gradients.norm() * expected.norm()))
    return error <= 0.05 and cosine >= 0.97, {"largest_relative_error": error, "cosine_of_gradients": cosine}


def slot_states(module: DraftingModule, batch: MicroBatch, features: Tensor) -> Tensor:
    """Runs the backbone alone on fixed features: the states of all slots."""
    drafter = module.drafter
    context = drafter.encode(features, batch.position_ids)
    visible = torch.arange(batch.input_ids.shape[1], device=features.device) < batch.anchors.unsqueeze(-1)
    return drafter.draft(context, batch.input_ids.gather(1, batch.anchors), batch.anchors, visible)


def backbones(run: Run, sizes: Sizes, dtype: torch.dtype, first: dict[str, Any], second: dict[str, Any]) -> Outcome:
    """Compares two ways of running the backbone: states, gradients, time and peak memory of both."""
    target = make_target(sizes, dtype, run.device)
    batch = make_batch(sizes, run.device)
    figures: dict[str, Any] = {}
    results = []
    for options in (first, second):
        module = make_module(sizes, target, **options)
        width = len(module.drafter.layer_ids) * sizes.hidden
        features = torch.randn(1, sizes.tokens, width, generator=torch.Generator().manual_seed(3)).to(run.device, dtype)

        def once(module: DraftingModule = module, features: Tensor = features) -> Tensor:
            with torch.autocast(run.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                states = slot_states(module, batch, features)
            module.zero_grad(set_to_none=True)
            states.float().square().sum().backward()  # type: ignore[no-untyped-call]
            return states.detach()

        states = once()
        gradients = [p.grad.flatten() for p in module.drafter.trainable_parameters() if p.grad is not None]
        results.append((states.double().flatten().cpu(), torch.cat(gradients).double().cpu()))
        if run.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        name = ", ".join(f"{key}: {value}" for key, value in options.items())
        figures[name] = {"milliseconds": 1e3 * seconds(run, once), "peak_gib": peak_gib(run)}
    errors = [relative(left, right) for left, right in zip(*results, strict=True)]
    figures["relative_error"] = dict(zip(("states", "gradients"), errors, strict=True))
    return max(errors) <= (1e-4 if dtype == torch.float32 else 5e-2), figures


def check_flex(run: Run) -> Outcome:
    """`flex_attention` against one dense call, in float32 on small sizes; on the CPU chunks take its place."""
    sizes = run.small
    width = 2 * round(sizes.head_dim * 0.75)
    if run.is_cuda and not flex_runs("cuda", torch.float32, width, sizes.heads // sizes.kv_heads):
        return False, {"reason": "flex_attention does not run here"}
    other = "flex" if run.is_cuda else "chunked"
    return backbones(run, sizes, torch.float32, {"attention": other}, {"attention": "dense"})


def check_flex_large(run: Run) -> Outcome:
    """The same at full size in bfloat16, with time and peak memory."""
    other = "flex" if run.is_cuda else "chunked"
    return backbones(run, run.large, torch.bfloat16, {"attention": other}, {"attention": "dense"})


def check_compile(run: Run) -> Outcome:
    """Compiled layers against eager ones in float32."""
    if not run.is_cuda:
        raise Skipped("on a CPU the tests compare compiled layers, where a C++ compiler is found")
    return backbones(run, run.small, torch.float32, {"compile": True}, {"compile": False})


def check_step(run: Run, compiled: bool) -> Outcome:
    """A whole optimiser step at full size: time, peak memory, and every loss and gradient finite."""
    if compiled and not run.is_cuda:
        raise Skipped("on a CPU the tests compare compiled layers, where a C++ compiler is found")
    sizes = run.large
    if run.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    module = make_module(sizes, make_target(sizes, torch.bfloat16, run.device), compile=compiled)
    batch = make_batch(sizes, run.device)
    optimizer = torch.optim.AdamW(module.drafter.trainable_parameters(), lr=1e-4)
    values = []

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(run.device.type, torch.bfloat16):
            values.append(backward(module, batch).values)
        norm = torch.nn.utils.clip_grad_norm_(module.drafter.trainable_parameters(), 1.0)
        optimizer.step()
        assert torch.isfinite(norm), "the gradients are not finite"

    taken = seconds(run, once)
    figures = {"seconds": taken, "peak_gib": peak_gib(run), "losses": values[-1].tolist()}
    return bool(torch.isfinite(torch.stack(values)).all()), figures


def check_step_eager(run: Run) -> Outcome:
    """A whole optimiser step, eager."""
    return check_step(run, compiled=False)


def check_step_compiled(run: Run) -> Outcome:
    """A whole optimiser step with compiled layers."""
    return check_step(run, compiled=True)


CHECKS: list[Callable[[Run], Outcome]] = [
    check_features,
    check_losses_float32,
    check_losses_bf16,
    check_flex,
    check_compile,
    check_flex_large,
    check_step_eager,
    check_step_compiled,
]


def make_run(device: torch.device, tiny: bool) -> Run:
    """What the checks get."""
    return Run(device, TINY if tiny else SMALL, TINY if tiny else QWEN3_4B)


def main(argv: list[str] | None = None) -> int:
    """Runs the checks; returns the exit status."""
    assert __doc__ is not None
    return run_checks(CHECKS, make_run, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
