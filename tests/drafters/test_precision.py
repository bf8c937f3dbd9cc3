"""bfloat16 autocast over float32 master weights, and the compiled backbone, each against the plain float32 pass.

Features are fixed and random: a target's own rounding would hide the drafter's.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_drafter, tiny_target
from treespark.blocks import DraftBlocks, Labels
from treespark.drafters import Drafter
from treespark.losses import L1, Confidence, Coverage, CrossEntropy, LossTerm, Survival
from treespark.objective import Drafted, Objective
from treespark.policies import Budgeted

TARGET = tiny_target("qwen3", torch.float32)
ANCHORS = torch.tensor([[1, 4, 9, 12], [0, 2, 3, 17]])
POLICY = Budgeted(3, 9)


def random_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (2, 20), generator=generator)
    features = torch.randn(2, 20, 64, generator=generator).to(dtype)
    states = torch.randn(8, 4, 32, generator=generator).to(dtype)
    return ids, features, states, torch.arange(20).expand(2, -1)


def slot_states(drafter: Drafter) -> Tensor:
    ids, features, _, positions = random_inputs(TARGET.dtype)
    context = drafter.encode(features, positions)
    seen = positions.unsqueeze(1) < ANCHORS.unsqueeze(2)
    return drafter.draft(context, ids.gather(1, ANCHORS), ANCHORS, seen).flatten(0, 1)


def step(drafter: Drafter, losses: list[LossTerm]) -> tuple[Tensor, Tensor, list[Tensor], list[DraftBlocks]]:
    """One training step on fixed random features: slot states, loss, gradients of all parameters, blocks."""
    ids, _, states, _ = random_inputs(TARGET.dtype)
    hidden = slot_states(drafter)
    tokens = torch.randint(3, 64, (8, 4), generator=torch.Generator().manual_seed(1))
    roots = ids.gather(1, ANCHORS).flatten()
    labels = Labels(roots, tokens, torch.ones(8, 4, dtype=torch.bool), POLICY.expanded_per_depth(4))
    seen: list[DraftBlocks] = []

    def make_blocks(chunk: Tensor, rows: slice) -> DraftBlocks:
        proposer = drafter.propose(chunk, roots[rows])
        seen.append(DraftBlocks(labels[rows], proposer, states[rows], TARGET.logits, POLICY))
        return seen[-1]

    parameters = [p for p in drafter.parameters() if p.requires_grad]
    value = Objective(losses, 3)([Drafted(hidden, labels, make_blocks)], parameters, labels=[labels])
    return hidden, value.loss, list(torch.autograd.grad(value.loss, parameters)), seen


def cosine(left: list[Tensor], right: list[Tensor]) -> float:
    a, b = (torch.cat([item.flatten().double() for item in side]) for side in (left, right))
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_autocast_follows_float32(head: str) -> None:
    """Weights, gradients, slot states, scores, masses and the loss stay float32; values are within bfloat16's rounding
    (2^-8 a product, a few of them in a row) of the float32 pass, gradients point the same way.
    """
    losses = [CrossEntropy(), L1(), Confidence(), Survival(), Coverage()]
    drafter = tiny_drafter(TARGET, std=0.1, markov_head=head)
    _, plain, expected, _ = step(drafter, losses)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, loss, gradients, seen = step(drafter, losses)
    assert hidden.dtype == loss.dtype == torch.float32
    assert all(item.dtype == torch.float32 for item in (*gradients, *drafter.trainable_state_dict().values()))
    for blocks in seen:
        packed = blocks.replay.packed
        wide = packed.scores, packed.log_probs, blocks.path_mass, blocks.l1, blocks.label_log_probs
        assert all(item.dtype == torch.float32 for item in wide)
        assert (packed.scores[packed.exists] <= 0).all()
    torch.testing.assert_close(loss, plain, rtol=0.03, atol=0.0)
    assert cosine(gradients, expected) > 0.98


def test_path_mass_of_a_bfloat16_target_is_summed_in_float32() -> None:
    """The masses of all tokens of a depth add up to 1 within float32's rounding, though the logits are bfloat16."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(1, 1, 2000, generator=generator)).bfloat16()
    labels = Labels(torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1).bool())
    blocks = DraftBlocks(labels, None, logits, lambda hidden: hidden, POLICY)  # type: ignore[arg-type]
    tokens = torch.arange(2000).unsqueeze(0)
    mass = blocks.target_log_probs(torch.ones_like(tokens), tokens).exp()
    assert mass.dtype == torch.float32
    assert float(mass.sum()) == pytest.approx(1.0, abs=1e-5)


def test_norms_do_not_round_float32_weights() -> None:
    """A bfloat16 state under a float32 weight: one rounding at the end, not one of weight, state and product each."""
    from treespark.drafters.backbone import RMSNorm

    norm = RMSNorm(64, 1e-6)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(100, 64).bfloat16()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).double(), expected, rtol=2**-8, atol=1e-6)


def test_far_positions_keep_their_angles() -> None:
    """At position 100,001 bfloat16 would be off by hundreds of positions; the table is float32 whatever the states."""
    from treespark.drafters.backbone import Rotary

    rotary = Rotary({"rope_type": "default", "rope_theta": 1e4}, 8, 200_000)
    places = torch.tensor([[100_001]])
    narrow, wide = rotary(places, torch.bfloat16), rotary(places, torch.float64)
    for left, right in zip(narrow, wide, strict=True):
        assert left.dtype == torch.float32
        torch.testing.assert_close(left.double(), right, rtol=0, atol=2e-2)  # float32 angles of 1e5 radians


@pytest.mark.skipif(
    not (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")),
    reason="torch.compile on a CPU needs a C++ compiler, and none was found",
)
def test_compiled_layers_equal_eager() -> None:
    """States and gradients within float32's rounding; parameter names, options and checkpoints stay the same."""
    options: dict[str, Any] = {"num_layers": 1, "block_size": 2}
    found = []
    for switch in (False, True):
        drafter = tiny_drafter(TARGET, **options, compile=switch)
        hidden = slot_states(drafter)
        parameters = [p for name, p in drafter.named_parameters() if name.startswith(("fc", "layers", "norm"))]
        found.append((list(drafter.state_dict()), drafter.config()))
        found[-1] += ([hidden, *torch.autograd.grad(hidden.square().sum(), parameters)],)
    assert found[0][:2] == found[1][:2]
    for left, right in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
