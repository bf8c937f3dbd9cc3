"""What the tests of generated answers share: prompts, a tiny target and drafter in folders, and an oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny_text import save_tiny_target
from treespark.drafters import DSparkDrafter
from treespark.generation import GenerationSummary, generate
from treespark.policies import Budgeted
from treespark.target import Target

PROMPTS = [{"prompt": f"tell {'me ' * (i % 5)}about {i}", "id": i, "category": "x"} for i in range(23)]


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def run(target: str | None, prompts: str, output: Path, **options: Any) -> GenerationSummary:
    """Answers of at most 12 tokens in float64, one after the other: three units of 8, 8 and 7."""
    defaults: dict[str, Any] = {"max_new_tokens": 12, "batch_size": 1, "dtype": "float64"}
    return generate(target, prompts, str(output), **(defaults | options))


def save_drafter(target: str, folder: Path) -> str:
    """Saves a random drafter for a saved target, with a recorded policy of 6 nodes, and returns the folder's name."""
    loaded = Target.load(target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drafter = DSparkDrafter(loaded.spec, num_layers=1, block_size=4, markov_rank=8, num_target_layers_tapped=1)
    drafter.bind(loaded)
    drafter.save_pretrained(folder, tree_policy=Budgeted(k=2, num_draft_nodes=6).config())
    return str(folder)


def greedy(model: Target, ids: list[int], limit: int) -> list[int]:
    """Plain greedy decoding by whole forward passes, one token at a time."""
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < limit and not (answer and answer[-1] in model.spec.eos_token_ids):
            logits = model.model(input_ids=torch.tensor([ids + answer])).logits[0, -1]
            answer.append(int(logits.argmax()))
    return answer


__all__ = ["PROMPTS", "greedy", "read", "run", "save_drafter", "save_tiny_target", "write"]
