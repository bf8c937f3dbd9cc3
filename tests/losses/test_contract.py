"""What every registered loss owes, ours and any that is added: these tests ask the registry, not a list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tables import TableProposer, random_blocks, random_proposer
from treespark.blocks import DraftBlocks, Labels
from treespark.losses import Coverage, LossTerm, Survival
from treespark.policies import Budgeted

POLICY = Budgeted(2, 6)
LOSSES: dict[str, Callable[[], LossTerm]] = {
    name: cls for name, cls in LossTerm.available().items() if cls.__module__.startswith("treespark.")
} | {
    "Survival-mass": partial(Survival, denominator="mass"),
    "Survival-reference": partial(Survival, paths="reference"),
    "Coverage-mass": partial(Coverage, denominator="mass"),
    "Coverage-boundary": partial(Coverage, detach_boundary=False),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))


def part(blocks: DraftBlocks, rows: slice) -> DraftBlocks:
    """Returns the blocks of some of the anchors."""
    proposer: TableProposer = blocks.proposer  # type: ignore[assignment]
    assert proposer.confidence is not None
    smaller = TableProposer(proposer.table[rows], proposer.root_tokens[rows], proposer.confidence[rows])
    return DraftBlocks(blocks.labels[rows], smaller, blocks._target_hidden[rows], lambda hidden: hidden, POLICY)


@every_loss
def test_gradient_is_the_value_s_derivative(loss: Callable[[], LossTerm]) -> None:
    """Gradcheck in float64. What is detached by definition is held fixed: the packed tree with its scores, the parents'
    admission boundaries, and for a loss that needs confidence the overlap, by differentiating the confidence logits.
    """
    term = loss()
    blocks = random_blocks(POLICY, 3)
    proposer: TableProposer = blocks.proposer  # type: ignore[assignment]
    assert proposer.confidence is not None
    fixed = [call.child_log_probs.detach() for call in blocks.replay.expanded]

    def value(table: Tensor, confidence: Tensor) -> Tensor:
        moved = TableProposer(table, proposer.root_tokens, confidence)
        other = DraftBlocks(blocks.labels, moved, blocks._target_hidden, lambda hidden: hidden, POLICY)
        calls = other.replay.expanded
        if isinstance(term, Coverage) and term.detach_boundary:  # reads nothing of the children but the boundary
            calls = [call._replace(child_log_probs=c) for call, c in zip(calls, fixed, strict=True)]
        other.__dict__["replay"] = replace(other.replay, packed=blocks.replay.packed, expanded=calls)
        return term(other).sum

    table, confidence = proposer.table, proposer.confidence
    torch.testing.assert_close(value(table, confidence), term(blocks).sum)
    if "confidence" in term.needs:
        assert torch.autograd.gradcheck(lambda c: value(table, c), (confidence.clone().requires_grad_(),))
    else:
        assert torch.autograd.gradcheck(lambda t: value(t, confidence), (table.clone().requires_grad_(),), eps=1e-7)


@every_loss
@given(seed=st.integers(0, 1_000), cut=st.integers(0, 3))
def test_additive_over_anchors(loss: Callable[[], LossTerm], seed: int, cut: int) -> None:
    """Numerator and denominator of any split of the anchors add up."""
    blocks = random_blocks(POLICY, seed)
    whole, left, right = loss()(blocks), *(loss()(part(blocks, rows)) for rows in (slice(0, cut), slice(cut, 3)))
    torch.testing.assert_close(left.sum + right.sum, whole.sum, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(left.weight + right.weight, whole.weight, rtol=1e-10, atol=1e-12)
    for name, pair in whole.diagnostics.items():
        parts = [torch.stack(item.diagnostics[name]) for item in (left, right)]
        torch.testing.assert_close(parts[0] + parts[1], torch.stack(pair), rtol=1e-10, atol=1e-12)


@every_loss
def test_diagnostics_are_scalars_without_gradient(loss: Callable[[], LossTerm]) -> None:
    """Exactly the declared names, each a share or a mass: 0 <= numerator <= denominator."""
    term, proposer = loss(), random_proposer(0)
    proposer.table.requires_grad_()
    found = term(random_blocks(POLICY, 0, proposer)).diagnostics
    assert set(found) == set(term.diagnostics)
    for numerator, denominator in found.values():
        assert numerator.shape == denominator.shape == () and not numerator.requires_grad
        assert 0 <= float(numerator) <= float(denominator) and float(denominator) > 0


@every_loss
def test_nothing_valid_is_zero_and_connected(loss: Callable[[], LossTerm]) -> None:
    """Without a valid depth numerator and denominator are 0, and so is the gradient: no NaN."""
    proposer = random_proposer(0)
    proposer.table.requires_grad_()
    assert proposer.confidence is not None
    proposer.confidence.requires_grad_()
    blocks = random_blocks(POLICY, 0, proposer)
    nothing = torch.zeros_like(blocks.labels.valid)
    labels = Labels(blocks.labels.root_tokens, blocks.labels.tokens, nothing, blocks.labels.expanded_per_depth)
    empty = DraftBlocks(labels, proposer, blocks._target_hidden, lambda hidden: hidden, POLICY)
    found = loss()(empty)
    assert found.sum.item() == 0
    assert found.weight.item() == 0
    gradients = torch.autograd.grad(found.sum, (proposer.table, proposer.confidence), allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)


@every_loss
def test_invalid_depths_do_not_matter(loss: Callable[[], LossTerm]) -> None:
    """Labels and target states of invalid depths may hold anything, infinities excepted."""
    blocks = random_blocks(POLICY, 5)
    invalid = ~blocks.labels.valid
    tokens = torch.where(invalid, 0, blocks.labels.tokens)
    # A label is also the parent of the next depth, which is then invalid as well.
    hidden = torch.where(invalid.unsqueeze(-1), 7.0, blocks._target_hidden)
    labels = Labels(blocks.labels.root_tokens, tokens, blocks.labels.valid, blocks.labels.expanded_per_depth)
    changed = DraftBlocks(labels, blocks.proposer, hidden, lambda states: states, POLICY)
    torch.testing.assert_close(loss()(changed).sum, loss()(blocks).sum)


@every_loss
def test_weight_from_labels_is_the_weight_of_the_blocks(loss: Callable[[], LossTerm]) -> None:
    """Where labels alone give the denominator, it is the one that `forward` returns."""
    blocks = random_blocks(POLICY, 7)
    term = loss()
    weight = term.weight(blocks.labels)
    if weight is not None:
        torch.testing.assert_close(weight, term(blocks).weight)
    without = Labels(blocks.labels.root_tokens, blocks.labels.tokens, blocks.labels.valid, None)
    other = DraftBlocks(without, blocks.proposer, blocks._target_hidden, lambda hidden: hidden, POLICY)
    torch.testing.assert_close(term(other).weight, term(blocks).weight)


@every_loss
def test_target_takes_no_gradient(loss: Callable[[], LossTerm]) -> None:
    """Target states that ask for a gradient get none: the target is detached, shared head or not."""
    blocks = random_blocks(POLICY, 9)
    assert isinstance(blocks.proposer, TableProposer)
    blocks.proposer.table.requires_grad_()
    hidden = blocks._target_hidden.clone().requires_grad_()
    found = loss()(DraftBlocks(blocks.labels, blocks.proposer, hidden, lambda states: states, POLICY))
    assert torch.autograd.grad(found.sum, hidden, allow_unused=True)[0] is None
