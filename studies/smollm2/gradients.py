"""How strongly each loss term pulls at a drafter, and whether it pulls where the base losses do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from treespark.commands.recipe import read_recipe


class Gradients(Callback):
    """Sums the gradients of a training's steps and lets none of them change a weight."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        """Adds the step's gradient and clears it."""
        weights = [weight for weight in pl_module.drafter.parameters() if weight.requires_grad]
        parts = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        step = torch.cat([part.flatten() for part in parts]).double()
        self.total = step if self.total is None else self.total + step
        for weight in weights:
            weight.grad = None


def term_gradients(recipe: dict[str, Any], terms: dict[str, list[dict[str, Any]]], steps: int, folder: Path) -> Any:
    """Compares the gradients of loss terms on the same batches of a recipe, at the weights that it starts from.

    Args:
        recipe: The recipe; its losses are the base.
        terms: Name -> the losses of a recipe (class_path and init_args) to take alone.
        steps: Batches whose gradients are summed.
        folder: Where the recipes are written.

    Returns:
        By name, `base` first: the norm of the mean gradient, its ratio to the base's, and the cosine between both.
    """
    found: dict[str, Tensor] = {}
    for name, losses in ({"base": recipe["model"]["losses"]} | terms).items():
        changed = recipe | {"model": recipe["model"] | {"losses": losses, "simulate": False}}
        file = folder / f"{name}.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
        module, data, _ = read_recipe(["--config", str(file)], {})
        gradients = Gradients()
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_checkpointing=False,
            limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False, callbacks=[gradients],
        )  # fmt: skip
        trainer.fit(module, data)
        assert gradients.total is not None
        found[name] = gradients.total / steps
    base = found["base"]
    return {
        name: {
            "norm": float(gradient.norm()),
            "to_base": float(gradient.norm() / base.norm()),
            "cosine": float(gradient @ base / (gradient.norm() * base.norm())),
        }
        for name, gradient in found.items()
    }
