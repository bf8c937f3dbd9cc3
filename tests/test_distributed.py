"""Lightning's DDP with two gloo processes: every loss's gradient is that of one process on the joint batch."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from tests.tiny_text import save_tiny_target
from treespark.data import MicroBatch
from treespark.drafters import Drafter, DSparkDrafter
from treespark.losses import Coverage, LossTerm, Survival
from treespark.module import DraftingModule
from treespark.policies import Budgeted
from treespark.target import TargetSpec

LOSSES: dict[str, Callable[[], LossTerm]] = {
    name: cls for name, cls in LossTerm.available().items() if cls.__module__.startswith("treespark.")
} | {"Survival-mass": partial(Survival, denominator="mass"), "Coverage-mass": partial(Coverage, denominator="mass")}
CASES = ("unequal", "empty")


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
        self.found = {name: p.grad.clone() for name, p in module.drafter.named_parameters() if p.grad is not None}


def random_drafter(spec: TargetSpec) -> Drafter:
    """The same weights in every process, none of them zero."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(spec, num_layers=1, block_size=3, markov_rank=4, markov_head="rnn", target_layer_ids=[0])
    for parameter in drafter.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return drafter


def gradients(target: str, loss: str, case: str, **options: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """One training step under a real Trainer, float64: gradients and logged values."""
    module = DraftingModule(
        target, random_drafter, Budgeted(2, 6), [LOSSES[loss]()], chunk_anchors=2, target_dtype="float64"
    )
    kept = Gradients()
    run = Trainer(
        accelerator="cpu",
        precision="64-true",
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


def worker(rank: int, port: int, target: str, folder: str) -> None:
    """One of two processes; they stay up for all losses."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    for loss in LOSSES:
        for case in CASES:
            strategy = DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo")
            found = gradients(target, loss, case, devices=2, strategy=strategy)
            torch.save(found, f"{folder}/{loss}-{case}-{rank}.pt")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Runs all losses and cases once; returns the target's folder and that of the results."""
    target = save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=2)
    folder = tmp_path_factory.mktemp("results")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (port, target, str(folder)), nprocs=2)
    return target, folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", LOSSES)
def test_ddp_equals_one_process(two_processes: tuple[str, Path], loss: str, case: str) -> None:
    """Unequal masks, and once with nothing on the second process (float64, 1e-10); both log the joint value."""
    target, folder = two_processes
    expected, logged = gradients(target, loss, case, devices=1)
    assert any(gradient.any() for gradient in expected.values())
    for rank in (0, 1):
        found, values = torch.load(folder / f"{loss}-{case}-{rank}.pt")
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12, msg=name)
        for name, value in logged.items():
            if name.startswith("train/") and name != "train/loss":
                assert values[name] == pytest.approx(value, rel=1e-6), name
