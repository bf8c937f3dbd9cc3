"""The module under a real Trainer on a tiny target: steps, resuming, checkpoints, validation, and its refusals."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.tiny_text import save_tiny_target
from treespark.data import DraftingData
from treespark.drafters import DSparkDrafter
from treespark.generation import generate
from treespark.losses import L1, Confidence, Coverage, CrossEntropy, LossTerm, Survival
from treespark.module import DraftingModule
from treespark.policies import Budgeted, Chain, TreePolicy

WORDS = ["one and one", "the cat sat", "add 3 to 4", "a red hat", "in the inn", "on a tree", "ten and ten", "her hat"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target's folder."""
    return save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def answers(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prompts with the tiny target's own answers."""
    folder = tmp_path_factory.mktemp("answers")
    prompts, output = folder / "prompts.jsonl", folder / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": words}) + "\n" for words in WORDS))
    generate(target, str(prompts), str(output), max_new_tokens=24, batch_size=4)
    return str(output)


def module(target: str, losses: list[LossTerm] | None = None, policy: TreePolicy | None = None, **options: Any):  # type: ignore[no-untyped-def]
    drafter = {"num_layers": 1, "block_size": 3, "markov_rank": 8, "num_target_layers_tapped": 2}
    drafter |= options.pop("drafter", {})
    return DraftingModule(
        target,
        partial(DSparkDrafter, **drafter),
        policy or Budgeted(2, 6),
        losses or [CrossEntropy(), L1(), Confidence(), Survival(), Coverage()],
        **{"learning_rate": 1e-2, "chunk_anchors": 5} | options,
    )


def data(target: str, answers: str, **options: Any) -> DraftingData:
    sizes = {"num_anchors": 6, "batch_size": 1, "micro_batches": 2, "val_batch_size": 4}
    return DraftingData(target, train=answers, val=answers, test=answers, **sizes | options)


def trainer(folder: Path, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
        "gradient_clip_val": 1.0,
        "limit_val_batches": 0,
    }
    return Trainer(**defaults | options)


def seeded(build):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    return build()


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(outputs["loss"].detach())


@pytest.mark.parametrize(
    "sizes", [{}, {"packing": True, "max_length": 110, "micro_batches": 1, "anchors_per_step": 9}], ids=["", "packed"]
)
def test_six_steps_equal_three_resumed_and_three(
    target: str, answers: str, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    """Bitwise on the CPU, step 3 lying inside an epoch of 4 steps: weights, losses, anchors and learning rate."""
    assert len(data(target, answers, **sizes).train_dataloader()) == 4
    straight, first, second = Losses(), Losses(), Losses()
    whole = seeded(lambda: module(target))
    trainer(tmp_path / "a", max_steps=6, callbacks=[straight]).fit(whole, data(target, answers, **sizes))

    class StopAtThree(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "three.ckpt")
                trainer.should_stop = True

    part = seeded(lambda: module(target))
    trainer(tmp_path / "b", max_steps=6, callbacks=[first, StopAtThree()]).fit(part, data(target, answers, **sizes))
    torch.manual_seed(1)
    resumed = module(target)
    trainer(tmp_path / "c", max_steps=6, callbacks=[second]).fit(
        resumed, data(target, answers, **sizes), ckpt_path=tmp_path / "three.ckpt", weights_only=True
    )
    assert len(straight.values) == 6
    assert torch.equal(torch.stack(straight.values), torch.stack(first.values + second.values))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_checkpoint_holds_the_trainable_part_alone(target: str, answers: str, tmp_path: Path) -> None:
    """No target, embedding or output head; the drafter's options, the policy and the target's identity are there."""
    model = seeded(lambda: module(target))
    run = trainer(tmp_path, max_steps=1)
    run.fit(model, data(target, answers))
    run.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
    trainable = {f"drafter.{name}" for name, p in model.drafter.named_parameters() if p.requires_grad}
    assert set(saved["state_dict"]) == trainable
    assert saved["treespark"]["policy"] == Budgeted(2, 6).config()
    assert saved["treespark"]["drafter"]["init_args"]["block_size"] == 3
    size = sum(p.numel() * p.element_size() for p in model.drafter.parameters() if p.requires_grad)
    assert (tmp_path / "one.ckpt").stat().st_size <= 3 * size + 1e6  # weights and AdamW's two averages


def test_checkpoint_of_another_target_is_refused(target: str, answers: str, tmp_path: Path) -> None:
    """The identity is the target's embedding and sizes, so another seed is another target."""
    run = trainer(tmp_path, max_steps=1)
    run.fit(module(target), data(target, answers))
    run.save_checkpoint(tmp_path / "one.ckpt")
    other = save_tiny_target(tmp_path / "other", num_hidden_layers=4, seed=9)
    with pytest.raises(ValueError, match="trained for another target"):
        trainer(tmp_path, max_steps=2).fit(
            module(other), data(other, answers), ckpt_path=tmp_path / "one.ckpt", weights_only=True
        )


def test_validation_measures_everything_and_training_improves_it(target: str, answers: str, tmp_path: Path) -> None:
    """Forty steps on eight short answers: losses fall, and every figure is logged under its name."""
    model = seeded(lambda: module(target))
    before = trainer(tmp_path, limit_val_batches=1.0).validate(model, data(target, answers), verbose=False)[0]
    run = trainer(tmp_path, max_steps=40, limit_val_batches=1.0)
    run.fit(model, data(target, answers))
    after = run.validate(model, data(target, answers), verbose=False)[0]
    assert after["val/loss/cross_entropy"] < 0.8 * before["val/loss/cross_entropy"]
    assert after["val/edge_loss"] < 0.8 * before["val/edge_loss"]
    assert after["val/coverage/total"] > before["val/coverage/total"]
    assert after["val/tau"] > before["val/tau"] >= 1.0
    assert after["val/mean_accepted"] == pytest.approx(
        sum(after[f"val/acceptance/position_{d}"] for d in (1, 2, 3)), rel=1e-6
    )
    for name in ("l1", "confidence", "survival", "coverage"):
        assert f"val/loss/{name}" in after
    for name in ("coverage/active", "coverage/capped", "survival/path_mass"):
        assert 0 <= after[f"val/{name}"] <= 1
    for name in ("coverage", "argmax_survival", "packed_nodes"):
        assert {f"val/{name}/depth_{d}" for d in (1, 2, 3)} <= set(after)
    assert sum(after[f"val/packed_nodes/depth_{d}"] for d in (1, 2, 3)) == pytest.approx(6, abs=2)
    assert "val/confidence/mean_absolute_error" in after
    tested = run.test(model, data(target, answers), verbose=False)[0]
    assert tested["test/tau"] == after["val/tau"]


def test_micro_batches_do_not_change_the_gradient(target: str, answers: str, tmp_path: Path) -> None:
    """Eight rows as one micro-batch or as eight give the same first update, up to rounding."""
    models = []
    for sizes in ({"batch_size": 8, "micro_batches": 1}, {"batch_size": 1, "micro_batches": 8}):
        model = seeded(lambda: module(target, chunk_anchors=64))
        trainer(tmp_path, max_steps=1).fit(model, data(target, answers, **sizes))
        models.append(model)
    for (name, left), right in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4, msg=name)


def test_mixed_precision_keeps_float32_masters(target: str, answers: str, tmp_path: Path) -> None:
    """bf16-mixed: weights, gradients, AdamW's averages and the loss stay float32, as do the target's own states."""
    kept, dtypes = Losses(), set()

    class Gradients(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
            dtypes.update(p.grad.dtype for p in module.drafter.parameters() if p.grad is not None)

    model = seeded(lambda: module(target))
    run = trainer(tmp_path, max_steps=2, precision="bf16-mixed", callbacks=[kept, Gradients()], limit_val_batches=1.0)
    run.fit(model, data(target, answers))
    states = [value.dtype for state in run.optimizers[0].state.values() for value in state.values()]
    assert {tensor.dtype for tensor in model.state_dict().values()} == dtypes == set(states) == {torch.float32}
    assert all(loss.dtype == torch.float32 and torch.isfinite(loss) for loss in kept.values)
    ids = torch.arange(3, 13).unsqueeze(0)
    with torch.autocast("cpu", torch.bfloat16):
        features = model.target.features(ids, model.drafter.layer_ids)
    assert torch.equal(features.final, model.target.features(ids, model.drafter.layer_ids).final)


def test_learning_rate_in_closed_form(target: str, answers: str, tmp_path: Path) -> None:
    """10 steps, 20 % warm-up: 1/2, 1, then ½(1 + cos(π·i/8)) of the peak."""

    class Rates(Callback):
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            self.values.append(trainer.optimizers[0].param_groups[0]["lr"])

    rates = Rates()
    trainer(tmp_path, max_steps=10, callbacks=[rates]).fit(
        module(target, warmup_ratio=0.2), data(target, answers, batch_size=4, micro_batches=1)
    )
    cosine = [0.5 * (1 + torch.cos(torch.tensor(torch.pi * i / 8)).item()) for i in range(8)]
    assert rates.values == pytest.approx([1e-2 * f for f in (0.5, 1.0, *cosine)], rel=1e-5)


def test_best_checkpoint_by_tau(target: str, answers: str, tmp_path: Path) -> None:
    """`val/tau` can be monitored."""
    keep = ModelCheckpoint(tmp_path, monitor="val/tau", mode="max", save_last=True)
    trainer(tmp_path, max_epochs=2, limit_val_batches=1.0, callbacks=[keep]).fit(module(target), data(target, answers))
    assert Path(keep.best_model_path).is_file()
    assert (tmp_path / "last.ckpt").is_file()


def test_text_that_the_target_did_not_write(target: str, tmp_path: Path) -> None:
    """Simulated rounds on foreign answers are refused with what to do; without simulation they validate."""
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text(json.dumps({"prompt": "the cat", "response": "sat on the tree and ate"}) + "\n")
    with pytest.raises(ValueError, match="treespark generate.*simulate to false"):
        trainer(tmp_path, limit_val_batches=1.0).validate(module(target), data(target, str(foreign)))
    found = trainer(tmp_path, limit_val_batches=1.0).validate(
        module(target, simulate=False), data(target, str(foreign)), verbose=False
    )[0]
    assert "val/tau" not in found
    assert found["val/loss/cross_entropy"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": Budgeted(65, 6)}, "exceeds the vocabulary"),
        ({"policy": Budgeted(2, 99)}, "choose 1 to 10"),
        ({"drafter": {"confidence": False}}, "Confidence needs a confidence head"),
        ({"warmup_ratio": 1.0}, "warmup_ratio must be"),
        ({"drafter": {"mask_token_id": 5}}, "ordinary token"),
    ],
)
def test_unmet_needs_are_errors_at_start(target: str, options: dict[str, Any], words: str) -> None:
    """What cannot work stops before the first step, in one sentence."""
    with pytest.raises(ValueError, match=words):
        module(target, **options).configure_model()


def test_accumulation_is_refused(target: str, answers: str, tmp_path: Path) -> None:
    """Lightning's accumulation divides by a count; micro_batches replaces it."""
    with pytest.raises(ValueError, match=r"Leave it at 1 and set data\.micro_batches"):
        trainer(tmp_path, max_steps=1, accumulate_grad_batches=2).fit(module(target), data(target, answers))


def test_chain_is_a_policy_like_any_other(target: str, answers: str, tmp_path: Path) -> None:
    """Chain DSpark: the same module, the same calls, one packed node a depth."""
    model = module(target, [CrossEntropy(), L1(), Confidence()], Chain())
    found = trainer(tmp_path, limit_val_batches=1.0).validate(model, data(target, answers), verbose=False)[0]
    assert found["val/packed_nodes/depth_1"] == 1


def test_losses_and_their_diagnostics_are_logged(target: str, answers: str, tmp_path: Path) -> None:
    """Every term's value and what it reports besides, as `train/loss/<loss>` and `train/<loss>/<name>`."""
    run = trainer(tmp_path, max_steps=1)
    run.fit(seeded(lambda: module(target)), data(target, answers))
    logged = {key: float(value) for key, value in run.callback_metrics.items() if key.startswith("train/")}
    names = {"cross_entropy", "l1", "confidence", "survival", "coverage"}
    assert {key for key in logged if key.startswith("train/loss/")} == {f"train/loss/{name}" for name in names}
    for key in ("train/coverage/active", "train/coverage/capped", "train/survival/path_mass"):
        assert 0 <= logged[key] <= 1


def test_steps_log_their_sizes(target: str, answers: str, tmp_path: Path) -> None:
    """Tokens, anchors and padding of a step with a budget of 10, counted in what the loader hands out.

    Rows of up to 120 tokens hold two answers of about 50: twice the tokens.
    """
    found = []
    for packing in (True, False):
        made = data(target, answers, batch_size=2, max_length=120, packing=packing, anchors_per_step=10)
        run = trainer(tmp_path / str(packing), max_steps=1)
        run.fit(seeded(lambda: module(target)), made)
        batch = next(iter(made.train_dataloader()))
        tokens = sum(int(part.attention_mask.sum()) for part in batch)
        places = sum(part.input_ids.numel() for part in batch)
        logged = {name: float(value) for name, value in run.callback_metrics.items()}
        assert logged["train/num_tokens"] == tokens and logged["train/num_anchors"] == 10
        assert logged["train/padding_share"] == pytest.approx(1 - tokens / places, abs=1e-6)
        found.append(tokens)
    assert found[0] > 1.8 * found[1]
