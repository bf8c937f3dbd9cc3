"""Replay: the tree of training is the tree of serving, its log-probabilities carry gradients, its identities do not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import TableProposer, random_blocks, random_proposer
from treespark.policies import Budgeted, Chain, TreePolicy
from treespark.replay import path_mass, replay
from treespark.tree import CandidateTree


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 12))
def test_training_tree_is_the_serving_tree(seed: int, k: int, num_nodes: int) -> None:
    """On the same tensors replay packs exactly what the policy packs in decoding."""
    policy, proposer = Budgeted(k, min(num_nodes, 4 * k)), random_proposer(seed)
    serving, training = policy.build(proposer).pack(), replay(policy, proposer).packed
    for name in ("tokens", "parents", "depths", "scores", "log_probs", "exists", "index", "num_nodes"):
        assert torch.equal(getattr(serving, name), getattr(training, name)), name


@given(st.integers(0, 10_000), st.sampled_from([Chain(), Budgeted(3, 12), Budgeted(2, 9, 1), Budgeted(2, 8, 4)]))
def test_edge_log_probs_equal_a_walk(seed: int, policy: TreePolicy) -> None:
    """The differentiable log-probability of each packed edge is the table's, read node by node."""
    proposer = random_proposer(seed)
    found = replay(policy, proposer)
    edges, packed = found.edge_log_probs(), found.packed
    for row in range(len(edges)):
        assert edges[row, 0] == 0
        for node in range(1, int(packed.num_nodes[row]) + 1):
            parent = packed.tokens[row, packed.parents[row, node]]
            expected = proposer.table[row, packed.depths[row, node] - 1, parent].log_softmax(-1)
            torch.testing.assert_close(edges[row, node], expected[packed.tokens[row, node]])


def test_gradient_reaches_the_logits_but_not_through_scores() -> None:
    """Edge log-probabilities are differentiable; scores, log_probs and boundaries of the tree are not."""
    proposer = random_proposer(0)
    proposer.table.requires_grad_()
    found = replay(Budgeted(2, 6), proposer)
    assert not found.packed.scores.requires_grad
    assert not found.tree.log_probs.requires_grad
    assert not any(call.boundary.requires_grad for call in found.expanded)
    (gradient,) = torch.autograd.grad(found.edge_log_probs().sum(), proposer.table)
    assert gradient.abs().sum() > 0


def test_boundary_is_the_kth_largest_log_probability() -> None:
    """With k = 2 the admission boundary is the second value of the sorted log-softmax."""
    proposer = random_proposer(1)
    call = replay(Budgeted(2, 6), proposer).expanded[0]
    expected = proposer.table[torch.arange(3), 0, proposer.root_tokens].log_softmax(-1).sort(-1, descending=True)
    torch.testing.assert_close(call.boundary[:, 0], expected.values[:, 1])


def test_path_mass_is_a_product_along_the_path() -> None:
    """Target with q(0) = 0.75, q(1) = 0.25 at both depths, drafter that packs all of 0, 1, 00, 01, 10, 11 in two
    depths: masses 0.75, 0.25, 0.5625, 0.1875, 0.1875, 0.0625; each depth sums to 1.
    """
    proposer = TableProposer(torch.zeros(1, 2, 2, 2, dtype=torch.float64), torch.zeros(1, dtype=torch.long))
    packed = replay(Budgeted(2, 6), proposer).packed
    log_q = torch.tensor([math.log(0.75), math.log(0.25)], dtype=torch.float64)
    mass = path_mass(packed, log_q[packed.tokens], depths=2)
    torch.testing.assert_close(mass[0].tolist(), [1.0, 0.75, 0.25, 0.5625, 0.1875, 0.1875, 0.0625])


@given(st.integers(0, 10_000))
def test_mass_of_a_depth_does_not_grow(seed: int) -> None:
    """Reference-mass coverage of one anchor is non-increasing in depth and at most 1."""
    blocks = random_blocks(Budgeted(3, 12), seed)
    mass, packed = blocks.path_mass, blocks.replay.packed
    by_depth = torch.stack([(mass * (packed.depths == d) * packed.exists).sum(1) for d in range(5)], 1)
    assert torch.all(by_depth[:, 1:] <= by_depth[:, :-1] + 1e-12)
    torch.testing.assert_close(by_depth[:, 0], torch.ones(3, dtype=torch.float64))


def test_policy_that_misnames_its_expansions_is_told() -> None:
    """A user's policy that lists fewer expansions than it made gets a sentence, not an index error."""

    class Forgetful(Budgeted):
        def build(self, proposer, *, generator=None):  # type: ignore[no-untyped-def]
            tree = super().build(proposer, generator=generator)
            return CandidateTree(**{**vars(tree), "expansions": tree.expansions[:, :1]})

    del TreePolicy._classes["Forgetful"]
    with pytest.raises(ValueError, match="must name every parent given to Proposer.expand"):
        replay(Forgetful(2, 6), random_proposer(0))
