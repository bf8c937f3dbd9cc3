"""The order in which a run is examined: what a step needs comes before it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from treespark.data import DraftingData
from treespark.decoding.simulate import check_text
from treespark.doctor import costs, documents, models
from treespark.doctor.report import Report
from treespark.environment import environment
from treespark.module import DraftingModule


@dataclass(frozen=True)
class Surroundings:
    """What the trainer decides.

    Attributes:
        folder: Where the run is kept.
        device: Where it trains.
        prepare: Gives the module the trainer's precision.
        precision: The context of a training step.
        num_steps: Of the run; None takes those of `num_epochs`.
        num_epochs: Likewise; 0 if neither is known.
        num_processes: That train together.
    """

    folder: Path = Path("runs")
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    prepare: Callable[[Any], Any] = lambda module: module
    precision: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    num_steps: int | None = None
    num_epochs: int = 0
    num_processes: int = 1


def examine(report: Report, module: DraftingModule, data: DraftingData, around: Surroundings) -> None:
    """Examines a run, as `treespark fit` would start it; whatever is found goes into the report.

    Args:
        report: Takes the findings.
        module: Not composed yet; its weights are changed by the measurement.
        data: The datamodule.
        around: What the trainer decides.
    """
    facts = environment()
    versions = [f"{name} {version}" for name, version in facts["versions"].items() if version]
    report.say("versions", ", ".join(versions))
    report.say("machine", "; ".join([facts["platform"], facts["cpu"], *facts["accelerators"]]))
    documents.examine_template(report, data)
    train = documents.examine_documents(report, data)
    target = models.examine_target(report, module)
    drafter = None if target is None else models.examine_drafter(report, module, target)
    if train:
        documents.examine_anchors(report, data, train, None if drafter is None else drafter.block_size)
        if target is not None:
            documents.examine_lengths(report, data, train, target.spec.max_position_embeddings)
    if drafter is None:
        report.warn("not examined", "features, validation answers, step and disk: the models are not ready")
        return
    costs.examine_disk(report, module, around.folder)
    with report.guard("device"):
        around.prepare(module).to(around.device).train()
    if report.errors and report.errors[-1].topic == "device":
        return
    if data.val:
        _examine_answers(report, module, data)
    if train:
        _examine_step(report, module, data, around)


def _examine_answers(report: Report, module: DraftingModule, data: DraftingData) -> None:
    """Whether validation can simulate rounds on the answers: only the target's own greedy text tells its verdict."""
    if not module.simulate:
        report.say("simulation", "off: val/tau is not measured")
        return
    if report.errors and any(finding.topic == "val" for finding in report.errors):
        return
    samples = data.samples("val")
    foreign = [sample.where for sample in samples if not sample.own_text]
    if foreign:
        report.fail(
            "simulation",
            f"{len(foreign)} of {len(samples)} validation answers carry no token ids of the target ({foreign[0]}): "
            "make the file with `treespark generate`, or set model.simulate to false.",
        )
        return
    with report.guard("simulation"):
        loader: Any = data.val_dataloader()
        batch = next(iter(loader))[0].to(module.device)
        final = module.target.features(batch.input_ids, (), batch.attention_mask, batch.position_ids).final
        rows = (batch.sample_ids >= 0).nonzero()[:, 0]
        lengths = batch.attention_mask.sum(1)
        ties = check_text(module.target, final[rows], batch.input_ids[rows], batch.prompt_lengths[rows], lengths[rows])
        report.say(
            "simulation",
            f"the first {len(rows)} of {len(samples)} validation answers are the target's own text"
            + (f" ({ties} near-ties)" if ties else ""),
        )


def _examine_step(report: Report, module: DraftingModule, data: DraftingData, around: Surroundings) -> None:
    batch = None
    loader = data.train_dataloader()
    with report.guard("batches"):
        loader.num_workers = 0
        step = loader.build(loader.epoch, 0)
        batch = step[0].to(module.device)  # the longest rows come first
    if batch is None:
        return
    with report.guard("features"), torch.no_grad(), around.precision():
        module.open_features(data)
        models.examine_features(report, module, batch, module._features(batch))
    num_steps = around.num_steps or around.num_epochs * len(loader)
    with around.precision():
        costs.examine_step(report, module, batch, len(step), num_steps, around.num_processes)
