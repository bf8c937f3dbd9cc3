"""Writes the golden checkpoint and its outputs: `python -m tests.drafters.make_golden FOLDER [HEAD]`.

Run it only when the format changes on purpose; the committed files were written by the version that reproduces the
outputs of DeepSpec's own model code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny import tiny_drafter, tiny_target
from treespark.drafters import Drafter


def outputs(drafter: Drafter, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Runs backbone, heads and a greedy chain on the golden inputs."""
    ids, anchors = inputs["input_ids"], inputs["anchor_positions"]
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    context = drafter.encode(inputs["target_hidden_states"], positions)
    tokens = ids.gather(1, anchors)
    hidden = drafter.draft(context, tokens, anchors, positions.unsqueeze(1) < anchors.unsqueeze(2))
    proposer = drafter.propose(hidden.flatten(0, 1), tokens.flatten())
    path = inputs["prev_token_ids"].flatten(0, 1)
    parents, carry, chain = proposer.root_tokens.unsqueeze(1), proposer.root_carry(), []
    for depth in range(1, proposer.depths + 1):
        expansion = proposer.expand(depth, parents, carry, 1)
        parents, carry = expansion.tokens[:, :, 0], expansion.carry
        chain.append(parents)
    shape = anchors.shape
    return {
        "backbone_hidden": hidden,
        "base_logits": proposer.base_logits.unflatten(0, shape),
        "teacher_forced_logits": proposer.path_logits(path).unflatten(0, shape),
        "confidence_logits": proposer.confidence_logits(path).unflatten(0, shape),
        "greedy_chain_tokens": torch.cat(chain, 1).unflatten(0, shape),
    }


def main(folder: str, markov_head: str = "vanilla") -> None:
    """Draws a random drafter of a random target, saves it, and its outputs on random inputs."""
    target = tiny_target("llama", torch.float32, vocab=48, hidden=16, layers=5)
    sizes: dict[str, Any] = {"block_size": 4, "head_dim": 12, "markov_rank": 6, "target_layer_ids": [0, 1, 3]}
    drafter = tiny_drafter(target, markov_head=markov_head, **sizes)
    drafter.save_pretrained(folder, tree_policy={"class_path": "Chain", "init_args": {}}, extra={"note": "golden"})
    torch.manual_seed(0)
    inputs = {
        "input_ids": torch.randint(3, 47, (2, 12)),
        "anchor_positions": torch.tensor([[0, 4, 6], [2, 9, 11]]),
        "target_hidden_states": torch.randn(2, 12, 3 * 16),
        "prev_token_ids": torch.randint(3, 47, (2, 3, 4)),
    }
    inputs["prev_token_ids"][:, :, 0] = inputs["input_ids"].gather(1, inputs["anchor_positions"])
    with torch.no_grad():
        results = outputs(drafter, inputs)
    save_file(inputs | {k: v.contiguous() for k, v in results.items()}, Path(folder) / "golden.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
