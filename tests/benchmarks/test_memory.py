"""The memory formula behind docs/scaling.md, against public sizes and what autograd really keeps."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory import MODELS, Model, Work, activations, memory

GIB = 2**30


@pytest.mark.parametrize(("model", "total"), list(zip(MODELS, (4_022_468_096, 8_190_735_360), strict=True)))
def test_targets_have_their_published_size(model: Model, total: int) -> None:
    """4.0 and 8.2 billion parameters, as their model cards say."""
    assert model.shared + model.layers * model.layer == total


def test_sharding_saves_what_it_should() -> None:
    """FSDP2 over n processes saves 12P(1 - 1/n) of DDP's 20P, and the sharded target 1 - 1/n of its layers less two."""
    model, work = MODELS[0], Work(4096, 512, 1, 32)
    drafter = model.drafter(5, 1.5, 256)
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    ddp, fsdp2, both = (memory(model, drafter, 8, mode, work) for mode in ("ddp", "fsdp2", "fsdp2, sharded target"))
    assert ddp["drafter"] - fsdp2["drafter"] == pytest.approx(12 * trained * 7 / 8)
    assert fsdp2["target"] - both["target"] == pytest.approx(2 * model.layer * (36 * 7 / 8 - 2))
    assert fsdp2["activations"] == ddp["activations"]


def test_activations_are_what_autograd_keeps() -> None:
    """The storages that the backward pass of a small drafter needs under bfloat16 autocast, within a factor of 1.5."""
    model = Model(
        "small", hidden=64, intermediate=192, layers=8, tied=True, vocab=152000, heads=4, kv_heads=2, head_dim=16
    )
    work = Work(tokens=96, anchors=12, micro_batches=1, chunk=4)
    options = {"num_layers": 2, "head_dim_ratio": 1.5, "markov_rank": 8, "attention": "dense"}
    from treespark.drafters import DSparkDrafter

    drafter = DSparkDrafter(model.drafter(2, 1.5, 8).spec, **options)  # type: ignore[arg-type]
    drafter.embed_tokens = torch.nn.Embedding(152000, 64).requires_grad_(False)
    own = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.dtype != torch.bool:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    positions = torch.arange(96).unsqueeze(0)
    anchors = torch.arange(20, 92, 6).unsqueeze(0)
    features = torch.randn(1, 96, 64 * len(drafter.layer_ids)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        context = drafter.encode(features, positions)
        states = drafter.draft(
            context, positions[:, : anchors.shape[1]], anchors, positions.unsqueeze(1) < anchors.unsqueeze(2)
        )
    assert states.requires_grad
    weights = 2 * sum(p.numel() for p in drafter.parameters() if p.requires_grad and p.dim() == 2)  # autocast's copies
    markov = 2 * 2 * 152000 * 8 + 2 * 72  # not used by the backbone
    measured = sum(kept.values()) - (weights - markov)
    assert activations(model, drafter, work) == pytest.approx(measured, rel=0.5), measured
