"""A training with random weights and random text, at any size, for checks of a device; nothing is downloaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from treespark.data import MicroBatch
from treespark.drafters import DSparkDrafter
from treespark.losses import L1, Confidence, Coverage, CrossEntropy, Survival
from treespark.module import DraftingModule
from treespark.objective import ObjectiveValue
from treespark.policies import Budgeted
from treespark.target import Target


@dataclass(frozen=True)
class Shape:
    """A Qwen3 target with random weights, and its drafter."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_layers: int
    rank: int


@dataclass(frozen=True)
class Sizes(Shape):
    """These, and one micro-batch."""

    block_size: int
    tokens: int
    anchors: int
    chunk: int
    nodes: int


def make_target(sizes: Shape, dtype: torch.dtype, device: torch.device) -> Target:
    """Returns a random target on a device; on the CPU the same weights for the same sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    config.dtype = dtype
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # 4 billion parameters are never held in float32
    try:
        with device:
            model: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target(model, name="random")


def make_module(sizes: Sizes, target: Target, **drafter: Any) -> DraftingModule:
    """Returns TreeSpark's training module for a random target, every matrix of the drafter drawn from a seed."""
    options: dict[str, Any] = {
        "num_layers": sizes.draft_layers,
        "block_size": sizes.block_size,
        "markov_rank": sizes.rank,
        "head_dim_ratio": 1.5,
    }
    module = DraftingModule(
        "random",
        partial(DSparkDrafter, **options | drafter),
        Budgeted(4, sizes.nodes),
        [CrossEntropy(), L1(), Confidence(), Survival(), Coverage()],
        chunk_anchors=sizes.chunk,
    )
    module.compose(target)
    module.open_features(None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.drafter.trainable_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[1]))
    return module.to(target.device)


def make_batch(sizes: Sizes, device: torch.device) -> MicroBatch:
    """Returns one row of random text, supervised after its first eighth, with as many anchors as fit."""
    generator = torch.Generator().manual_seed(2)
    every = torch.arange(sizes.tokens).unsqueeze(0)
    start = sizes.tokens // 8
    places = start + torch.randperm(sizes.tokens - start - 2, generator=generator)[: sizes.anchors].sort().values
    return MicroBatch(
        input_ids=torch.randint(3, sizes.vocab, (1, sizes.tokens), generator=generator),
        attention_mask=torch.ones_like(every, dtype=torch.bool),
        loss_mask=every >= start,
        document_ids=torch.zeros_like(every),
        position_ids=every,
        anchors=places.unsqueeze(0),
        anchor_mask=torch.ones(1, len(places), dtype=torch.bool),
        sample_ids=torch.zeros(1, dtype=torch.long),
        prompt_lengths=torch.tensor([start]),
        own_text=torch.zeros(1, dtype=torch.bool),
        document_samples=torch.zeros(1, 1, dtype=torch.long),
    ).to(device)


def backward(module: DraftingModule, batch: MicroBatch, features: Any = None) -> ObjectiveValue:
    """Runs one training step up to the gradients; features are the target's if none are given."""
    labels = module._labels(batch)
    found = module._features(batch) if features is None else features
    parameters = module.drafter.trainable_parameters()
    value = module.objective([module._draft(batch, labels, found)], parameters, labels=[labels])
    value.loss.backward()
    return value
