"""Loaders that know where they are: the same batches after a resume, on any number of workers and processes.

One item is what one optimiser step sees: a list of micro-batches. A step takes ``world_size * micro_batches *
batch_size`` samples of the epoch's order and deals them out to the processes. The last step of an epoch may be
smaller; every process always gets the same number of steps and of micro-batches, filled up with rows that hold no
anchor. Torch's ``DataLoader`` runs the workers; only what was handed out counts as seen, not what they prefetched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from treespark.data.collate import MicroBatch, collate, seeded_generator
from treespark.data.samples import Sample

_log = logging.getLogger(__name__)


class _Steps(Dataset[list[MicroBatch]]):
    """Builds the batch of an (epoch, step): a pure function, so that any worker may do it."""

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader

    def __getitem__(self, index: tuple[int, int]) -> list[MicroBatch]:
        return self._loader.build(*index)


class BatchLoader:
    """Batches in file order, the same at every pass: validation and test.

    Args:
        samples: the data set.
        num_anchors: the most anchors per row.
        batch_size: rows per micro-batch.
        micro_batches: micro-batches per step and process.
        seed: seeds the order and the anchors.
        num_workers: processes that build batches ahead; 0 builds them in this one.
        rank: this process, from 0.
        world_size: number of processes.
    """

    shuffle = False

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        num_anchors: int,
        batch_size: int,
        micro_batches: int = 1,
        seed: int = 0,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        for name, value in (("num_anchors", num_anchors), ("batch_size", batch_size), ("micro_batches", micro_batches)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0..{world_size - 1} for world_size={world_size}, got {rank}.")
        self.samples = samples
        self.num_anchors = num_anchors
        self.batch_size = batch_size
        self.micro_batches = micro_batches
        self.seed = seed
        self.num_workers = num_workers
        self.rank = rank
        self.world_size = world_size
        self._order: tuple[int, list[int]] | None = None  # of the last epoch that was asked for

    @property
    def samples_per_step(self) -> int:
        """Samples that one step takes, over all processes."""
        return self.world_size * self.micro_batches * self.batch_size

    def __len__(self) -> int:
        return -(-len(self.samples) // self.samples_per_step)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return iter(self._workers(0, 0))

    def _workers(self, epoch: int, first_step: int) -> DataLoader[list[MicroBatch]]:
        steps: Any = [(epoch, step) for step in range(first_step, len(self))]
        return DataLoader(
            _Steps(self),
            batch_size=None,
            sampler=steps,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def order(self, epoch: int) -> list[int]:
        """Sample ids of an epoch in the order in which steps take them, over all processes."""
        if not self.shuffle:
            return list(range(len(self.samples)))
        if self._order is None or self._order[0] != epoch:
            generator = seeded_generator(self.seed, epoch, "order")
            self._order = (epoch, torch.randperm(len(self.samples), generator=generator).tolist())
        return self._order[1]

    def build(self, epoch: int, step: int) -> list[MicroBatch]:
        """This process's micro-batches of a step."""
        size = self.samples_per_step
        taken = self.order(epoch)[step * size : (step + 1) * size]
        if self.shuffle:  # rows of like length share a micro-batch; which samples a step takes stays as drawn
            taken.sort(key=lambda i: (-len(self.samples[i]), i))
        mine = taken[self.rank :: self.world_size]
        most = -(-len(taken) // self.world_size)  # rows of the fullest process
        batches = []
        for first in range(0, most, self.batch_size):
            ids = mine[first : first + self.batch_size]
            rows: list[list[Sample]] = [[self.samples[i]] for i in ids] or [[]]
            batches.append(collate(rows, ids or [-1], num_anchors=self.num_anchors, seed=self.seed, epoch=epoch))
        return batches


class TrainLoader(BatchLoader):
    """Shuffled by (seed, epoch) and resumable inside an epoch; Lightning saves and restores its state.

    Each pass is the next epoch; a pass that was left early is over. The state is counted in samples over all
    processes, so it does not depend on the rank.
    """

    shuffle = True

    def __init__(self, samples: Sequence[Sample], *, data_hash: str = "", **options: Any) -> None:
        super().__init__(samples, **options)
        self.data_hash = data_hash
        self.epoch = 0
        self._step = 0  # steps of this epoch that were handed out, or that a resumed run had seen
        self._is_started = False  # a batch of this pass was handed out

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        if self._is_started:  # the last pass was left early
            self._finish()
        return self._pass()

    def _pass(self) -> Iterator[list[MicroBatch]]:
        for batch in self._workers(self.epoch, self._step):
            self._is_started = True
            self._step += 1
            if self._step == len(self):  # before the last batch is handed out: nobody has to ask for one more
                self._finish()
            yield batch

    def _finish(self) -> None:
        self.epoch += 1
        self._step = 0
        self._is_started = False

    def state_dict(self) -> dict[str, Any]:
        """Position of the next batch."""
        return {
            "epoch": self.epoch,
            "num_seen": self._step * self.samples_per_step,
            "seed": self.seed,
            "num_samples": len(self.samples),
            "data_hash": self.data_hash,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a saved loader stopped.

        Another number of samples per step is allowed: it continues at the nearest step before, with a warning.

        Raises:
            ValueError: the state belongs to other training data.
        """
        same_data = state_dict["num_samples"] == len(self.samples) and state_dict["data_hash"] == self.data_hash
        if not same_data:
            raise ValueError(
                f"The checkpoint was written with other training data ({state_dict['num_samples']} samples, hash "
                f"{state_dict['data_hash'][:12]}); these are {len(self.samples)} samples, hash {self.data_hash[:12]}. "
                "Restore the files to resume, or start a new run."
            )
        if state_dict["seed"] != self.seed:
            _log.warning(
                "Resuming with the checkpoint's data seed %d instead of %d: the rest of the epoch depends on it.",
                state_dict["seed"],
                self.seed,
            )
            self.seed = int(state_dict["seed"])
        self.epoch = int(state_dict["epoch"])
        self._step, rest = divmod(int(state_dict["num_seen"]), self.samples_per_step)
        self._is_started = False
        if rest:
            _log.warning("Resuming with %d samples per step: %d samples are seen again.", self.samples_per_step, rest)
