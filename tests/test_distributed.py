"""Lightning's DDP and FSDP2 with two gloo processes: every loss's gradient is one process's on the joint batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.processes import ddp, fsdp2, run_two
from tests.tiny_text import save_tiny_target
from treespark.data import MicroBatch
from treespark.drafters import Drafter, DSparkDrafter
from treespark.losses import Coverage, LossTerm, Retention, Survival
from treespark.module import DraftingModule
from treespark.policies import Budgeted
from treespark.target import TargetSpec

LOSSES: dict[str, Callable[[], LossTerm]] = {
    name: cls for name, cls in LossTerm.available().items() if cls.__module__.startswith("treespark.")
} | {"Survival-mass": partial(Survival, denominator="mass"), "Coverage-mass": partial(Coverage, denominator="mass")}
# Wide enough that a hinge is active on the few labels here.
LOSSES |= {"Retention": partial(Retention, margin=20.0, cap=1000.0)}
CASES = ("unequal", "empty")
# Lightning offers no float64 under FSDP2, so the drafter brings its dtype along and the trainer converts nothing.
STRATEGIES: dict[str, tuple[Callable[[], Strategy], str, dict[str, Any], tuple[str, ...]]] = {
    "ddp": (ddp, "float64", {}, CASES),
    "fsdp2": (fsdp2, "float64", {}, CASES),
    "fsdp2, sharded target": (fsdp2, "float64", {"shard_target": True}, ("empty",)),
    "fsdp2, float32": (fsdp2, "float32", {}, ("unequal",)),
}
RUNS = [(name, loss, case) for name, run in STRATEGIES.items() for loss in LOSSES for case in run[3]]


def batch(seed: int, spans: list[tuple[int, int]], num_anchors: int) -> MicroBatch:
    """Rows of 14 tokens supervised from start to end (exclusive), with as many anchors from the start as fit."""
    rows, size = len(spans), 14
    every = torch.arange(size).expand(rows, -1)
    starts, ends = torch.tensor(spans).unsqueeze(-1).unbind(1)
    anchors = starts + torch.arange(num_anchors)
    exist = anchors < ends - 1
    return MicroBatch(
        input_ids=torch.randint(8, 40, (rows, size), generator=torch.Generator().manual_seed(seed)),
        attention_mask=torch.ones(rows, size, dtype=torch.bool),
        loss_mask=(every >= starts) & (every < ends),
        document_ids=torch.zeros(rows, size, dtype=torch.long),
        position_ids=every,
        anchors=anchors.masked_fill(~exist, 0),
        anchor_mask=exist,
        sample_ids=torch.arange(rows),
        prompt_lengths=starts[:, 0],
        own_text=torch.zeros(rows, dtype=torch.bool),
        document_samples=torch.arange(rows).unsqueeze(1),
    )


def shares(case: str) -> list[MicroBatch]:
    """What each process holds: 5 + 2 anchors beside one anchor of a single valid depth, or beside none at all."""
    return [batch(0, [(3, 14), (6, 9)], 5), batch(1, [(4, 6 if case == "unequal" else 5)], 3)]


class Data(LightningDataModule):
    """One step: each process's share, or all of them for one process alone."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        parts = shares(self.case)
        if self.trainer.world_size > 1:
            parts = [parts[self.trainer.global_rank]]
        return DataLoader([parts], batch_size=None)  # type: ignore[arg-type]


class Gradients(Callback):
    """Keeps the gradients that the optimiser sees."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        kept = {name: p.grad.clone() for name, p in module.drafter.named_parameters() if p.grad is not None}
        self.found = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in kept.items()}


def random_drafter(spec: TargetSpec, dtype: str) -> Drafter:
    """The same weights in every process, none of them zero."""
    drafter = DSparkDrafter(spec, num_layers=1, block_size=3, markov_rank=4, markov_head="rnn", target_layer_ids=[0])
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
    return drafter.to(getattr(torch, dtype))


def gradients(
    target: str, loss: str, case: str, dtype: str, module_options: dict[str, Any] | None = None, **options: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """One training step under a real Trainer: gradients and logged values."""
    module = DraftingModule(
        target,
        partial(random_drafter, dtype=dtype),
        Budgeted(2, 6),
        [LOSSES[loss]()],
        chunk_anchors=2,
        target_dtype=dtype,
        **module_options or {},
    )
    kept = Gradients()
    run = Trainer(
        accelerator="cpu",
        max_steps=1,
        callbacks=[kept],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    run.fit(module, Data(case))
    return kept.found, {name: float(value) for name, value in run.callback_metrics.items()}


def worker(rank: int, target: str, folder: str) -> None:
    """One of two processes; they stay up for all strategies and losses."""
    for name, loss, case in RUNS:
        strategy, dtype, options, _ = STRATEGIES[name]
        found = gradients(target, loss, case, dtype, options, devices=2, strategy=strategy())
        torch.save(found, f"{folder}/{name}-{loss}-{case}-{rank}.pt")


@functools.cache
def one_process(target: str, loss: str, case: str, dtype: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The joint batch in this process."""
    return gradients(target, loss, case, dtype, devices=1)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Runs all strategies, losses and cases once; returns the target's folder and that of the results."""
    target = save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=2)
    folder = tmp_path_factory.mktemp("results")
    run_two(worker, target, str(folder))
    return target, folder


@pytest.mark.parametrize(("strategy", "loss", "case"), RUNS)
def test_two_processes_equal_one(two_processes: tuple[str, Path], strategy: str, loss: str, case: str) -> None:
    """Unequal masks, and once with nothing on the second process; both log the joint value.

    Float64 within 1e-10; float32 within 1e-5 of each tensor's largest entry.
    """
    target, folder = two_processes
    dtype = STRATEGIES[strategy][1]
    expected, logged = one_process(target, loss, case, dtype)
    assert any(gradient.any() for gradient in expected.values())
    for rank in (0, 1):
        found, values = torch.load(folder / f"{strategy}-{loss}-{case}-{rank}.pt")
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            wanted = expected[name]
            assert gradient.dtype == wanted.dtype == getattr(torch, dtype)
            rtol, atol = (1e-10, 1e-12) if dtype == "float64" else (1e-5, 1e-5 * float(wanted.abs().max()))
            torch.testing.assert_close(gradient, wanted, rtol=rtol, atol=atol, msg=name)
        for name, value in logged.items():
            if name.startswith("train/") and name != "train/loss":
                assert values[name] == pytest.approx(value, rel=1e-6 if dtype == "float64" else 1e-5), name
