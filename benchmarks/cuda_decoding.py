"""Decoding on an accelerator: the text against plain decoding, then a round's time, shares and synchronisations.

    python benchmarks/cuda_decoding.py --device cuda          # random weights at Qwen3-4B's shape, no download
    python benchmarks/cuda_decoding.py --device cpu --tiny    # the same code in seconds, to try it

One JSON line a check. The exit status is 1 when a check fails and 2 without a CUDA device. A new check is a function in
`CHECKS`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # used from a checkout

from benchmarks.checks import Outcome, run_checks
from benchmarks.decode_round import measure, prompts, start
from benchmarks.random_training import Shape, make_target
from treespark.decoding import compare_outputs, decode_batch, decode_plain, text_margins
from treespark.drafters import Drafter, DSparkDrafter
from treespark.policies import BestFirst, Budgeted, Chain, DDTree, TreePolicy
from treespark.target import Target

BATCH_SIZES = (1, 6, 12, 36)


@dataclass(frozen=True)
class Sizes(Shape):
    """A target and its drafter, and how long texts are."""

    context: int
    new_tokens: int
    rounds: int


TINY = Sizes(64, 32, 48, 3, 4, 2, 8, 1, 8, 24, 6, 2)
QWEN3_4B = Sizes(151936, 2560, 9728, 36, 32, 8, 128, 5, 256, 512, 24, 8)


@dataclass(frozen=True)
class Run:
    """Where and how large."""

    device: torch.device
    sizes: Sizes

    def models(self, dtype: torch.dtype, vocab: int | None = None) -> tuple[Target, Drafter]:
        """Returns a random target and a random drafter for it; fewer tokens than the model's let drafts be accepted."""
        sizes = self.sizes if vocab is None else replace(self.sizes, vocab=vocab)
        target = make_target(sizes, dtype, self.device)
        with self.device:
            drafter = DSparkDrafter(
                target.spec, num_layers=sizes.draft_layers, markov_rank=sizes.rank, head_dim_ratio=1.5
            )
        assert drafter.markov is not None
        torch.nn.init.normal_(drafter.markov.markov_w2.weight, std=0.02)
        drafter.bind(target)
        return target, drafter.to(device=self.device, dtype=dtype).eval()


def compared(run: Run, policies: list[TreePolicy], batch_sizes: tuple[int, ...]) -> Outcome:
    """Decodes batches in float32 and compares every text with plain decoding of its prompt alone."""
    target, drafter = run.models(torch.float32, vocab=64)
    texts = prompts(target, max(batch_sizes), run.sizes.context)
    options: dict[str, Any] = {"max_new_tokens": run.sizes.new_tokens, "end_token_ids": []}
    plain = [decode_plain(target, text, **options) for text in texts]
    passed, figures = True, []
    for policy in policies:
        for size in batch_sizes:
            found = decode_batch(target, drafter, texts[:size], policy=policy, max_batch_size=size, **options)
            seen = [compare_outputs(one, other) for one, other in zip(plain, found, strict=False)]
            figures.append(
                {
                    "policy": repr(policy),
                    "batch_size": size,
                    "identical": sum(item.identical for item in seen),
                    "near_ties": sum(item.near_tie for item in seen),
                    "accepted": sum(record.num_accepted for result in found for record in result.rounds),
                }
            )
            passed &= all(item.identical or item.near_tie for item in seen)
            passed &= figures[-1]["accepted"] > 0 or size == 1  # else nothing but roots was verified
    return passed, {"batches": figures}


def check_text_float32(run: Run) -> Outcome:
    """Batches of 1, 6, 12 and 36 in float32: every text is plain decoding's, up to near-ties."""
    return compared(run, [Budgeted(k=16, num_draft_nodes=32, frontier_width=4)], BATCH_SIZES)


def check_text_policies(run: Run) -> Outcome:
    """The other policies in a batch of 6."""
    others = [Chain(), DDTree(32), BestFirst(16, 32), BestFirst(16, 32, theta=0.004)]
    return compared(run, others, (6,))


def check_text_bfloat16(run: Run) -> Outcome:
    """A batch of 6 in bfloat16: each token is within four spacings of the best before its own text."""
    target, drafter = run.models(torch.bfloat16, vocab=64)
    texts = prompts(target, 6, run.sizes.context)
    policy = Budgeted(k=16, num_draft_nodes=32, frontier_width=4)
    options: dict[str, Any] = {"max_new_tokens": run.sizes.new_tokens, "end_token_ids": [], "policy": policy}
    found = decode_batch(target, drafter, texts, max_batch_size=6, **options)
    margins = [text_margins(target, text, result.tokens) for text, result in zip(texts, found, strict=True)]
    figures = {
        "tokens": sum(item.num_tokens for item in margins),
        "near_ties": sum(item.num_near_ties for item in margins),
        "largest_spacings": max(item.largest for item in margins),
    }
    return all(item.first_miss is None for item in margins), figures


def synchronisations(run: Run, target: Target, drafter: Drafter, policy: TreePolicy, size: int) -> list[int] | None:
    """Returns how often the host waited for the device in each of four rounds; None where no device is waited for."""
    if run.device.type != "cuda":
        return None
    batch = start(target, drafter, policy, prompts(target, size, run.sizes.context))
    batch.step()
    counts = []
    for _ in range(4):
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                batch.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing CUDA operation" in str(item.message) for item in caught))
    return counts


def check_rounds(run: Run) -> Outcome:
    """Batches of 1, 6, 12 and 36 in bfloat16: time per round, its shares, its part of the limit, synchronisations."""
    target, drafter = run.models(torch.bfloat16)
    policy = Budgeted(k=4, num_draft_nodes=32)
    passed, figures = True, []
    for size in BATCH_SIZES:
        counts = synchronisations(run, target, drafter, policy, size)
        figures.append(
            measure(target, drafter, policy, size, run.sizes.context, run.sizes.rounds) | {"synchronisations": counts}
        )
        passed &= counts is None or max(counts) <= 2
    return passed, {"batches": figures}


CHECKS: list[Callable[[Run], Outcome]] = [check_text_float32, check_text_policies, check_text_bfloat16, check_rounds]


def make_run(device: torch.device, tiny: bool) -> Run:
    """What the checks get."""
    return Run(device, TINY if tiny else QWEN3_4B)


def main(argv: list[str] | None = None) -> int:
    """Runs the checks; returns the exit status."""
    assert __doc__ is not None
    return run_checks(CHECKS, make_run, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
