"""FSDP2 from the first step to the export: two gloo processes train what one process trains on the same samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.processes import fsdp2, run_two
from tests.tiny import tiny_drafter, tiny_target
from tests.tiny_text import save_tiny_target
from treespark.data import DraftingData
from treespark.drafters import Drafter, DSparkDrafter
from treespark.drafters.source import open_drafter
from treespark.generation import generate
from treespark.losses import L1, Confidence, Coverage, CrossEntropy, Survival
from treespark.module import DraftingModule
from treespark.policies import Budgeted
from treespark.sharding import ShardedDrafter, check_resumed_file, check_strategy, shard_target, whole_copy
from treespark.target import Target, TargetSpec
from treespark.tracking import RunRecord

WORDS = ["one and one", "the cat sat", "add 3 to 4", "a red hat", "in the inn", "on a tree", "ten and ten"]
STEPS, CLIP = 4, 0.05  # 7 samples: the epoch of 4 steps ends with a step in which the second process holds nothing


class Kept(Callback):
    """Keeps the clipped gradients of the first step and the losses of all; may stop and save at step 2."""

    def __init__(self, save: str | None = None) -> None:
        self.save, self.losses, self.rates, self.gradients = save, [], [], {}  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss/l1"]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["initial_lr"])
        if not self.gradients:
            grads = {name: p.grad for name, p in module.drafter.named_parameters() if p.grad is not None}
            self.gradients = {n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in grads.items()}
        if self.save and trainer.global_step == 2:
            trainer.save_checkpoint(self.save)
            trainer.should_stop = True


def small(spec: TargetSpec) -> Drafter:
    torch.manual_seed(0)
    return DSparkDrafter(spec, num_layers=1, block_size=3, markov_rank=8, num_target_layers_tapped=2).double()


def train(folder: Path, target: str, answers: str, kept: Kept, **options: Any) -> dict[str, Any]:
    """A training of 4 steps over two samples each, validated at its end; returns everything that it leaves."""
    module_options = {"learning_rate": 1e-2, "chunk_anchors": 5} | options.pop("module", {})
    module = DraftingModule(
        target,
        small,
        Budgeted(2, 6),
        [CrossEntropy(), L1(), Confidence(), Survival(), Coverage()],
        target_dtype="float64",
        **module_options,
    )
    sizes = {"batch_size": 1, "micro_batches": 2 if options["devices"] == 1 else 1, "val_batch_size": 4}
    data = DraftingData(target, train=answers, val=answers, num_anchors=6, **sizes)
    run = Trainer(
        default_root_dir=folder,
        max_steps=STEPS,
        val_check_interval=STEPS,
        num_sanity_val_steps=1,
        gradient_clip_val=CLIP,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[kept, RunRecord()],
        **{key: value for key, value in options.items() if key != "ckpt_path"},
    )
    run.fit(module, data, ckpt_path=options.get("ckpt_path"), weights_only=True)
    drafter = module.whole_drafter()
    return {
        "weights": drafter.trainable_state_dict(),
        "gradients": kept.gradients,
        "losses": kept.losses,
        "rates": kept.rates,
        "val": {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("val/")},
    }


def worker(rank: int, folder: str, target: str, answers: str) -> None:
    """All trainings of one of two processes."""
    place = Path(folder)
    file, parts = str(place / "two.ckpt"), str(place / "two-in-parts.ckpt")
    sharded: dict[str, Any] = {"module": {"shard_target": True}}
    runs: dict[str, tuple[bool, str | None, dict[str, Any]]] = {
        "straight": (False, None, {}),
        "stopped": (False, file, {}),
        "from a file": (False, None, {"ckpt_path": file}),
        "stopped, in parts": (True, parts, sharded),
        "from parts": (True, None, {"ckpt_path": parts} | sharded),
        "another rate": (False, None, {"ckpt_path": file, "module": {"learning_rate": 2e-2}}),
    }
    for name, (in_parts, save, options) in runs.items():
        strategy = fsdp2(save_distributed_checkpoint=in_parts)
        kept = Kept(save)
        found = train(place / name, target, answers, kept, strategy=strategy, devices=2, **options)
        torch.save(found, place / f"{name}-{rank}.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """The folder of all trainings, the target's name, and what one process trained."""
    folder = tmp_path_factory.mktemp("runs")
    target = save_tiny_target(folder / "target", num_hidden_layers=4)
    prompts, answers = folder / "prompts.jsonl", str(folder / "answers.jsonl")
    prompts.write_text("".join(json.dumps({"prompt": words}) + "\n" for words in WORDS))
    generate(target, str(prompts), answers, max_new_tokens=24, batch_size=4)
    run_two(worker, str(folder), target, answers)
    return folder, target, train(folder / "one", target, answers, Kept(), devices=1)


def both(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    for rank in (0, 1):
        yield torch.load(folder / f"{name}-{rank}.pt")


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=rtol, atol=atol, msg=name)


def test_training_equals_one_process(runs: tuple[Path, str, dict[str, Any]]) -> None:
    """Four steps, clipped by norm, the last of them with nothing on the second process: the clipped gradients, the
    logged losses, the weights and every figure of the validation are those of one process (float64).

    AdamW divides by the root of the squared gradients, which enlarges rounding where these are small: 1e-6.
    """
    folder, _, expected = runs
    norm = torch.stack([gradient.norm() for gradient in expected["gradients"].values()]).norm()
    assert float(norm) == pytest.approx(CLIP, rel=1e-3)  # it was clipped
    for found in both(folder, "straight"):
        assert_same(found["gradients"], expected["gradients"], 1e-9, 1e-12)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert_same(found["weights"], expected["weights"], 1e-6, 1e-8)
        assert found["val"] == pytest.approx(expected["val"], rel=1e-6)
        assert {"val/tau", "val/coverage/active", "val/loss/l1"} <= found["val"].keys()


@pytest.mark.parametrize("name", ["from a file", "from parts"])
def test_two_steps_and_two_resumed_equal_four(runs: tuple[Path, str, dict[str, Any]], name: str) -> None:
    """One file with gathered states, read with weights_only, or a folder with each process's part: bitwise."""
    folder = runs[0]
    for found, straight in zip(both(folder, name), both(folder, "straight"), strict=True):
        assert found["losses"] == straight["losses"][2:]
        for key, tensor in straight["weights"].items():
            assert torch.equal(tensor, found["weights"][key]), key


def test_a_changed_option_applies_after_a_resume(runs: tuple[Path, str, dict[str, Any]]) -> None:
    """The strategy loads optimiser states by itself; the configuration is still the truth."""
    folder = runs[0]
    assert all(found["rates"] == [2e-2, 2e-2] for found in both(folder, "another rate"))
    assert all(found["rates"] == [1e-2, 1e-2] for found in both(folder, "from a file"))


def test_what_a_sharded_training_leaves_is_whole(runs: tuple[Path, str, dict[str, Any]]) -> None:
    """`drafter/` loads as any other folder, and the gathered checkpoint as any other file: no target inside."""
    folder, target, _ = runs
    (straight, _), (stopped, _) = both(folder, "straight"), both(folder, "stopped")
    loaded = Drafter.from_pretrained(folder / "straight" / "drafter")
    assert_same(loaded.trainable_state_dict(), straight["weights"], 0, 0)
    assert loaded.recorded_policy == Budgeted(2, 6).config()
    from_file = open_drafter(folder / "two.ckpt").load(Target.load(target))
    expected = {name: tensor.float() for name, tensor in stopped["weights"].items()}
    assert_same(from_file.trainable_state_dict(), expected, 0, 0)
    saved = torch.load(folder / "two.ckpt", weights_only=True)
    assert {key.removeprefix("drafter.") for key in saved["state_dict"]} == stopped["weights"].keys()
    with pytest.raises(ValueError, match=r"save_distributed_checkpoint.*consolidate_checkpoint"):
        open_drafter(folder / "two-in-parts.ckpt")


def test_files_that_a_sharded_training_cannot_resume_from(
    runs: tuple[Path, str, dict[str, Any]], tmp_path: Path
) -> None:
    """Found before the processes load it together: damaged, mis-shaped, incomplete, or from another strategy."""
    folder, target, _ = runs
    drafter = small(Target.load(target).spec)
    check_resumed_file(folder / "two.ckpt", drafter)
    check_resumed_file(folder / "two-in-parts.ckpt", drafter)
    saved = torch.load(folder / "two.ckpt", weights_only=True)
    state, first = saved["state_dict"], saved["optimizer_states"][0]["param_groups"][0]
    cases = {
        "Tensors are missing": saved | {"state_dict": {k: v for k, v in state.items() if k != "drafter.fc.weight"}},
        "Tensors of another shape": saved | {"state_dict": state | {"drafter.norm.weight": torch.ones(3)}},
        "was not sharded": saved | {"optimizer_states": [{"param_groups": [first | {"params": [0, 1]}]}]},
        "not a checkpoint": {"weights": state},
    }
    for words, content in cases.items():
        torch.save(content, tmp_path / "wrong.ckpt")
        with pytest.raises(ValueError, match=words):
            check_resumed_file(tmp_path / "wrong.ckpt", drafter)
    (tmp_path / "wrong.ckpt").write_bytes((folder / "two.ckpt").read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a checkpoint"):
        check_resumed_file(tmp_path / "wrong.ckpt", drafter)


class Mesh:
    """Stands for a device mesh of one dimension or of two."""

    def __init__(self, tensor_parallel: int) -> None:
        self.tensor_parallel = tensor_parallel

    def __getitem__(self, name: str) -> Mesh:
        return self

    def size(self) -> int:
        return self.tensor_parallel


def test_strategies_that_are_refused() -> None:
    """Each with what to set instead."""
    trainer: Any = type("T", (), {"strategy": ModelParallelStrategy()})()
    other: Any = type("T", (), {"strategy": type("FSDPStrategy", (), {})()})()
    mesh: Any = Mesh(1)
    check_strategy(trainer, mesh, True, True)
    check_strategy(None, None, False, False)
    for arguments, words in (
        ((other, None, False, True), "FSDPStrategy is not supported: use `ddp`"),
        ((trainer, Mesh(2), False, True), "tensor_parallel_size to 1 and data_parallel_size to 2"),
        ((None, None, True, True), "shard_target needs ModelParallelStrategy"),
        ((trainer, mesh, True, False), "Set model.features to Online"),
    ):
        with pytest.raises(ValueError, match=words):
            check_strategy(*arguments)  # type: ignore[arg-type]


@pytest.fixture
def alone() -> Iterator[Any]:
    """A mesh of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_weights_gathered_in_inference_mode_can_be_trained(alone: Any) -> None:
    """Lightning validates in inference mode where the backend is not gloo; the sharded target and drafter survive."""
    target = tiny_target("qwen3", torch.float32)
    drafter = tiny_drafter(target)
    plain = tiny_drafter(target)
    ids = torch.arange(3, 23).unsqueeze(0)
    expected = target.features(ids, drafter.layer_ids)
    sharded = ShardedDrafter(drafter, alone)
    shard_target(target, alone)
    assert target.input_embedding().weight is drafter.embed_tokens.weight

    def states(model: Drafter) -> Tensor:
        features = target.features(ids, model.layer_ids)
        torch.testing.assert_close(features.final, expected.final)
        context = model.encode(features.context, torch.arange(20).unsqueeze(0))
        return model.draft(context, ids[:, 5:6], torch.tensor([[5]])).square().sum()

    with torch.inference_mode():
        sharded(lambda: states(drafter))
    assert all(isinstance(p, DTensor) for p in drafter.parameters() if p.requires_grad)
    sharded(lambda: states(drafter)).backward()
    states(plain).backward()
    for (name, mine), theirs in zip(drafter.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            assert isinstance(mine.grad, DTensor)
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)
    copy = whole_copy(drafter)
    assert_same(copy.trainable_state_dict(), plain.trainable_state_dict(), 0, 0)
    assert copy.is_bound


def test_parameters_outside_of_submodules_are_refused(alone: Any) -> None:
    """They would silently stay whole and never be averaged."""
    drafter = tiny_drafter(tiny_target("qwen3", torch.float32))
    drafter.scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"outside of its submodules \(scale\)"):
        ShardedDrafter(drafter, alone)
