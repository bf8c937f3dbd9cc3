"""What a run takes: memory, time, disk; measured on one micro-batch, then scaled."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import torch

from treespark.data import MicroBatch
from treespark.doctor.report import Report, size
from treespark.module import DraftingModule


def train_once(module: DraftingModule, batch: MicroBatch, optimizer: torch.optim.Optimizer) -> float:
    """Takes one optimiser step on one micro-batch and returns its seconds."""
    parameters = module.drafter.trainable_parameters()
    _wait(module.device)
    start = time.perf_counter()
    labels = module._labels(batch)
    drafted = (module._draft(batch, labels, module._features(batch)) for _ in range(1))
    value = module.objective(drafted, parameters, labels=[labels])
    optimizer.zero_grad()
    value.loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    _wait(module.device)
    return time.perf_counter() - start


def examine_step(
    report: Report, module: DraftingModule, batch: MicroBatch, micro_batches: int, num_steps: int, num_processes: int
) -> None:
    """Trains on a micro-batch twice, the second time with the clock, and scales to the run.

    Args:
        report: Where findings go.
        module: Composed, on the device of the training; its weights change.
        batch: The largest micro-batch of a step.
        micro_batches: Per step and process.
        num_steps: Of the run, 0 if not known.
        num_processes: Of the run; their communication is not measured.
    """
    with report.guard("step"):
        parameters = module.drafter.trainable_parameters()
        optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)
        train_once(module, batch, optimizer)
        seconds = micro_batches * train_once(module, batch, optimizer)
        anchors, tokens = int(batch.anchor_mask.sum()), int(batch.attention_mask.sum())
        text = (
            f"about {seconds:.2g} s: {micro_batches} micro-batches like the one measured "
            f"({batch.input_ids.shape[0]} rows, {tokens:,} tokens, {anchors:,} anchors), features as configured"
        )
        if num_steps:
            text += f"; {num_steps:,} steps take {_duration(seconds * num_steps)} without validation"
        if num_processes > 1:
            text += f" and without the communication of {num_processes} processes"
        report.say("step", text)
        kept = 4 * sum(p.numel() * p.element_size() for p in parameters)
        report.say(
            "memory",
            f"{size(kept)} for the drafter's weights, gradients and AdamW's averages; {_peak(module)}",
        )


def _peak(module: DraftingModule) -> str:
    if module.device.type == "cuda":
        used = torch.cuda.max_memory_allocated(module.device)
        total = torch.cuda.get_device_properties(module.device).total_memory
        return f"peak {size(used)} of {size(total)} on {module.device} in this micro-batch"
    if sys.platform == "win32":
        return "the peak is not measured on Windows"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"peak {size(peak)} of this process, everything included"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _duration(seconds: float) -> str:
    """Says seconds in the unit that fits.

    >>> _duration(45), _duration(5400), _duration(200000)
    ('45 s', '1.5 hours', '2.3 days')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def examine_disk(report: Report, module: DraftingModule, folder: Path) -> None:
    """Compares what a run writes with what is free: best, last, one being written, and the drafter alone."""
    drafter = module.drafter
    trained = sum(p.numel() * p.element_size() for p in drafter.parameters() if p.requires_grad)
    alone = sum(tensor.numel() * tensor.element_size() for tensor in drafter.state_dict().values())
    needed = 3 * 3 * trained + alone  # a checkpoint holds the weights and AdamW's two averages
    place = folder.expanduser().resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    text = f"{size(needed)} for checkpoints and the drafter, {size(free)} free where {folder} is"
    if needed > free:
        report.fail("disk", f"{text}. Free some, or set trainer.default_root_dir to a larger disk.")
    else:
        report.say("disk", text)
