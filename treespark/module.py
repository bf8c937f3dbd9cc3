"""The LightningModule: composes target, drafter, tree policy, losses and metrics; the mathematics lives in the rooms.

Shapes: R rows, S sequence, A anchors per row, M valid anchors of a micro-batch, K depths, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from treespark.blocks import DraftBlocks, Labels, make_labels
from treespark.checkpoint import check_record, follow_options, make_record
from treespark.data import DraftingData, MicroBatch
from treespark.drafters import Drafter
from treespark.drafters.warm_start import start_from_drafter, start_from_target
from treespark.environment import environment
from treespark.features import FeatureSource, Online
from treespark.losses import LossTerm
from treespark.metrics import ValidationMetrics
from treespark.objective import Drafted, Objective
from treespark.policies import TreePolicy
from treespark.sharding import ShardedDrafter, check_resumed_file, check_strategy, shard_target, whole_copy
from treespark.target import Target, TargetFeatures, TargetSpec, check_mask_token
from treespark.vocabulary import choose_tokens, draft_blocks, draftable

T = TypeVar("T")


class DraftingModule(LightningModule):
    """Trains a drafter for a frozen target under the tree policy that it is deployed with.

    One `training_step` is one optimiser step over a list of micro-batches (arXiv 2610.20175 §3.2, B.4).

    Args:
        target: The frozen target: a known name, a local model folder or a hub id.
        drafter: Class and options of the drafter; it is built for the target's sizes.
        policy: The tree policy, in replay and in decoding; recorded with the drafter.
        losses: The terms of the objective; a coefficient of 0 switches a term and its work off.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        betas: AdamW's coefficients of the running averages.
        warmup_ratio: Share of all steps with a linear warm-up; a cosine to 0 follows.
        chunk_anchors: Anchors whose losses are computed together; bounds memory, changes no result.
        target_dtype: Of the target's weights and hidden states.
        target_revision: Revision of a hub id.
        simulate: Measure acceptance in validation by simulated rounds. Needs answers that the target itself wrote
            (`treespark generate`).
        max_simulated_rows: At most so many validation rows are simulated; None takes all.
        features: Where the target's features of training rows come from: `Online` (None) runs the target at every
            step, `Offline` reads a cache of `treespark cache build`, `Hybrid` computes once and keeps. Validation and
            test always run the target.
        init_from: Folder or hub id of a drafter, in any format, to train further. Its weights are loaded where they
            fit; a line says what was not.
        init_from_target_layers: Layers of the target, one for each drafter layer, that the drafter's start from.
        init_from_revision: Revision of a hub id in `init_from`.
        shard_target: Under `ModelParallelStrategy`, spread the target's layers over the processes too, instead of
            holding the target whole in each.
    """

    def __init__(
        self,
        target: str,
        drafter: Callable[[TargetSpec], Drafter],
        policy: TreePolicy,
        losses: list[LossTerm],
        learning_rate: float = 6e-4,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_ratio: float = 0.04,
        chunk_anchors: int = 64,
        target_dtype: str = "float32",
        target_revision: str | None = None,
        simulate: bool = True,
        max_simulated_rows: int | None = None,
        features: FeatureSource | None = None,
        init_from: str | None = None,
        init_from_target_layers: list[int] | None = None,
        init_from_revision: str | None = None,
        shard_target: bool = False,
    ) -> None:
        super().__init__()
        if init_from is not None and init_from_target_layers is not None:
            raise ValueError("Give init_from or init_from_target_layers, not both: a drafter has one start.")
        if init_from_revision is not None and init_from is None:
            raise ValueError("init_from_revision needs init_from: the hub id that it is a revision of.")
        self.init_from, self.init_from_target_layers = init_from, init_from_target_layers
        self.init_from_revision, self.shard_target = init_from_revision, shard_target
        if not 0 <= warmup_ratio < 1:
            raise ValueError(f"warmup_ratio must be at least 0 and below 1, got {warmup_ratio}.")
        self.target_name, self.target_dtype, self.target_revision = target, target_dtype, target_revision
        self.policy, self.make_drafter = policy, drafter
        self.objective = Objective(losses, chunk_anchors)
        self.learning_rate, self.weight_decay, self.betas = learning_rate, weight_decay, betas
        self.warmup_ratio, self.simulate, self.max_simulated_rows = warmup_ratio, simulate, max_simulated_rows
        self.feature_source = features or Online()
        self._provenance: dict[str, Any] | None = None
        self._sharded: ShardedDrafter | None = None
        self.target: Target
        self.drafter: Drafter
        self.metrics: ValidationMetrics

    # Building -------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Loads the target, builds the drafter for it, and shards both as the strategy asks; once.

        Raises:
            ValueError: When policy, losses or mask token do not fit the target or the drafter, or for a strategy that
                is not supported.
        """
        if hasattr(self, "target"):
            return
        check_strategy(self._trainer, self.device_mesh, self.shard_target, self.feature_source.runs_evenly)
        target = Target.load(self.target_name, dtype=self.target_dtype, revision=self.target_revision)
        self.compose(target)
        if self.device_mesh is not None:
            check_resumed_file(self.trainer.ckpt_path, self.drafter)
            # Strict loading would ask a checkpoint for the target's tensors too; the check above is stricter.
            self.strict_loading = False
            self._sharded = ShardedDrafter(self.drafter, self.device_mesh["data_parallel"])
            if self.shard_target:
                shard_target(target, self.device_mesh["data_parallel"])

    def with_weights(self, function: Callable[[], T]) -> T:
        """Returns function(), called while the drafter's weights are whole."""
        return function() if self._sharded is None else self._sharded(function)

    def whole_drafter(self) -> Drafter:
        """Returns the drafter, or a gathered copy of a sharded one; every process must take part."""
        return whole_copy(self.drafter)

    def compose(self, target: Target) -> None:
        """Takes a loaded target and builds the drafter; see `configure_model`."""
        drafter = self.make_drafter(target.spec)
        self.policy.check(drafter.block_size, target.spec.vocab_size)
        check_mask_token(target.tokenizer if target.has_tokenizer else None, drafter.mask_token_id, target.spec)
        for term in self.objective.terms:
            if "confidence" in term.needs and not drafter.has_confidence:
                raise ValueError(
                    f"The loss {type(term).__name__} needs a confidence head, which this {type(drafter).__name__} has "
                    "not: set the drafter's option confidence to true, or the loss's coefficient to 0."
                )
        choose_tokens(drafter, target, getattr(self._trainer, "datamodule", None))
        drafter.bind(target)
        if self._trainer is None or self._trainer.state.fn == "fit":
            self._warm_start(drafter, target)
        self.target, self.drafter = target, drafter
        self.metrics = ValidationMetrics(drafter.block_size, self.objective.figures, drafter.has_confidence)

    def _warm_start(self, drafter: Drafter, target: Target) -> None:
        line = None
        if self.init_from is not None:
            source: Drafter = Drafter.from_pretrained(self.init_from, revision=self.init_from_revision, target=target)
            line = start_from_drafter(drafter, source, self.init_from)
        elif self.init_from_target_layers is not None:
            line = start_from_target(drafter, target, self.init_from_target_layers)
        if line is not None:
            rank_zero_info(line)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a linear warm-up and a cosine to 0 over all optimiser steps of the run, in closed form."""
        parameters = self.drafter.trainable_parameters()
        optimizer = torch.optim.AdamW(
            parameters, lr=self.learning_rate, betas=self.betas, weight_decay=self.weight_decay
        )
        total = int(self.trainer.estimated_stepping_batches)
        warmup = math.ceil(self.warmup_ratio * total)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            progress = min(1.0, (step - warmup) / max(1, total - warmup))
            return 0.5 * (1.0 + math.cos(math.pi * progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        """Refuses trainer settings that would change what a step means, and documents whose features are missing."""
        self.check_trainer()
        self.open_features(getattr(self.trainer, "datamodule", None))

    def check_trainer(self) -> None:
        """Refuses trainer settings that would change what a step means.

        Raises:
            ValueError: For another `accumulate_grad_batches` than 1.
        """
        if self.trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches is {self.trainer.accumulate_grad_batches}, but it averages "
                "micro-batches of unequal weight. Leave it at 1 and set data.micro_batches instead."
            )

    def open_features(self, data: Any) -> None:
        """Opens the feature source for the composed models.

        Args:
            data: The datamodule, whose training documents the source is checked for; anything else is not checked.

        Raises:
            ValueError: When the source belongs to something else, or lacks documents.
        """
        self.feature_source.open(self.target, self.drafter.layer_ids)
        if isinstance(data, DraftingData):
            self.feature_source.check((sample.ids for sample in data.samples("train")), data.rendering)

    # Training -------------------------------------------------------------------------------------------------------

    def training_step(self, batch: list[MicroBatch], batch_idx: int) -> Tensor:
        """Returns the loss of one optimiser step over all micro-batches."""
        return self.with_weights(lambda: self._step(batch))

    def _step(self, batch: list[MicroBatch]) -> Tensor:
        labels = [self._labels(micro_batch) for micro_batch in batch]
        pairs = zip(batch, labels, strict=True)
        value = self.objective(
            (self._draft(micro_batch, item, self._features(micro_batch)) for micro_batch, item in pairs),
            self.drafter.trainable_parameters(),
            labels=labels,
            reduce=lambda tensor: self.trainer.strategy.reduce(tensor, reduce_op="sum"),
            world_size=self.trainer.world_size,
        )
        logged = {
            f"train/loss/{term.name}": item
            for term, item in zip(self.objective.terms, value.values, strict=True)
            if torch.isfinite(item)
        }
        logged |= {f"train/{name}": item for name, item in value.diagnostics.items() if torch.isfinite(item)}
        self.log_dict({key: item.float() for key, item in logged.items()})
        self.log("train/loss", value.loss.detach().float() / self.trainer.world_size, prog_bar=True)
        self._log_sizes(batch)
        return value.loss

    def _log_sizes(self, batch: list[MicroBatch]) -> None:
        """Logs the anchors and tokens of a step over all processes, and the share of its places that only pad."""
        counts = torch.zeros(3, device=self.device, dtype=torch.long)
        for part in batch:
            tokens = part.attention_mask[part.sample_ids >= 0].sum()
            counts += torch.stack([part.anchor_mask.sum(), tokens, tokens.new_tensor(part.input_ids.numel())])
        counts = self.trainer.strategy.reduce(counts, reduce_op="sum")
        num_anchors, num_tokens, num_places = counts.float().unbind()
        self.log("train/num_anchors", num_anchors)
        self.log("train/num_tokens", num_tokens)
        self.log("train/padding_share", 1 - num_tokens / num_places)

    def _labels(self, batch: MicroBatch) -> Labels:
        rows, anchors = self._anchors(batch)
        depths = self.drafter.block_size
        expanded = self.policy.expanded_per_depth(depths)
        labels = make_labels(batch.input_ids, batch.loss_mask, batch.document_ids, rows, anchors, depths, expanded)
        return draftable(labels, self.drafter)

    @staticmethod
    def _anchors(batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Rows and positions of the M valid anchors, each [M]."""
        rows, columns = batch.anchor_mask.nonzero(as_tuple=True)
        return rows, batch.anchors[rows, columns]

    def _features(self, batch: MicroBatch) -> TargetFeatures:
        """The target's features of a micro-batch: one forward; in training as `features` says."""
        if self.training:
            # A row that only fills up a process's share holds no document.
            documents = batch.document_ids.masked_fill((batch.sample_ids < 0).unsqueeze(1), -1)
            return self.feature_source.features(batch.input_ids, documents, batch.position_ids)
        return self.target.features(batch.input_ids, self.drafter.layer_ids, batch.attention_mask, batch.position_ids)

    def _draft(self, batch: MicroBatch, labels: Labels, features: TargetFeatures) -> Drafted:
        """Runs the backbone once on a micro-batch."""
        context = self.drafter.encode(features.context, batch.position_ids)
        positions = batch.position_ids.gather(1, batch.anchors)
        every = torch.arange(batch.input_ids.shape[1], device=self.device)
        # An anchor sees the same document strictly before it: its own hidden state is not known in decoding.
        visible = every < batch.anchors.unsqueeze(-1)
        visible &= batch.document_ids.unsqueeze(1) == batch.document_ids.gather(1, batch.anchors).unsqueeze(-1)
        tokens = batch.input_ids.gather(1, batch.anchors)
        hidden = self.drafter.draft(context, tokens, positions, visible)[batch.anchor_mask]
        rows, anchors = self._anchors(batch)
        depth = torch.arange(self.drafter.block_size, device=self.device)
        reference = (anchors.unsqueeze(1) + depth).clamp(max=batch.input_ids.shape[1] - 1)
        target_hidden = features.final[rows.unsqueeze(1), reference]

        def make_blocks(chunk: Tensor, part: slice) -> DraftBlocks:
            return draft_blocks(self.target, self.drafter, self.policy, labels[part], chunk, target_hidden[part])

        return Drafted(hidden, labels, make_blocks)

    # Validation -----------------------------------------------------------------------------------------------------

    def validation_step(self, batch: list[MicroBatch], batch_idx: int) -> None:
        """Adds losses, packed-tree diagnostics and simulated rounds of a batch."""
        self.with_weights(lambda: self._measure(batch))

    def _measure(self, batch: list[MicroBatch]) -> None:
        for micro_batch in batch:
            labels = self._labels(micro_batch)
            features = self._features(micro_batch)
            drafted = self._draft(micro_batch, labels, features)
            sums, weights = self.objective.evaluate(drafted, self.metrics.visit)
            self.metrics.add_losses(sums, weights)
            if self.simulate:
                self._simulate(micro_batch, features)

    def _simulate(self, batch: MicroBatch, features: TargetFeatures) -> None:
        from treespark.decoding import simulate

        assert batch.document_samples.shape[1] == 1, "rounds follow one text a row; validation data is never packed"
        rows = (batch.sample_ids >= 0).nonzero()[:, 0]  # the others fill up a process's share
        if self.max_simulated_rows is not None:
            rows = rows[: max(0, self.max_simulated_rows - self.metrics.num_simulated)]
        if not bool(batch.own_text[rows].all()):
            raise ValueError(
                "Simulated rounds need answers that the target itself wrote, with their token ids: make the "
                "validation file with `treespark generate`, or set model.simulate to false."
            )
        rounds = simulate(
            self.target,
            self.drafter,
            self.policy,
            TargetFeatures(features.context[rows], features.final[rows]),
            batch.input_ids[rows],
            batch.prompt_lengths[rows],
            batch.attention_mask[rows].sum(1),
        )
        self.metrics.add_rounds(rounds)

    def on_validation_epoch_start(self) -> None:
        """Starts every validation from empty metrics."""
        self.metrics.reset()

    def on_validation_epoch_end(self) -> None:
        """Logs the metrics under `val/`."""
        self._log_metrics("val")

    def test_step(self, batch: list[MicroBatch], batch_idx: int) -> None:
        """Same as `validation_step`, on the test file."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_start(self) -> None:
        """Starts from empty metrics."""
        self.metrics.reset()

    def on_test_epoch_end(self) -> None:
        """Logs the metrics under `test/`."""
        self._log_metrics("test")

    def _log_metrics(self, stage: str) -> None:
        for name, value in self.metrics.compute().items():
            self.log(f"{stage}/{name}", float(value), prog_bar=name == "tau", rank_zero_only=False)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the trainable tensors alone: no target, no embedding, no output head."""
        return {f"drafter.{name}": tensor for name, tensor in self.drafter.trainable_state_dict().items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads what `state_dict` gave.

        Raises:
            ValueError: For missing, unexpected or mis-shaped tensors, by name.
        """
        prefix = "drafter."
        self.drafter.load_trainable_state_dict({name.removeprefix(prefix): item for name, item in state_dict.items()})
        if self.drafter.draft_ids is not None:
            self.drafter.select_tokens(self.drafter.draft_ids, self.target)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what is needed to decode: the drafter's options, the recorded policy, the target's name and identity."""
        data = getattr(self._trainer, "datamodule", None)
        if self._provenance is None:  # found out once, since files are read for it
            self._provenance = environment() | {"data_hash": getattr(data, "data_hash", None)}
        checkpoint["treespark"] = make_record(self.drafter, self.policy, self.target_name, data, self._provenance)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of another target or data, and lets changed optimiser options apply after a resume.

        Raises:
            ValueError: When the recorded identity is not this target's, or its prompts were rendered otherwise.
        """
        data = getattr(self._trainer, "datamodule", None)
        check_record(checkpoint.get("treespark", {}), self.target.spec.fingerprint, self.target_name, data)
        states = checkpoint.get("optimizer_states", [])
        if self._sharded is not None:  # that strategy has loaded them already
            states = [{"param_groups": optimizer.param_groups} for optimizer in self.trainer.optimizers]
        options = {"weight_decay": self.weight_decay, "betas": self.betas}
        follow_options(checkpoint.get("lr_schedulers", []), states, self.learning_rate, **options)
