"""Tiny random models that the tests share: a Llama or Qwen3 target and a drafter for it."""

from __future__ import annotations

from typing import Any

import torch

from treespark.drafters import Drafter, DSparkDrafter
from treespark.target import Target


def tiny_model(
    family: str = "llama",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    tie: bool = False,
    vocab: int = 64,
    layers: int = 4,
    hidden: int = 32,
    **config: Any,
) -> Any:
    """Returns a random causal language model, 4 heads of 8 over 2 key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # larger than usual, so that random logits are not nearly flat
    } | config
    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = classes[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config_class(**sizes)).to(dtype)


def tiny_target(
    family: str = "llama",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    tie: bool = False,
    vocab: int = 64,
    layers: int = 4,
    hidden: int = 32,
    tokenizer: Any = None,
    **config: Any,
) -> Target:
    """Returns a frozen random target; end token 2, first token 1, padding 0."""
    return Target(tiny_model(family, dtype, seed, tie, vocab, layers, hidden, **config), tokenizer, name="tiny")


def tiny_drafter(target: Target, seed: int = 0, bind: bool = True, std: float = 0.2, **options: Any) -> Drafter:
    """Returns a random drafter of the target's dtype, bound to it: 2 layers, 4 depths, rank 8.

    It taps the first layer and the last that is allowed (of a target of 2 layers: one). Every matrix is drawn anew
    with deviation `std`, so that no part of it starts at zero.
    """
    options = {"num_layers": 2, "block_size": 4, "markov_rank": 8} | options
    if not {"target_layer_ids", "num_target_layers_tapped"} & options.keys():
        options["target_layer_ids"] = sorted({0, target.spec.num_layers - 2})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = DSparkDrafter(target.spec, **options).to(target.dtype)
        for parameter in drafter.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=std)
    if bind:
        drafter.bind(target)
    return drafter
