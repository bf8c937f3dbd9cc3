"""Two processes, one of them without any data, give the figures of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from treespark.metrics import AcceptanceByPosition, AcceptanceLength, ConfidenceError, PackedNodesByDepth
from treespark.metrics.packed_tree import example_tree

ROUNDS = (torch.tensor([2, 0, 1, 3]), torch.tensor([3, 1, 2, 3]))
VALID = torch.tensor([[True, False]])


def metrics() -> dict[str, Any]:
    return {
        "tau": AcceptanceLength(),
        "by_position": AcceptanceByPosition(3),
        "nodes": PackedNodesByDepth(2),
        "confidence": ConfidenceError(),
    }


def fill(built: dict[str, Any], rows: slice) -> None:
    accepted, committed = ROUNDS[0][rows], ROUNDS[1][rows]
    built["tau"].update(accepted, committed)
    built["by_position"].update(accepted, committed)
    built["confidence"].update(accepted.double() - 1, committed.double() / 4)
    if len(accepted):
        built["nodes"].update(example_tree(), VALID)


def run(rank: int, folder: str, split: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    built = metrics()
    fill(built, slice(0, split) if rank == 0 else slice(split, 4))
    found = {name: metric.compute() for name, metric in built.items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_two_processes_equal_one(tmp_path: Path) -> None:
    """All four rounds on rank 0, none on rank 1: every rank reports what one process would, counts included."""
    mp.spawn(run, args=(str(tmp_path), 4), nprocs=2)
    expected = metrics()
    fill(expected, slice(0, 4))
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, metric in expected.items():
            torch.testing.assert_close(found[name], metric.compute(), equal_nan=True)
