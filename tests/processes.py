"""Two gloo processes on this machine, as a launcher such as torchrun sets them up."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy


def run_two(worker: Callable[..., None], *arguments: Any) -> None:
    """Calls worker(rank, *arguments) in two fresh processes and waits."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_start, (port, worker, arguments), nprocs=2)


def _start(rank: int, port: int, worker: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    worker(rank, *arguments)


def ddp() -> Strategy:
    """Lightning's DDP for the two processes."""
    return DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo")


def fsdp2(**options: Any) -> Strategy:
    """Lightning's FSDP2 for the two processes."""
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo", **options
    )
    strategy.cluster_environment = LightningEnvironment()
    return strategy
