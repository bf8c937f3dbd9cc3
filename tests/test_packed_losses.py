"""Documents that share a row give the losses that each gives in a row of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_target
from treespark.data import MicroBatch, Sample, collate
from treespark.drafters import DSparkDrafter
from treespark.features import Hybrid
from treespark.losses import L1, Confidence, Coverage, CrossEntropy, Survival
from treespark.module import DraftingModule
from treespark.policies import Budgeted, Chain, TreePolicy

LENGTHS = (5, 9, 2, 14, 1)


def documents(seed: int = 0) -> list[Sample]:
    """Documents of 1 to 14 random tokens, supervised from their second token on."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(torch.randint(4, 64, (n,), generator=generator).int(), ((min(1, n - 1), n),), True, f"x:{i}")
        for i, n in enumerate(LENGTHS)
    ]


def make(family: str, policy: TreePolicy, attn: str = "sdpa", **options: object) -> DraftingModule:
    """A float64 module on a tiny target."""
    losses = [CrossEntropy(), L1(), Confidence(), Survival()]
    losses += [] if isinstance(policy, Chain) else [Coverage()]
    drafter = partial(DSparkDrafter, num_layers=2, block_size=3, markov_rank=4, target_layer_ids=[0, 2])
    made = DraftingModule("tiny", drafter, policy, losses, chunk_anchors=3, **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    made.compose(tiny_target(family, attn_implementation=attn))
    made.drafter.double()
    made.open_features(None)
    for parameter in made.drafter.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def losses(module: DraftingModule, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Numerators and denominators of a micro-batch: [L] each."""
    with torch.no_grad():
        drafted = module._draft(batch, module._labels(batch), module._features(batch))
        return module.objective.evaluate(drafted)


def of_document(batch: MicroBatch, row: int, document: int) -> MicroBatch:
    """The same batch with the anchors of one document alone."""
    mask = torch.zeros_like(batch.anchor_mask)
    mask[row] = batch.anchor_mask[row] & (batch.document_ids[row, batch.anchors[row]] == document)
    return replace(batch, anchor_mask=mask)


def pack(samples: list[Sample], *rows: tuple[int, ...]) -> MicroBatch:
    return collate([[samples[i] for i in row] for row in rows], rows, num_anchors=99, seed=0, epoch=0)


@pytest.mark.parametrize(
    ("family", "policy", "attn"),
    [
        ("llama", Budgeted(2, 6), "sdpa"),
        ("qwen3", Budgeted(2, 6), "sdpa"),
        ("qwen3", Chain(), "sdpa"),
        ("llama", Chain(), "eager"),
    ],
)
def test_packed_losses_are_the_documents_own(family: str, policy: TreePolicy, attn: str) -> None:
    """Two packed rows, the second shorter: each document's numerators and denominators equal those of a row of its own.

    Float64, 1e-10; the eager attention of `transformers` takes its softmax in float32, which leaves 1e-6. Documents of
    1 and 2 tokens have no anchor and must not disturb their neighbours.
    """
    module, samples = make(family, policy, attn), documents()
    limits = {"rtol": 1e-10, "atol": 1e-10} if attn == "sdpa" else {"rtol": 1e-6, "atol": 1e-6}
    packed = pack(samples, (0, 1, 2, 4), (4, 3))
    for row, document, sample in ((0, 0, 0), (0, 1, 1), (1, 1, 3)):
        found = losses(module, of_document(packed, row, document))
        expected = losses(module, pack(samples, (sample,)))
        assert expected[1][0] > 0
        torch.testing.assert_close(found, expected, **limits)
    whole, parts = losses(module, packed), [losses(module, pack(samples, (i,))) for i in range(4)]
    torch.testing.assert_close(whole, tuple(sum(side) for side in zip(*parts, strict=True)), **limits)


def test_other_documents_of_a_row_cannot_be_seen() -> None:
    """Other tokens before and after document 1, with as many tokens or more, leave its losses where they are."""
    module, samples, others = make("llama", Budgeted(2, 6)), documents(), documents(1)
    expected = losses(module, of_document(pack(samples, (0, 1, 3)), 0, 1))
    for before, after in ((others[0], others[3]), (others[3], others[0])):
        row = [before, samples[1], after]
        batch = collate([row], [[7, 1, 8]], num_anchors=99, seed=0, epoch=0)
        torch.testing.assert_close(losses(module, of_document(batch, 0, 1)), expected, rtol=1e-10, atol=1e-10)


def test_gradients_of_packed_rows_are_those_of_rows_apart() -> None:
    """Every parameter's gradient of the whole objective, all documents in one row or in rows of their own."""
    samples, found = documents(), []
    for rows in (((0, 1, 2, 3, 4),), ((0,), (1,), (2,), (3,), (4,))):
        module, batch = make("qwen3", Budgeted(2, 6)), pack(samples, *rows)
        labels = module._labels(batch)
        parameters = [parameter for parameter in module.drafter.parameters() if parameter.requires_grad]
        value = module.objective(
            iter([module._draft(batch, labels, module._features(batch))]), parameters, labels=[labels]
        )
        found.append(torch.autograd.grad(value.loss, parameters, allow_unused=True))
    assert any(gradient is not None and bool(gradient.any()) for gradient in found[0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_remembered_features_of_packed_rows() -> None:
    """A document that is packed otherwise later is found again, and its features are those of the documents apart."""
    module, samples = make("llama", Chain(), features=Hybrid(memory=0.1, disk=0.0)), documents()
    first, second = pack(samples, (0, 1, 2), (3, 4)), pack(samples, (3, 1), (2, 0, 4))
    expected = [module.target.features(b.input_ids, [0, 2], b.attention_mask, b.position_ids) for b in (first, second)]
    module.train()
    calls = []
    inner = module.target.features
    module.target.features = lambda *args: (calls.append(1), inner(*args))[1]  # type: ignore[method-assign]
    for batch, features in zip((first, second), expected, strict=True):
        for one, other in zip(module._features(batch), features, strict=True):
            mask = batch.attention_mask
            torch.testing.assert_close(one[mask], other[mask], rtol=1e-10, atol=1e-10)
    assert len(calls) == len(samples)
