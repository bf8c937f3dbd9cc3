"""Training throughput from online, offline and hybrid features, and how much of the target's share offline saves.

    python benchmarks/features.py                # recipes/demo.yaml on 24 of its samples, JSON on stdout

The sources take turns, step by step, on the same batches, so that a busy machine slows all of them alike. Times are
medians over the batches. A step is forward, losses, backward and optimiser. The target's share is the time that its
forward pass takes inside an online step; saved is what an offline step takes less than an online one, of that share.
The cache was just written, so the system may still hold it in memory; one that is larger reads at the disk's speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from treespark.commands.recipe import read_recipe
from treespark.data import MicroBatch
from treespark.environment import environment
from treespark.features import CacheBuilder, FeatureSource, Hybrid, Offline, Online
from treespark.module import DraftingModule
from treespark.target import Target


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds that a call takes, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


class Stepper:
    """Optimiser steps of a module without a trainer; the seconds inside the feature source are kept apart."""

    def __init__(self, module: DraftingModule, device: torch.device) -> None:
        self.module, self.device = module, device
        self.parameters = module.drafter.trainable_parameters()
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)

    def step(self, batch: list[MicroBatch], source: FeatureSource) -> tuple[float, float]:
        """Returns the seconds of a step, and of its features."""
        module, inside = self.module, 0.0
        module.feature_source = source

        def one() -> None:
            nonlocal inside
            labels = [module._labels(item) for item in batch]
            drafts = []
            for item, label in zip(batch, labels, strict=True):
                found: list[Any] = []
                inside += timed(lambda item=item, found=found: found.append(module._features(item)), self.device)
                drafts.append(module._draft(item, label, found[0]))
            value = module.objective(
                iter(drafts), self.parameters, labels=labels, reduce=lambda tensor: tensor, world_size=1
            )
            value.loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        return timed(one, self.device), inside


def measure(
    recipe: str, num_samples: int, repeats: int, dtype: str, threads: int, overrides: list[str]
) -> dict[str, Any]:
    """Builds a cache of some samples in a temporary folder and times all sources on them."""
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module, data, _ = read_recipe(["--config", recipe, *overrides], {})
    samples = list(data.samples("train"))[:num_samples]
    data._samples["train"] = samples
    target = Target.load(module.target_name, dtype=module.target_dtype, revision=module.target_revision).to(device)
    module.compose(target)
    module.to(device).train()
    loader = data.train_dataloader()
    batches = [[item.to(device) for item in step] for step in loader]
    num_tokens = sum(int(item.attention_mask.sum()) for step in batches for item in step)

    with tempfile.TemporaryDirectory() as folder:
        builder = CacheBuilder(
            target, module.drafter.layer_ids, (sample.ids for sample in samples), Path(folder) / "cache", dtype
        )
        plan = builder.plan(num_timed=4)
        summary = builder.build()
        hybrid = Hybrid(disk=20.0, folder=f"{folder}/hybrid", dtype=dtype)
        sources: dict[str, FeatureSource] = {
            "online": Online(),
            "offline": Offline(f"{folder}/cache"),
            "hybrid": hybrid,
        }
        for source in sources.values():
            source.open(target, module.drafter.layer_ids)
        stepper = Stepper(module, device)
        stepper.step(batches[0], sources["online"])  # what the first step allocates
        times: dict[str, list[tuple[float, float]]] = {}
        for repeat in range(repeats):
            for batch in batches:
                for name, source in sources.items():
                    label = f"hybrid_epoch_{min(repeat, 1) + 1}" if name == "hybrid" else name
                    times.setdefault(label, []).append(stepper.step(batch, source))

    step = {name: statistics.median(whole for whole, _ in pairs) for name, pairs in times.items()}
    features = {name: statistics.median(inside for _, inside in pairs) for name, pairs in times.items()}
    # Of pairs on the same batch: the machine's state and the batch's length drop out.
    pairs = list(zip(times["online"], times["offline"], strict=True))
    saved = sum(online[0] - offline[0] for online, offline in pairs) / sum(online[1] for online, _ in pairs)
    per_step = num_tokens / len(batches)
    return {
        "recipe": recipe,
        "dtype": dtype,
        "num_samples": len(samples),
        "num_tokens": num_tokens,
        "num_steps": len(times["online"]),
        "step_seconds": {name: round(value, 4) for name, value in step.items()},
        "feature_seconds": {name: round(value, 4) for name, value in features.items()},
        "tokens_per_second": {name: round(per_step / value, 1) for name, value in step.items()},
        "target_share_of_online_step": round(
            sum(inside for _, inside in times["online"]) / sum(whole for whole, _ in times["online"]), 3
        ),
        "offline_saves_of_target_share": round(saved, 3),
        "offline_speedup": round(sum(a[0] for a, _ in pairs) / sum(b[0] for _, b in pairs), 3),
        "planned_bytes": plan.num_bytes,
        "built_bytes": summary.num_bytes,
        "plan_error": round(abs(plan.num_bytes / summary.num_bytes - 1), 5),
        "planned_seconds": round(plan.seconds, 1),
        "built_seconds": round(summary.seconds, 1),
        "threads": threads,
        "environment": {key: environment()[key] for key in ("versions", "cpu", "accelerators")},
    }


def main() -> int:
    """Prints the figures; 1 where offline saves less than 80 % of the target's share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="recipes/demo.yaml")
    parser.add_argument("--num_samples", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2, help="epochs; the hybrid source computes in the first")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    known, overrides = parser.parse_known_args()
    found = measure(known.config, known.num_samples, known.repeats, known.dtype, known.threads, overrides)
    print(json.dumps(found, indent=1))
    return 0 if found["offline_saves_of_target_share"] >= 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
