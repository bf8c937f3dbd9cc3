"""Markov heads against their formulas, and against loops over paths: the state a node sees is its own path's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_drafter, tiny_target
from treespark.blocks import DraftBlocks, Labels
from treespark.drafters import DraftProposer
from treespark.drafters.markov import MARKOV_HEADS, GatedHead, MarkovHead, RNNHead, build_markov_head
from treespark.losses import Coverage, Survival
from treespark.policies import Budgeted, Chain, TreePolicy
from treespark.replay import replay

M, K, V, H, RANK = 3, 4, 24, 16, 6
TARGET = tiny_target(vocab=V, hidden=H)
KINDS: list[dict[str, Any]] = [{"markov_head": kind} for kind in MARKOV_HEADS] + [
    {"markov_rank": 0, "confidence_with_markov": False}
]
every_head = pytest.mark.parametrize("options", KINDS, ids=["vanilla", "gated", "rnn", "none"])
POLICIES: list[TreePolicy] = [Chain(), Budgeted(3, 12), Budgeted(2, 9, 1), Budgeted(2, 8, 4)]


def proposer(seed: int = 0, **options: Any) -> DraftProposer:
    drafter = tiny_drafter(TARGET, seed, std=0.7, block_size=K, **{"markov_rank": RANK} | options)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(M, K, H, dtype=torch.float64, generator=generator).requires_grad_()
    return drafter.propose(hidden, torch.randint(V, (M,), generator=generator))


def head(kind: str) -> MarkovHead:
    found = build_markov_head(kind, V, RANK, H)
    assert found is not None
    for parameter in found.double().parameters():
        torch.nn.init.normal_(parameter)
    return found


def path_bias(markov: MarkovHead | None, tokens: list[int], hidden: Tensor) -> Tensor:
    """The correction [V] after a path of parents (the anchor first), written from the formulas; hidden [K, H]."""
    if markov is None:
        return hidden.new_zeros(())
    w1, w2 = markov.markov_w1.weight, markov.markov_w2.weight
    state = hidden.new_zeros(RANK)
    latent = state
    for depth, token in enumerate(tokens):
        embedded = w1[token]
        if isinstance(markov, RNNHead):
            joint = markov.joint_proj(torch.cat([state, embedded, hidden[depth]]))
            gate, candidate, output = joint[:RANK].sigmoid(), joint[RANK : 2 * RANK].tanh(), joint[2 * RANK :]
            state, latent = gate * state + (1 - gate) * candidate, output.tanh()
        elif isinstance(markov, GatedHead):
            latent = markov.gate_proj(torch.cat([hidden[depth], embedded])).sigmoid() * embedded
        else:
            latent = embedded
    return w2 @ latent


def node_log_probs(p: DraftProposer, row: int, path: list[int]) -> Tensor:
    """log p(. | path) [V] after the anchor and the tokens of `path`, in one plain line of autograd."""
    tokens = [int(p.root_tokens[row]), *path]
    logits = p._head(p.hidden[row, len(path)]) + path_bias(p._markov, tokens, p.hidden[row])
    return logits.log_softmax(-1)


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_steps_along_a_path_equal_the_formula(kind: str) -> None:
    """`step` with carry, `path` at once and the formulas give the same corrections in float64."""
    markov = head(kind)
    tokens, hidden = torch.randint(V, (M, K)), torch.randn(M, K, H, dtype=torch.float64)
    together = markov.bias(markov.path(tokens, hidden))
    carry = markov.root_carry(hidden)
    for d in range(K):
        latent, carry = markov.step(tokens[:, d : d + 1], carry, hidden[:, d : d + 1])
        for row in range(M):
            expected = path_bias(markov, tokens[row, : d + 1].tolist(), hidden[row])
            torch.testing.assert_close(markov.bias(latent)[row, 0], expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(together[row, d], expected, rtol=1e-12, atol=1e-12)
    assert carry.shape == (M, 1, RANK if kind == "rnn" else 0)


def test_only_rnn_carries_a_state() -> None:
    """After the same parent, the correction of rnn depends on what came before it; that of the others does not."""
    for kind in MARKOV_HEADS:
        markov, hidden = head(kind), torch.randn(2, K, H, dtype=torch.float64)
        hidden[1] = hidden[0]
        bias = markov.bias(markov.path(torch.tensor([[3, 9, 5, 5], [4, 9, 5, 5]]), hidden))
        assert torch.equal(bias[0, 1], bias[1, 1]) == (kind != "rnn")


@every_head
def test_path_logits_are_the_paths_own(options: dict[str, Any]) -> None:
    """Teacher-forced logits equal a walk node by node."""
    p = proposer(**options)
    tokens = torch.cat([p.root_tokens.unsqueeze(1), torch.randint(V, (M, K - 1))], 1)
    found = p.path_logits(tokens).log_softmax(-1)
    for row in range(M):
        for d in range(K):
            expected = node_log_probs(p, row, tokens[row, 1 : d + 1].tolist())
            torch.testing.assert_close(found[row, d], expected, rtol=1e-12, atol=1e-12)


@every_head
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_training_tree_is_the_serving_tree(options: dict[str, Any], policy: TreePolicy) -> None:
    """The tree that replay packs with gradients on is the one that decoding packs without.

    Training multiplies W2 with other rows beside them, so that scores may differ in the last digit.
    """
    p = proposer(**options)
    training = replay(policy, p).packed
    with torch.no_grad():
        serving = policy.build(proposer(**options)).pack()
    for name in ("tokens", "parents", "depths", "exists", "index", "num_nodes"):
        assert torch.equal(getattr(serving, name), getattr(training, name)), name
    for name in ("scores", "log_probs"):
        torch.testing.assert_close(getattr(serving, name), getattr(training, name), rtol=1e-13, atol=1e-13)


def paths(tokens: Tensor, parents: Tensor, node: int) -> list[int]:
    """The tokens from below the root down to `node`, in one row."""
    path: list[int] = []
    while node:
        path.insert(0, int(tokens[node]))
        node = int(parents[node])
    return path


def blocks_of(p: DraftProposer, policy: TreePolicy) -> DraftBlocks:
    generator = torch.Generator().manual_seed(7)
    valid = torch.arange(K) < torch.tensor([[K], [2], [3]])
    labels = Labels(p.root_tokens, torch.randint(V, (M, K), generator=generator), valid, policy.expanded_per_depth(K))
    states = torch.randn(M, K, H, dtype=torch.float64, generator=generator)
    return DraftBlocks(labels, p, states, p._head, policy)


def in_loops(p: DraftProposer, blocks: DraftBlocks, policy: Budgeted, coverage: Coverage) -> tuple[Tensor, Tensor]:
    """Survival's and coverage's numerators as loops over nodes, each with the distribution of its own whole path."""
    tree = policy.build(p)
    packed = tree.pack()
    q = blocks.target_logits.softmax(-1)
    survived, covered = p.hidden.new_zeros(()), p.hidden.new_zeros(())
    for row in range(M):
        mass = {0: 1.0}
        for node in range(1, int(packed.num_nodes[row]) + 1):
            parent, d = int(packed.parents[row, node]), int(packed.depths[row, node]) - 1
            token = int(packed.tokens[row, node])
            mass[node] = mass[parent] * float(q[row, d, token])
            if blocks.labels.valid[row, d]:
                path = paths(packed.tokens[row], packed.parents[row], parent)
                survived = survived - mass[node] * node_log_probs(p, row, path)[token]
        for node in range(tree.tokens.shape[1]):
            d = int(tree.depths[row, node])
            if d < K and tree.expanded[row, node] and blocks.labels.valid[row, d]:
                log_p = node_log_probs(p, row, paths(tree.tokens[row], tree.parents[row], node))
                boundary = log_p.sort(descending=True).values[policy.k - 1].detach()
                for token in q[row, d].topk(coverage.num_tokens).indices:
                    gap = (coverage.margin + boundary - log_p[token]).clamp(0.0, coverage.cap)
                    covered = covered + q[row, d, token] * math.exp(-d / coverage.gamma) * gap
    return survived, covered


@every_head
@pytest.mark.parametrize("policy", [Budgeted(3, 12), Budgeted(2, 8, 4)], ids=str)
def test_tree_losses_equal_loops_over_paths(options: dict[str, Any], policy: Budgeted) -> None:
    """Values and gradients (slot states and every head parameter), float64: the state stays differentiable."""
    p, coverage = proposer(3, **options), Coverage(cap=4.0)
    blocks = blocks_of(p, policy)
    found = (Survival()(blocks).sum, coverage(blocks).sum)
    expected = in_loops(p, blocks, policy, coverage)
    parameters = [p.hidden, *(p._markov.parameters() if p._markov is not None else ())]
    for value, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(value, plain, rtol=1e-10, atol=1e-12)
        left, right = (torch.autograd.grad(item, parameters, retain_graph=True) for item in (value, plain))
        for got, wanted in zip(left, right, strict=True):
            assert wanted.abs().sum() > 0
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_gradient_goes_through_the_carried_state() -> None:
    """Edges of depth 3 reach the slot of depth 1 through the state alone: rnn has that gradient, gated has none."""
    for kind, reached in (("rnn", True), ("gated", False)):
        p = proposer(markov_head=kind)
        found = replay(Budgeted(2, 8, 2), p)
        deep = torch.where(found.packed.depths == 3, found.edge_log_probs(), 0.0).sum()
        (gradient,) = torch.autograd.grad(deep, p.hidden)
        assert bool(gradient[:, 0].any()) == reached and bool(gradient[:, 2].any())


@pytest.mark.parametrize("kind", MARKOV_HEADS)
def test_heads_stay_wide_in_bfloat16(kind: str) -> None:
    """Under autocast latents of gated and rnn and the carried state are float32; corrections follow float32's."""
    markov = head(kind).float()
    tokens, hidden = torch.randint(V, (M, K)), torch.randn(M, K, H)
    expected = markov.bias(markov.path(tokens, hidden))
    with torch.autocast("cpu", torch.bfloat16):
        latents = markov.path(tokens, hidden)
        _, carry = markov.step(tokens[:, :1], markov.root_carry(hidden), hidden[:, :1])
        found = markov.bias(latents)
    assert latents.dtype == carry.dtype == torch.float32
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.2)
    narrow = markov.bfloat16()
    assert narrow.bias(narrow.path(tokens, hidden.bfloat16())).dtype == torch.bfloat16
