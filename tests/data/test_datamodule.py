"""The datamodule inside a real Trainer: 6 steps = 3 + resume + 3, and its clear errors."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from tests.tiny_text import save_tiny_target
from treespark.data import BatchLoader, DraftingData, MicroBatch


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    written = {}
    for role, count in (("train", 10), ("val", 3), ("test", 2)):
        path = folder / f"{role}.jsonl"
        lines = [{"prompt": f"question {i}", "response": "word " * (i + 2)} for i in range(count)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        written[role] = str(path)
    return written


class Recorder(LightningModule):
    """Keeps what every step saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[MicroBatch]] = []
        self.validated: list[int] = []

    def training_step(self, batch: list[MicroBatch], index: int) -> torch.Tensor:
        self.seen.append(batch)
        return self.weight * sum(micro.loss_mask.sum() for micro in batch)

    def validation_step(self, batch: list[MicroBatch], index: int) -> None:
        self.validated += batch[0].sample_ids.tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def module(target: str, files: dict[str, str], **options: Any) -> DraftingData:
    defaults: dict[str, Any] = {"num_anchors": 3, "batch_size": 1, "micro_batches": 2, "seed": 1}
    return DraftingData(target, **(defaults | files | options))


def fit(data: DraftingData, steps: int, ckpt: str | None = None, **options: Any) -> tuple[Recorder, Trainer]:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer, model = Trainer(max_steps=steps, max_epochs=-1, **(quiet | options)), Recorder()
    trainer.fit(model, data, ckpt_path=ckpt)
    return model, trainer


def same(a: list[list[MicroBatch]], b: list[list[MicroBatch]]) -> bool:
    return [len(x) for x in a] == [len(y) for y in b] and all(
        torch.equal(getattr(m, f.name), getattr(n, f.name))
        for x, y in zip(a, b, strict=True)
        for m, n in zip(x, y, strict=True)
        for f in fields(m)
    )


@pytest.mark.parametrize(("stop", "num_workers"), [(3, 0), (5, 0), (7, 0), (3, 1)])
def test_trainer_resumes_inside_between_and_across_epochs(
    tmp_path: Path, target: str, files: dict[str, str], stop: int, num_workers: int
) -> None:
    """10 samples, 2 a step: epochs of 5 steps. Stops inside the first, at its end, and inside the second."""
    straight, _ = fit(module(target, files), stop + 6)
    first, trainer = fit(module(target, files, num_workers=num_workers), stop)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    second, trainer = fit(module(target, files, num_workers=num_workers), stop + 6, str(tmp_path / "last.ckpt"))
    assert same(first.seen + second.seen, straight.seen) and trainer.global_step == stop + 6
    assert torch.equal(second.weight, straight.weight)


@pytest.mark.parametrize("every", [3, 5])
def test_checkpoints_of_a_running_fit_resume_too(
    tmp_path: Path, target: str, files: dict[str, str], every: int
) -> None:
    """Saved by the callback in mid-run, before the epoch's own end was reached."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    straight, _ = fit(module(target, files), 12, callbacks=[saver], enable_checkpointing=True)
    resumed, _ = fit(module(target, files), 12, str(tmp_path / f"step={every}.ckpt"))
    assert same(resumed.seen, straight.seen[every:])


def test_checkpoints_after_validation_resume_too(tmp_path: Path, target: str, files: dict[str, str]) -> None:
    """Validation after every 3 of 5 steps writes a checkpoint inside the epoch; the resume continues with step 4."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1)
    options: dict[str, Any] = {"val_check_interval": 3, "enable_checkpointing": True}
    straight, _ = fit(module(target, files), 12, callbacks=[saver], **options)
    resumed, _ = fit(
        module(target, files),
        12,
        str(tmp_path / "step=3.ckpt"),
        callbacks=[ModelCheckpoint(dirpath=tmp_path)],
        **options,
    )
    assert same(resumed.seen, straight.seen[3:])


def test_validation_runs_in_file_order_and_leaves_training_alone(target: str, files: dict[str, str]) -> None:
    plain, _ = fit(module(target, files), 6)
    validated, _ = fit(module(target, files, val_batch_size=2), 6, val_check_interval=2)
    assert same(plain.seen, validated.seen)
    assert validated.validated[:3] == [0, 1, 2]


def test_no_validation_file(target: str, files: dict[str, str]) -> None:
    model, _ = fit(DraftingData(target, train=files["train"], batch_size=2), 3)
    assert len(model.seen) == 3 and not model.validated


def test_cut_and_length_limits(target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The prompt takes n tokens. With n + 2 two tokens of the answer remain; with n + 1 the prompt is too long."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "hi", "response": "a long answer"}) + "\n")
    data = DraftingData(target, train=str(path))
    n = data.samples("train")[0].prompt_length
    cut = DraftingData(target, train=str(path), max_length=n + 2).samples("train")[0]
    assert len(cut) == n + 2 and cut.spans == ((n, n + 2),)
    assert f"1 of 1 answers cut at {n + 2} tokens" in caplog.text
    with pytest.raises(ValueError, match=rf"data.jsonl:1: the prompt has {n} tokens and leaves no room"):
        DraftingData(target, train=str(path), max_length=n + 1).setup("fit")
    assert len(DraftingData(target, train=str(path), max_length=len(data.samples("train")[0])).samples("train")[0])


def test_training_packs_and_splits_while_validation_keeps_one_document_a_row(
    target: str, files: dict[str, str]
) -> None:
    """Every token of the ten training answers is in rows of at most 40; validation rows hold one cut answer each."""
    data = module(target, files, max_length=40, packing=True, long_sequences="split", anchors_per_step=5)
    whole = sum(len(sample) for sample in module(target, files).samples("train"))
    rows = [micro for step in data.train_dataloader() for micro in step]
    assert sum(int(micro.attention_mask[micro.sample_ids >= 0].sum()) for micro in rows) == whole
    assert max(micro.input_ids.shape[1] for micro in rows) <= 40
    assert max(micro.document_samples.shape[1] for micro in rows) > 1
    loader = data.val_dataloader()
    assert isinstance(loader, BatchLoader)
    assert all(micro.document_samples.shape[1] == 1 for step in loader for micro in step)
    assert len(data.samples("val")) == 3


def test_setup_reads_what_a_stage_needs(target: str, files: dict[str, str], tmp_path: Path) -> None:
    missing = files | {"test": str(tmp_path / "absent.jsonl")}
    module(target, missing).setup("fit")
    with pytest.raises(FileNotFoundError, match="absent.jsonl"):
        module(target, missing).setup("test")
    with pytest.raises(ValueError, match=r"data\.test names no file"):
        DraftingData(target, train=files["train"]).test_dataloader()


def test_data_hash_and_several_files(target: str, files: dict[str, str]) -> None:
    both = DraftingData(target, train=[files["train"], files["val"]])
    assert len(both.samples("train")) == 13
    assert both.data_hash != module(target, files).data_hash == module(target, files).data_hash


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 2}, "max_length must be at least 3"),
        ({"num_anchors": 0}, "num_anchors must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"anchors_per_step": 0}, "anchors_per_step must be at least 1"),
        ({"long_sequences": "truncate"}, "long_sequences must be one of cut, split, drop"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"on_error": "ignore"}, "on_error must be"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DraftingData("t", **options)
