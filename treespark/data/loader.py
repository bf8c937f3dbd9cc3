"""Loaders that know where they are: the same batches after a resume, on any number of workers and processes.

One item is what one optimiser step sees: a list of micro-batches. A step takes ``world_size * micro_batches *
batch_size`` rows of the epoch's order and deals them out to the processes. A row is one document, or several of them in
a training that packs. The last step of an epoch may be smaller; every process always gets the same number of steps and
of micro-batches, filled up with rows that hold no anchor. Torch's ``DataLoader`` runs the workers; only what was handed
out counts as seen, not what they prefetched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from treespark.data.collate import MicroBatch, collate, seeded_generator
from treespark.data.packing import Packing, share_anchors
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
        num_anchors: the most anchors per document.
        batch_size: rows per micro-batch.
        micro_batches: micro-batches per step and process.
        seed: seeds the order and the anchors.
        num_workers: processes that build batches ahead; 0 builds them in this one.
        rank: this process, from 0.
        world_size: number of processes.
    """

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

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return len(self.samples)

    @property
    def rows_per_step(self) -> int:
        """Rows that one step takes, over all processes."""
        return self.world_size * self.micro_batches * self.batch_size

    def __len__(self) -> int:
        return -(-self.num_rows // self.rows_per_step)

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

    def order(self, epoch: int) -> list[list[int]]:
        """Rows of an epoch, as sample ids, in the order in which steps take them, over all processes."""
        return [[i] for i in range(len(self.samples))]

    def build(self, epoch: int, step: int) -> list[MicroBatch]:
        """This process's micro-batches of a step."""
        size = self.rows_per_step
        taken = self._arrange(self.order(epoch)[step * size : (step + 1) * size])
        mine = taken[self.rank :: self.world_size]
        most = -(-len(taken) // self.world_size)  # rows of the fullest process
        num_anchors = self._num_anchors(taken)
        batches = []
        for first in range(0, most, self.batch_size):
            ids: list[list[int]] = mine[first : first + self.batch_size] or [[]]
            rows = [[self.samples[i] for i in row] for row in ids]
            batches.append(collate(rows, ids, num_anchors=num_anchors, seed=self.seed, epoch=epoch))
        return batches

    def _arrange(self, rows: list[list[int]]) -> list[list[int]]:
        """The rows of a step, in the order in which they are dealt out."""
        return rows

    def _num_anchors(self, rows: list[list[int]]) -> int | dict[int, int]:
        """Anchors per document of a step: the most, or each one's number."""
        return self.num_anchors


class TrainLoader(BatchLoader):
    """Shuffled by (seed, epoch) and resumable inside an epoch; Lightning saves and restores its state.

    Each pass is the next epoch; a pass that was left early is over. The state is counted in rows over all processes, so
    it does not depend on the rank.

    Args:
        samples: the data set.
        data_hash: identity of the files, kept in the state.
        pack_length: the most tokens of a row that holds several documents; None keeps one document a row.
        anchors_per_step: anchors of a step, over all its documents and all processes, shared out in proportion to what
            each document offers; None draws up to ``num_anchors`` in each document.
        options: those of `BatchLoader`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        data_hash: str = "",
        pack_length: int | None = None,
        anchors_per_step: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(samples, **options)
        if anchors_per_step is not None and anchors_per_step < 1:
            raise ValueError(f"anchors_per_step must be at least 1, got {anchors_per_step}.")
        self.data_hash = data_hash
        self.pack_length = pack_length
        self.anchors_per_step = anchors_per_step
        self.epoch = 0
        self._step = 0  # steps of this epoch that were handed out, or that a resumed run had seen
        self._is_started = False  # a batch of this pass was handed out
        self._order: tuple[tuple[int, int], list[list[int]]] | None = None  # of the last (seed, epoch) asked for
        self._packing = None if pack_length is None else Packing([len(sample) for sample in samples], pack_length)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, the same in each."""
        return len(self.samples) if self._packing is None else self._packing.num_rows

    def order(self, epoch: int) -> list[list[int]]:
        """Rows of an epoch, as sample ids: a function of (seed, epoch) alone."""
        key = (self.seed, epoch)
        if self._order is None or self._order[0] != key:
            if self._packing is not None:
                rows = self._packing.rows(*key)
            else:
                generator = seeded_generator(*key, "order")
                rows = [[i] for i in torch.randperm(len(self.samples), generator=generator).tolist()]
            self._order = (key, rows)
        return self._order[1]

    def _arrange(self, rows: list[list[int]]) -> list[list[int]]:
        # Rows of like length share a micro-batch; which rows a step takes stays as drawn.
        return sorted(rows, key=lambda row: (-sum(len(self.samples[i]) for i in row), row))

    def _num_anchors(self, rows: list[list[int]]) -> int | dict[int, int]:
        if self.anchors_per_step is None:
            return self.num_anchors
        ids = sorted(i for row in rows for i in row)
        shares = share_anchors([self.samples[i].num_eligible for i in ids], self.anchors_per_step)
        return dict(zip(ids, shares, strict=True))

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
            "num_seen": self._step * self.rows_per_step,
            "seed": self.seed,
            "num_samples": len(self.samples),
            "data_hash": self.data_hash,
            "pack_length": self.pack_length,
            "num_rows": self.num_rows,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a saved loader stopped.

        Another number of rows per step is allowed: it continues at the nearest step before, with a warning.

        Raises:
            ValueError: the state belongs to other training data, or stands inside an epoch that was packed otherwise.
        """
        same_data = state_dict["num_samples"] == len(self.samples) and state_dict["data_hash"] == self.data_hash
        if not same_data:
            raise ValueError(
                f"The checkpoint was written with other training data ({state_dict['num_samples']} samples, hash "
                f"{state_dict['data_hash'][:12]}); these are {len(self.samples)} samples, hash {self.data_hash[:12]}. "
                "Restore the files to resume, or start a new run."
            )
        packed = state_dict.get("pack_length"), state_dict.get("num_rows", state_dict["num_samples"])
        if packed != (self.pack_length, self.num_rows) and state_dict["num_seen"]:
            was, now = (
                f"{length or 'none'} ({rows} rows)" for length, rows in (packed, (self.pack_length, self.num_rows))
            )
            raise ValueError(
                f"The checkpoint stands inside an epoch with pack_length {was}; it is {now} here. Keep "
                "data.packing and data.max_length as they were to resume."
            )
        if state_dict["seed"] != self.seed:
            _log.warning(
                "Resuming with the checkpoint's data seed %d instead of %d: the rest of the epoch depends on it.",
                state_dict["seed"],
                self.seed,
            )
            self.seed = int(state_dict["seed"])
        self.epoch = int(state_dict["epoch"])
        self._step, rest = divmod(int(state_dict["num_seen"]), self.rows_per_step)
        self._is_started = False
        if rest:
            _log.warning("Resuming with %d rows per step: %d rows are seen again.", self.rows_per_step, rest)
