"""The Lightning datamodule: prompts with answers in, batches of anchors out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, get_args

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from treespark.data.loader import BatchLoader, TrainLoader
from treespark.data.mixture import SourceSpec, hash_sources, open_source
from treespark.data.prompts import OnError, Problems
from treespark.data.samples import LongSequences, Sample, load_samples
from treespark.data.sources import PromptSource
from treespark.data.template import ChatEncoder
from treespark.target.loading import template_sha256

ROLES = ("train", "val", "test")


class DraftingData(LightningDataModule):
    """Conversations with the target's answers, rendered by its chat template; loss on the answers only.

    Args:
        target: the target whose tokenizer and chat template apply: a name, a folder or a hub id.
        train: JSONL file or files with answers, or any other source: a data set, a list, a mixture by weight, or a
            YAML file that holds one.
        val: JSONL file with answers that the target wrote (``treespark generate``), or None.
        test: likewise, for ``treespark test``.
        max_length: tokens per sequence, and per row with ``packing``.
        long_sequences: what training does with longer ones, each way with a count in the log: ``cut`` the answer,
            ``split`` them into documents of their own, or ``drop`` them. Validation and test always cut.
        packing: whether rows of training hold several documents, as many as fit; their losses are those of documents
            apart. Validation and test keep one document a row, since simulated rounds follow one text.
        num_anchors: anchors drawn per document and epoch.
        anchors_per_step: training anchors per optimiser step over all processes, in place of ``num_anchors``: each
            document of the step gets a share in proportion to its supervised tokens. None leaves it at ``num_anchors``.
        batch_size: rows per micro-batch.
        micro_batches: micro-batches per optimiser step and process.
        val_batch_size: rows per validation or test batch; as ``batch_size`` if not given.
        seed: seeds the order of samples and the anchors.
        num_workers: processes that build batches ahead.
        on_error: ``stop`` at the first unusable line, or ``skip`` such lines with a report.
        chat_template_kwargs: options that the chat template reads, such as ``enable_thinking``.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        target: str,
        train: SourceSpec | None = None,
        val: str | None = None,
        test: str | None = None,
        max_length: int = 2048,
        long_sequences: LongSequences = "cut",
        packing: bool = False,
        num_anchors: int = 64,
        anchors_per_step: int | None = None,
        batch_size: int = 4,
        micro_batches: int = 1,
        val_batch_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        on_error: OnError = "stop",
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("max_length", max_length, 3),
            ("num_anchors", num_anchors, 1),
            ("anchors_per_step", 1 if anchors_per_step is None else anchors_per_step, 1),
            ("batch_size", batch_size, 1),
            ("micro_batches", micro_batches, 1),
            ("val_batch_size", val_batch_size or batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ValueError(f"data.{name} must be at least {least}, got {value}.")
        Problems(on_error)  # checks the word
        if long_sequences not in get_args(LongSequences):
            raise ValueError(
                f"data.long_sequences must be one of {', '.join(get_args(LongSequences))}, got {long_sequences!r}."
            )
        self.target = target
        self.train = train
        self.val = val
        self.test = test
        self.max_length = max_length
        self.long_sequences: LongSequences = long_sequences
        self.packing = packing
        self.num_anchors = num_anchors
        self.anchors_per_step = anchors_per_step
        self.batch_size = batch_size
        self.micro_batches = micro_batches
        self.val_batch_size = val_batch_size or batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.on_error: OnError = on_error
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.num_skipped = 0
        self._encoder: ChatEncoder | None = None
        self._sources: dict[str, PromptSource] = {}
        self._samples: dict[str, list[Sample]] = {}

    @property
    def encoder(self) -> ChatEncoder:
        """Tokenizer and template, loaded when first used."""
        if self._encoder is None:
            from treespark.target import load_tokenizer

            self._encoder = ChatEncoder(load_tokenizer(self.target), self.chat_template_kwargs)
        return self._encoder

    @property
    def chat_template_sha256(self) -> str:
        """Hash of the target's chat template."""
        return template_sha256(self.encoder.tokenizer)

    @property
    def data_hash(self) -> str:
        """SHA-256 of the bytes of all files, or of what other sources gave, in the order train, val, test."""
        return hash_sources([source for role in ROLES if (source := self._source(role))])

    @property
    def data_sources(self) -> dict[str, Any]:
        """Options and hash of each source, for the record of a run; of a mixture, seed and drawn numbers too."""
        return {role: source.describe() for role in ROLES if (source := self._source(role))}

    def _source(self, role: str) -> PromptSource | None:
        spec = {"train": self.train, "val": self.val, "test": self.test}[role]
        if role not in self._sources and spec:
            self._sources[role] = open_source(spec)
        return self._sources.get(role)

    @property
    def rendering(self) -> dict[str, Any]:
        """What the tokens of a training document depend on: the template (with its options) as a hash, the lengths."""
        template = f"{self.encoder.tokenizer.chat_template} {sorted(self.chat_template_kwargs.items())}"
        return {
            "chat_template": hashlib.sha256(template.encode()).hexdigest(),
            "max_length": self.max_length,
            "long_sequences": self.long_sequences,
        }

    def token_counts(self, vocab_size: int) -> Tensor | None:
        """How often each token is supervised in the training data: [V]; None without such data."""
        if not self.train:
            return None
        parts = [sample.ids[start:stop] for sample in self.samples("train") for start, stop in sample.spans]
        return torch.bincount(torch.cat(parts), minlength=vocab_size)

    def samples(self, role: str) -> Sequence[Sample]:
        """The tokenised samples of ``"train"``, ``"val"`` or ``"test"``, read once.

        Raises:
            FileNotFoundError: a file does not exist.
            DataError: a line cannot be used, or nothing usable is left.
            ValueError: no file is configured for the role.
        """
        if role not in self._samples:
            source = self._source(role)
            if source is None:
                raise ValueError(
                    f"data.{role} names no file. Give a JSONL file with answers (treespark generate writes them)."
                )
            problems = Problems(self.on_error)
            long_sequences = self.long_sequences if role == "train" else "cut"
            self._samples[role] = load_samples([source], self.encoder, self.max_length, problems, long_sequences)
            self.num_skipped += len(problems.errors)
        return self._samples[role]

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenise what a stage needs, so that bad data stops a run before it starts."""
        needed = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}.get(stage or "", ROLES)
        for role in needed:
            if self._source(role):
                self.samples(role)

    def train_dataloader(self) -> TrainLoader:
        """Shuffled, resumable; one item is one optimiser step."""
        samples = self.samples("train")
        return TrainLoader(
            samples,
            data_hash=self._sources["train"].sha256,
            pack_length=self.max_length if self.packing else None,
            anchors_per_step=self.anchors_per_step,
            num_anchors=self.num_anchors,
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            seed=self.seed,
            num_workers=self.num_workers,
            **self._process(),
        )

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """In file order, with the anchors of epoch 0 at every pass; empty without a validation file."""
        return self._evaluation("val") if self.val else []

    def test_dataloader(self) -> BatchLoader:
        """In file order, with the anchors of epoch 0."""
        return self._evaluation("test")

    def _evaluation(self, role: str) -> BatchLoader:
        return BatchLoader(
            self.samples(role),
            num_anchors=self.num_anchors,
            batch_size=self.val_batch_size,
            seed=self.seed,
            num_workers=self.num_workers,
            **self._process(),
        )

    def _process(self) -> dict[str, int]:
        if self.trainer is None:
            return {"rank": 0, "world_size": 1}
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
