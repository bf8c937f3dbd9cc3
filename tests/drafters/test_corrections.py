"""Recorded rows of parents against the proposer's plain conditional logits, values and gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_drafter, tiny_target
from treespark.drafters import DraftProposer
from treespark.target import linear
from treespark.workspace import Workspace

M, K, V, H, RANK = 3, 4, 24, 16, 6
TARGET = tiny_target(vocab=V, hidden=H)
HEADS: list[dict[str, Any]] = [
    {"markov_head": "vanilla"},
    {"markov_head": "gated"},
    {"markov_head": "rnn"},
    {"markov_rank": 0, "confidence_with_markov": False},
]
# Parents of three calls: tokens repeat inside a call, between calls, and between anchors; the last has mixed depths.
CALLS: list[tuple[int | Tensor, Tensor]] = [
    (1, torch.tensor([[5], [6], [5]])),
    (3, torch.tensor([[5, 7], [7, 7], [8, 5]])),
    (torch.tensor([[2, 3], [4, 1], [3, 3]]), torch.tensor([[1, 5], [5, 2], [9, 9]])),
]


def proposer(**options: Any) -> tuple[DraftProposer, list[Tensor]]:
    """A random proposer, and what its logits depend on."""
    drafter = tiny_drafter(TARGET, std=0.7, block_size=K, **{"markov_rank": RANK} | options)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, K, H, dtype=torch.float64, generator=generator).requires_grad_()
    parameters = [] if drafter.markov is None else list(drafter.markov.parameters())
    return drafter.propose(hidden, torch.tensor([5, 6, 5])), [hidden, *parameters]


def weighted(logits: list[Tensor]) -> Tensor:
    """A value with another weight for each logit."""
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(item.shape, generator=generator, dtype=item.dtype) for item in logits]
    return torch.stack([(item * weight).sum() for item, weight in zip(logits, draw, strict=True)]).sum()


def expected(p: DraftProposer) -> list[Tensor]:
    """Base logits plus W2 times each latent, in plain autograd."""
    found = []
    for depth, parents in CALLS:
        base = p._at(p.base_logits, depth)
        if p._markov is None:
            found.append(base.expand(-1, parents.shape[1], -1))
        else:
            carry = p.root_carry().expand(-1, parents.shape[1], -1)
            latents, _ = p._markov.step(parents, carry, p._at(p.hidden, depth))
            found.append(base + latents @ p._markov.markov_w2.weight.t())
    return found


@pytest.mark.parametrize("options", HEADS, ids=["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("count", [None, 1, 100])
@pytest.mark.parametrize("reuse", [False, True])
def test_recorded_rows_equal_plain_logits(options: dict[str, Any], count: int | None, reuse: bool) -> None:
    """Values at once and gradients at the end, in one tensor or (count 1) one for each call."""
    p, inputs = proposer(**options)
    wanted = expected(p)
    gradients = torch.autograd.grad(weighted(wanted), inputs, allow_unused=True)
    p, inputs = proposer(**options)
    with Workspace(inputs[1:]) if reuse else contextlib.nullcontext() as workspace:
        recorder = p.record(count)
        places = []
        for (depth, parents), plain in zip(CALLS, wanted, strict=True):
            logits, place, _ = recorder.add(depth, parents, p.root_carry().expand(-1, parents.shape[1], -1))
            assert not logits.requires_grad
            torch.testing.assert_close(logits, plain.detach(), rtol=1e-12, atol=1e-12)
            places.append(place)
        parts = recorder.finish()
        found = [parts[place.part][place.rows] for place in places]
        for logits, plain in zip(found, wanted, strict=True):
            torch.testing.assert_close(logits, plain, rtol=1e-12, atol=1e-12)
        got = list(torch.autograd.grad(weighted(found), inputs, allow_unused=True))
        if workspace is not None:
            for number, parameter in enumerate(inputs):
                summed = workspace.collected(parameter)
                if summed is not None:
                    assert got[number] is None
                    got[number] = summed
        for left, right in zip(got, gradients, strict=True):
            if right is None:
                assert left is None
            else:
                torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reuse", [False, True])
def test_path_with_repeated_parents(reuse: bool) -> None:
    """The path's logits, and their gradient: repeated tokens are added up without touching the base's gradient."""
    tokens = torch.tensor([[5, 5, 7, 5], [6, 7, 7, 1], [5, 2, 2, 2]])
    p, inputs = proposer()
    assert p._markov is not None
    plain = p.base_logits + p._markov.markov_w1.weight[tokens] @ p._markov.markov_w2.weight.t()
    wanted = torch.autograd.grad(weighted([plain]), inputs)
    p, inputs = proposer()
    with Workspace(inputs[1:]) if reuse else contextlib.nullcontext() as workspace:
        found = p.path_logits(tokens)
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
        got = torch.autograd.grad(weighted([found]), inputs, allow_unused=True)
        sums = [None, *(workspace.collected(item) for item in inputs[1:])] if workspace is not None else [None] * 3
        for left, summed, right in zip(got, sums, wanted, strict=True):
            torch.testing.assert_close(left if summed is None else summed, right, rtol=1e-10, atol=1e-12)


def test_a_correction_is_computed_once_for_each_token() -> None:
    """Path and tree hold the parents 1, 2, 5, 6, 7, 8, 9: seven rows of W2 W1, whatever they repeat."""
    p, _ = proposer()
    p.path_logits(torch.tensor([[5, 5, 7, 5], [6, 7, 7, 1], [5, 2, 2, 2]]))
    recorder = p.record(None)
    for depth, parents in CALLS:
        recorder.add(depth, parents, p.root_carry().expand(-1, parents.shape[1], -1))
    known = p._corrections._tokens
    assert known is not None and known._used == 7


def test_large_heads_go_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen head over many tokens, in blocks or at once, gives F.linear's values and gradient."""
    weight, states = torch.randn(50, 8, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64).requires_grad_()
    plain = torch.nn.functional.linear(states, weight)
    (wanted,) = torch.autograd.grad(weighted([plain]), states)
    monkeypatch.setattr(linear, "_MANY_TOKENS", 1)
    monkeypatch.setattr(linear, "_TOKENS", 16)
    for wide in (1, 1024):
        monkeypatch.setattr(linear, "_WIDE", wide)
        found = linear.apply_head(states, weight)
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
        (got,) = torch.autograd.grad(weighted([found]), states)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
