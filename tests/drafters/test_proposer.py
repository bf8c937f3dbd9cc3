"""Conditional distributions: log-probabilities, ties, gradients, and the different calls against each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tiny_drafter, tiny_target
from treespark.drafters import DraftProposer
from treespark.drafters.confidence import ConfidenceHead
from treespark.drafters.markov import VanillaHead
from treespark.selection import selected_log_probs, top_tokens

M, K, V, H, RANK = 3, 4, 64, 32, 8


def proposer(rank: int = RANK, confidence: bool = True) -> DraftProposer:
    drafter = tiny_drafter(
        tiny_target(), markov_rank=rank, confidence=confidence, confidence_with_markov=confidence and rank > 0
    )
    hidden = torch.randn(M, K, H, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return drafter.propose(hidden.requires_grad_(), torch.tensor([5, 6, 7]))


@pytest.mark.parametrize("rank", [0, RANK])
def test_calls_agree_with_a_full_log_softmax(rank: int) -> None:
    """expand, score, path_logits and marginals against log softmax(lm_head(h) + W2 W1[y]), written out."""
    p = proposer(rank)
    parents = torch.tensor([[4, 9], [5, 10], [6, 11]])
    carry = p.root_carry().expand(-1, 2, -1)
    for depth in range(1, K + 1):
        logits = p.base_logits[:, depth - 1].unsqueeze(1).expand(-1, 2, -1)
        if rank:
            markov = p._markov
            assert markov is not None
            logits = logits + markov.markov_w1.weight[parents] @ markov.markov_w2.weight.t()
        expected = logits.log_softmax(-1)
        e = p.expand(depth, parents, carry, 5)
        best = expected.topk(5, dim=-1)
        assert torch.equal(e.tokens, best.indices)
        assert torch.allclose(e.log_probs, best.values, atol=1e-12)
        scored, _ = p.score(depth, parents, carry, e.tokens)
        assert torch.allclose(scored, e.log_probs, atol=1e-12)
        path = parents[:, :1].expand(-1, K)
        assert torch.allclose(p.path_logits(path)[:, depth - 1].log_softmax(-1), expected[:, 0], atol=1e-12)
    tokens, log_probs = p.marginals(3)
    best = p.base_logits.log_softmax(-1).topk(3, dim=-1)
    assert torch.equal(tokens, best.indices) and torch.allclose(log_probs, best.values, atol=1e-12)


def test_depth_may_differ_by_parent() -> None:
    """A depth tensor [M, P] picks each parent's own slot: columns equal the calls with one depth."""
    p = proposer()
    parents = torch.tensor([[4, 9], [5, 10], [6, 11]])
    carry = p.root_carry().expand(-1, 2, -1)
    mixed = p.expand(torch.tensor([[1, 3], [4, 2], [2, 2]]), parents, carry, 4)
    for row, depths in enumerate([[1, 3], [4, 2], [2, 2]]):
        for column, depth in enumerate(depths):
            single = p.expand(depth, parents, carry, 4)
            assert torch.equal(mixed.tokens[row, column], single.tokens[row, column])
            assert torch.allclose(mixed.log_probs[row, column], single.log_probs[row, column], atol=1e-12)
            assert mixed.log_confidence is not None and single.log_confidence is not None
            assert torch.allclose(mixed.log_confidence[row, column], single.log_confidence[row, column], atol=1e-12)


@pytest.mark.parametrize("rank", [0, RANK])
def test_confidence_is_a_linear_map(rank: int) -> None:
    """[h ; W1[y]] · w + b along a path, and the log of its sigmoid for a parent in `expand`."""
    p = proposer(rank)
    head, markov = p._confidence, p._markov
    assert head is not None
    parents = torch.tensor([[5, 1, 2, 3], [6, 4, 5, 6], [7, 7, 8, 9]])
    inputs = p.hidden if markov is None else torch.cat([p.hidden, markov.markov_w1.weight[parents]], -1)
    expected = head.proj(inputs).squeeze(-1)
    assert torch.allclose(p.confidence_logits(parents), expected, atol=1e-12)
    for d in range(K):
        e = p.expand(d + 1, parents[:, d : d + 1], p.root_carry(), 2)
        assert e.log_confidence is not None
        assert torch.allclose(e.log_confidence[:, 0], torch.nn.functional.logsigmoid(expected[:, d]), atol=1e-12)


def test_detached_confidence_reaches_its_own_head_only() -> None:
    for detach in (False, True):
        p = proposer()
        assert p._confidence is not None and p._markov is not None
        p.confidence_logits(torch.ones(M, K, dtype=torch.long), detach=detach).sum().backward()
        assert p._confidence.proj.weight.grad is not None
        assert (p.hidden.grad is None) == detach and (p._markov.markov_w1.weight.grad is None) == detach


def test_without_confidence_head() -> None:
    p = proposer(confidence=False)
    assert p.expand(1, p.root_tokens.unsqueeze(1), p.root_carry(), 2).log_confidence is None
    with pytest.raises(ValueError, match="no confidence head"):
        p.confidence_logits(torch.ones(M, K, dtype=torch.long))


def test_score_is_differentiable() -> None:
    """d log p_d(x) / d logits = onehot(x) - p; through h by the head: checked against autograd of log_softmax."""
    p = proposer()
    parents, tokens = p.root_tokens.unsqueeze(1), torch.tensor([[[9]], [[8]], [[7]]])
    scored, _ = p.score(2, parents, p.root_carry(), tokens)
    (got,) = torch.autograd.grad(scored.sum(), p.hidden)
    p = proposer()
    full, _ = p.logits(2, parents, p.root_carry())
    (expected,) = torch.autograd.grad(full.log_softmax(-1).gather(-1, tokens).sum(), p.hidden)
    assert torch.allclose(got, expected, atol=1e-12)


@given(st.integers(1, 1200), st.integers(1, 9), st.integers(0, 10_000), st.integers(1, 30))
def test_top_tokens_equal_a_full_stable_sort(vocab: int, k: int, seed: int, levels: int) -> None:
    """Integer logits of few levels are full of ties, inside the k and at its edge; smaller ids come first."""
    k = min(k, vocab)
    logits = torch.randint(0, levels, (2, 3, vocab), generator=torch.Generator().manual_seed(seed)).double()
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(top_tokens(logits, k), expected)


def test_uniform_and_infinite_logits() -> None:
    """Uniform: ids 0, 1, 2 with log(1/V). A single finite logit: log-probability exactly 0, the rest -inf."""
    logits = torch.zeros(1, 1000)
    assert top_tokens(logits, 3).tolist() == [[0, 1, 2]]
    assert torch.allclose(selected_log_probs(logits, torch.tensor([[2]])), torch.tensor([[-math.log(1000)]]))
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 700] = 3.0
    tokens = top_tokens(logits, 3)
    assert tokens.tolist() == [[700, 0, 1]]
    assert selected_log_probs(logits, tokens).tolist() == [[0.0, -math.inf, -math.inf]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_log_probs_are_normalised_in_float32_at_least(dtype: torch.dtype) -> None:
    """Selection in the logits' own precision, normalisation in float32: the error is float32's, and log p <= 0."""
    logits = (torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    tokens = top_tokens(logits, 4)
    got = selected_log_probs(logits, tokens)
    expected = logits.double().log_softmax(-1).gather(-1, tokens)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(got.double(), expected, atol=1e-12 if dtype == torch.float64 else 1e-5) and (got <= 0).all()


def test_nothing_larger_than_the_base_logits_is_kept() -> None:
    """After a whole build the proposer holds one [M, K, V] tensor; corrections are transient."""
    p = DraftProposer(
        torch.randn(2, 3, 8),
        torch.tensor([1, 2]),
        torch.nn.Linear(8, 500),
        VanillaHead(500, 4, 8),
        ConfidenceHead(8, 4),
    )
    for depth in (1, 2, 3):
        p.expand(depth, torch.tensor([[1, 2], [3, 4]]), p.root_carry().expand(-1, 2, -1), 3)
    sizes = [value.numel() for value in vars(p).values() if isinstance(value, torch.Tensor)]
    assert max(sizes) == 2 * 3 * 500 and sum(size >= 500 for size in sizes) == 1
