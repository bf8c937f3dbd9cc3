"""The objective: chunks, micro-batches and processes change nothing; each is compared with one plain autograd pass."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tiny import tiny_drafter, tiny_target
from treespark.blocks import DraftBlocks, Labels
from treespark.drafters import Drafter
from treespark.losses import L1, Confidence, Coverage, CrossEntropy, LossTerm, Survival, WeightedSum
from treespark.objective import Drafted, Objective, _GradientInForward
from treespark.policies import Budgeted, TreePolicy

DEPTHS = 4


class Adaptive(Budgeted):
    """A tree whose number of expanded parents is not announced, as with policies that adapt to each row."""

    def expanded_per_depth(self, depths: int) -> list[int]:
        """Hidden from the losses by `labels_of`; the build still uses it."""
        return super().expanded_per_depth(depths)


del TreePolicy._classes["Adaptive"]


def terms() -> list[LossTerm]:
    return [CrossEntropy(), L1(), Confidence(), Survival(), Coverage()]


def by_mass() -> list[LossTerm]:
    """Denominators that depend on the forward pass, so chunks are recomputed."""
    return [L1(), Survival(denominator="mass"), Coverage(denominator="mass", detach_boundary=False)]


def setup(
    num_anchors: int, seed: int, policy: TreePolicy, markov_head: str = "vanilla"
) -> tuple[Drafter, Tensor, Labels, Tensor]:
    """Returns a tiny drafter, slot states, labels with spans of every length, and target states; all float64."""
    target = tiny_target()
    drafter = tiny_drafter(target, markov_head=markov_head)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_anchors, DEPTHS, 32, generator=generator, dtype=torch.float64)
    states = torch.randn(num_anchors, DEPTHS, 32, generator=generator, dtype=torch.float64)
    tokens = torch.randint(64, (num_anchors, DEPTHS), generator=generator)
    spans = torch.randint(0, DEPTHS + 1, (num_anchors, 1), generator=generator)
    fixed = None if isinstance(policy, Adaptive) else policy.expanded_per_depth(DEPTHS)
    labels = Labels(tokens[:, 0], tokens, torch.arange(DEPTHS) < spans, fixed)
    return drafter, hidden, labels, states


def drafted(drafter: Drafter, hidden: Tensor, labels: Labels, states: Tensor, policy: TreePolicy) -> Drafted:
    def make_blocks(chunk: Tensor, rows: slice) -> DraftBlocks:
        proposer = drafter.propose(chunk, labels.root_tokens[rows])
        return DraftBlocks(labels[rows], proposer, states[rows], drafter.base_logits, policy)

    return Drafted(hidden, labels, make_blocks)


def head_parameters(drafter: Drafter) -> list[Tensor]:
    return [parameter for parameter in drafter.parameters() if parameter.requires_grad]


def gradients(loss: Tensor, drafter: Drafter, hidden: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, [hidden, *head_parameters(drafter)], allow_unused=True))


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Gradients that are missing count as zeros."""
    for left, right in zip(found, expected, strict=True):
        if left is None or right is None:
            assert left is None or not left.any()
            assert right is None or not right.any()
        else:
            torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def reference(
    drafter: Drafter,
    hidden: Tensor,
    labels: Labels,
    states: Tensor,
    policy: TreePolicy,
    losses: list[LossTerm] | None = None,
) -> Tensor:
    """All anchors at once, plain autograd, one division per term."""
    blocks = drafted(drafter, hidden, labels, states, policy).make_blocks(hidden, slice(0, len(hidden)))
    parts = [(term.coefficient, term(blocks)) for term in losses or terms()]
    return torch.stack([c * part.sum / part.weight for c, part in parts if part.weight > 0]).sum()


@settings(max_examples=30)
@given(
    st.integers(0, 1_000),
    st.integers(1, 9),
    st.sampled_from([Budgeted(2, 6), Budgeted(3, 12), Adaptive(2, 6)]),
    st.sampled_from(["vanilla", "gated", "rnn"]),
    st.sampled_from([terms, by_mass]),
)
def test_chunks_equal_the_plain_reference(
    seed: int, chunk: int, policy: TreePolicy, markov_head: str, losses: Callable[[], list[LossTerm]]
) -> None:
    """Value and every gradient, for any chunk size; Adaptive takes the path without denominators from labels."""
    drafter, hidden, labels, states = setup(7, seed, policy, markov_head)
    hidden.requires_grad_()
    if not labels.valid.any():
        return
    plain = reference(drafter, hidden, labels, states, policy, losses())
    value = Objective(losses(), chunk)(
        [drafted(drafter, hidden, labels, states, policy)], head_parameters(drafter), labels=[labels]
    )
    torch.testing.assert_close(value.loss, plain, rtol=1e-10, atol=1e-12)
    assert_same(gradients(value.loss, drafter, hidden), gradients(plain, drafter, hidden))


def test_one_backward_pass_for_a_step() -> None:
    """Gradients are handed over, not copied: a second pass is an error and not a wrong number."""
    policy = Budgeted(2, 6)
    drafter, hidden, labels, states = setup(3, 1, policy)
    batch = drafted(drafter, hidden.requires_grad_(), labels, states, policy)
    value = Objective(terms(), 2)([batch], head_parameters(drafter), labels=[labels])
    value.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a step has one backward pass"):
        value.loss.backward()


def test_float32_equals_the_plain_reference() -> None:
    """Values and gradients in float32 are within 1e-5 of the plain pass in float64, relative to the largest entry."""
    policy = Budgeted(2, 6)
    drafter, hidden, labels, states = setup(7, 3, policy)
    hidden.requires_grad_()
    plain = reference(drafter, hidden, labels, states, policy)
    expected = gradients(plain, drafter, hidden)
    narrow, leaf, states = drafter.float(), hidden.detach().float().requires_grad_(), states.float()
    batch = drafted(narrow, leaf, labels, states, policy)
    value = Objective(terms(), 2)([batch], head_parameters(narrow), labels=[labels])
    torch.testing.assert_close(value.loss.double(), plain, rtol=1e-5, atol=0)
    for found, wanted in zip(gradients(value.loss, narrow, leaf), expected, strict=True):
        if wanted is not None and wanted.any():
            assert found is not None
            assert (found.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@settings(max_examples=10)
@given(st.integers(0, 1_000), st.integers(0, 7))
def test_micro_batches_equal_one_batch(seed: int, cut: int) -> None:
    """Any split of the anchors into micro-batches, one of them possibly empty, gives the gradient of the whole."""
    policy = Budgeted(2, 6)
    drafter, hidden, labels, states = setup(7, seed, policy)
    hidden.requires_grad_()
    objective, parameters = Objective(terms(), 2), head_parameters(drafter)
    whole = objective([drafted(drafter, hidden, labels, states, policy)], parameters, labels=[labels])
    parts = [slice(0, cut), slice(cut, 7)]
    split = objective(
        (drafted(drafter, hidden[rows], labels[rows], states[rows], policy) for rows in parts),
        parameters,
        labels=[labels[rows] for rows in parts],
    )
    torch.testing.assert_close(split.loss, whole.loss, rtol=1e-10, atol=1e-12)
    assert_same(gradients(split.loss, drafter, hidden), gradients(whole.loss, drafter, hidden))
    torch.testing.assert_close(split.values, whole.values, equal_nan=True)
    torch.testing.assert_close(split.diagnostics, whole.diagnostics, equal_nan=True)
    assert set(whole.diagnostics) == {"survival/path_mass", "coverage/active", "coverage/capped"}


def test_evaluate_gives_the_values_of_training() -> None:
    """Numerators and denominators of a validation pass are those of a training step, diagnostics too."""
    policy = Budgeted(2, 6)
    drafter, hidden, labels, states = setup(7, 0, policy)
    batch = drafted(drafter, hidden.requires_grad_(), labels, states, policy)
    objective, seen = Objective(terms(), 3), []
    sums, weights = objective.evaluate(batch, seen.append)
    value = objective([batch], head_parameters(drafter), labels=[labels])
    found = dict(zip(objective.figures, sums / weights, strict=True))
    expected = {f"loss/{term.name}": item for term, item in zip(objective.terms, value.values, strict=True)}
    torch.testing.assert_close(found, expected | value.diagnostics)
    assert len(seen) == 3


def test_no_valid_anchor_gives_a_zero_that_is_connected() -> None:
    """No anchor at all: the loss is 0, every parameter gets a zero gradient, so that an all-reduce still runs."""
    policy = Budgeted(2, 6)
    drafter, hidden, labels, states = setup(3, 0, policy)
    none = slice(0, 0)
    empty = drafted(drafter, hidden[none].requires_grad_(), labels[none], states[none], policy)
    value = Objective(terms(), 2)([empty], head_parameters(drafter), labels=[labels[none]])
    assert value.loss.item() == 0
    assert torch.isnan(value.values).all()
    value.loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in head_parameters(drafter))


def test_coefficient_zero_does_no_work() -> None:
    """A term with coefficient 0 is never called; without survival and coverage nothing is replayed."""

    class Explosive(Survival):
        def forward(self, blocks: DraftBlocks):  # type: ignore[no-untyped-def]
            raise AssertionError("called")

    del LossTerm._classes["Explosive"]
    policy = Budgeted(2, 6)
    drafter, hidden, labels, states = setup(4, 0, policy)
    seen: list[DraftBlocks] = []
    objective = Objective([CrossEntropy(), Explosive(coefficient=0.0)], 4)
    objective.evaluate(drafted(drafter, hidden, labels, states, policy), seen.append)
    assert [term.name for term in objective.terms] == ["cross_entropy"]
    assert "replay" not in vars(seen[0])
    assert "target_logits" not in vars(seen[0])


@pytest.mark.parametrize(
    ("losses", "chunk", "words"),
    [
        ([CrossEntropy(coefficient=0.0)], 4, "No loss has a coefficient above 0"),
        ([L1(), L1()], 4, "Each loss may stand once"),
        ([L1()], 0, "chunk_anchors must be at least 1, got 0"),
    ],
)
def test_impossible_objectives(losses: list[LossTerm], chunk: int, words: str) -> None:
    """Each is an error at start."""
    with pytest.raises(ValueError, match=words):
        Objective(losses, chunk)


def worker(rank: int, folder: str, adaptive: bool) -> None:
    """One of two gloo processes; the second one holds 5 anchors, or none."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    policy = Adaptive(2, 6) if adaptive else Budgeted(2, 6)
    for cut in (2, 7):
        drafter, hidden, labels, states = setup(7, 5, policy)
        rows = slice(0, cut) if rank == 0 else slice(cut, 7)
        mine = hidden[rows].clone().requires_grad_()

        def reduce(values: Tensor) -> Tensor:
            values = values.clone()
            dist.all_reduce(values)
            return values

        value = Objective(terms(), 2)(
            [drafted(drafter, mine, labels[rows], states[rows], policy)],
            head_parameters(drafter),
            labels=[labels[rows]],
            reduce=reduce,
            world_size=2,
        )
        value.loss.backward()
        for parameter in head_parameters(drafter):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2  # what a strategy that averages gradients does
        grads = [parameter.grad for parameter in head_parameters(drafter)]
        found = {"grads": grads, "hidden": mine.grad, "values": value.values, "diagnostics": value.diagnostics}
        torch.save(found, f"{folder}/{cut}-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("adaptive", [False, True], ids=["eager", "deferred"])
def test_two_processes_equal_one(tmp_path: Path, adaptive: bool) -> None:
    """Two processes with unequal masks, and once with one of them empty, give the gradient of the joint batch."""
    mp.spawn(worker, (str(tmp_path), adaptive), nprocs=2)
    policy = Adaptive(2, 6) if adaptive else Budgeted(2, 6)
    drafter, hidden, labels, states = setup(7, 5, policy)
    hidden.requires_grad_()
    plain = reference(drafter, hidden, labels, states, policy)
    expected = gradients(plain, drafter, hidden)
    for cut in (2, 7):
        both = [torch.load(tmp_path / f"{cut}-{rank}.pt") for rank in (0, 1)]
        for item in both:
            assert_same(item["grads"], expected[1:])
        # The slot states are local, so their gradients carry the factor that averaging takes away.
        assert_same([torch.cat([item["hidden"] for item in both]) / 2], expected[:1])
        torch.testing.assert_close(both[0]["values"], both[1]["values"])
        whole = Objective(terms(), 2)(
            [drafted(drafter, hidden, labels, states, policy)], head_parameters(drafter), labels=[labels]
        )
        for item in both:
            torch.testing.assert_close(item["diagnostics"], whole.diagnostics)


class Peeking(LossTerm):
    """A user's loss that looks at what others learn from, without a gradient, before they do."""

    def weight(self, labels: Labels) -> Tensor:
        return labels.valid.sum().double()

    def forward(self, blocks: DraftBlocks) -> WeightedSum:
        with torch.no_grad():
            seen = [blocks.proposer.vocab_size, blocks.path_log_normalizer, blocks.label_log_probs, blocks.l1]
            seen += [blocks.replay.edge_log_probs()]
        assert seen
        return WeightedSum(0.0 * blocks.path_logits.sum(), self.weight(blocks.labels))


del LossTerm._classes["Peeking"]


@pytest.mark.parametrize("markov_head", ["vanilla", "rnn"])
def test_a_look_without_gradient_takes_no_gradient_from_others(markov_head: str) -> None:
    """What losses share is computed once, by whoever asks first; under no_grad it keeps the gradient of the rest."""
    policy = Budgeted(2, 6)
    drafter, hidden, labels, states = setup(7, 1, policy, markov_head)
    hidden.requires_grad_()
    batch = drafted(drafter, hidden, labels, states, policy)
    found = []
    for losses in ([Peeking(), *terms()], terms()):
        value = Objective(losses, 3)([batch], head_parameters(drafter), labels=[labels])
        found.append(gradients(value.loss, drafter, hidden))
    assert_same(*found)


def test_recomputed_chunks_keep_no_vocabulary_alive() -> None:
    """Between the passes of chunks that are recomputed no [n, V] tensor is held, however many chunks there are."""
    policy = Adaptive(2, 6)
    drafter, hidden, labels, states = setup(7, 1, policy)
    batch = drafted(drafter, hidden.requires_grad_(), labels, states, policy)
    gc.collect()
    before = {id(item) for item in gc.get_objects() if type(item) is Tensor}
    value = Objective(terms(), 2)([batch], head_parameters(drafter), labels=[labels])
    gc.collect()
    kept = [item for item in gc.get_objects() if type(item) is Tensor and id(item) not in before]
    assert value.loss.requires_grad
    assert not [tuple(item.shape) for item in kept if item.dim() > 1 and item.shape[-1] == 64]


def test_parameters_that_share_a_gradient() -> None:
    """Two biases that are added have one gradient tensor; chunks and the factor of the loss count it once."""
    first, second = (torch.zeros(DEPTHS, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    hidden = torch.randn(6, DEPTHS, 3, dtype=torch.float64, requires_grad=True)

    def value(chunk: Tensor, rows: slice) -> Tensor:
        return ((first + second) * chunk.sum(0)).sum()

    chunks = [slice(0, 2), slice(2, 5), slice(5, 6)]
    loss = _GradientInForward.apply(value, chunks, hidden, first, second)  # type: ignore[no-untyped-call]
    for found in torch.autograd.grad(3 * loss, (first, second)):
        torch.testing.assert_close(found, 3 * hidden.detach().sum(0))


@pytest.mark.parametrize("chunk", [2, 7])
def test_confidence_detach(chunk: int) -> None:
    """Detached, the head learns what it learns anyway, and nothing else learns from it; otherwise states and W1 do."""
    policy = Budgeted(2, 6)
    drafter, hidden, labels, states = setup(7, 2, policy)
    hidden.requires_grad_()
    assert drafter.confidence_head is not None and drafter.markov is not None
    parameters = [drafter.confidence_head.proj.weight, hidden, drafter.markov.markov_w1.weight]
    found = []
    for detach in (True, False):
        batch = drafted(drafter, hidden, labels, states, policy)
        value = Objective([Confidence(detach=detach)], chunk)([batch], head_parameters(drafter), labels=[labels])
        found.append(torch.autograd.grad(value.loss, parameters))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-10, atol=1e-12)
    assert found[1][0].any() and not found[0][1].any() and not found[0][2].any()
    assert found[1][1].any() and found[1][2].any()
