"""Each loss against a number derived by hand, against its formula written as plain loops, and at its limits."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tables import TableProposer, random_blocks
from treespark.blocks import DraftBlocks, Labels
from treespark.losses import L1, Confidence, Coverage, CrossEntropy, LossTerm, Retention, Survival
from treespark.policies import Budgeted, TreePolicy


def two_token_blocks(policy: TreePolicy, drafted: float, wanted: float, valid: int = 2) -> DraftBlocks:
    """One anchor, two depths, two tokens; the drafter gives token 0 `drafted`, the target gives it `wanted`."""
    row = torch.tensor([math.log(drafted), math.log1p(-drafted)], dtype=torch.float64)
    target = torch.tensor([math.log(wanted), math.log1p(-wanted)], dtype=torch.float64)
    root = torch.zeros(1, dtype=torch.long)
    proposer = TableProposer(row.expand(1, 2, 2, 2).clone(), root, torch.zeros(1, 2, dtype=torch.float64))
    mask = torch.tensor([[True, True]]) & (torch.arange(2) < valid)
    labels = Labels(root, torch.zeros(1, 2, dtype=torch.long), mask, policy.expanded_per_depth(2))
    return DraftBlocks(labels, proposer, target.expand(1, 2, 2), lambda hidden: hidden, policy)


W2 = math.exp(-1 / 4)  # w_2 with gamma = 4


def test_cross_entropy() -> None:
    """Label 0 with p = 0.8 at both depths: (1 + w_2)·(-log 0.8) over 1 + w_2."""
    found = CrossEntropy()(two_token_blocks(Budgeted(1, 2), 0.8, 0.6))
    assert found.sum.item() == pytest.approx(-(1 + W2) * math.log(0.8))
    assert found.weight.item() == pytest.approx(1 + W2)


def test_l1() -> None:
    """|0.8 - 0.6| + |0.2 - 0.4| = 0.4 at each depth."""
    found = L1()(two_token_blocks(Budgeted(1, 2), 0.8, 0.6))
    assert found.sum.item() == pytest.approx((1 + W2) * 0.4)


def test_confidence() -> None:
    """Logit 0 against overlap 0.8: -(0.8·log 0.5 + 0.2·log 0.5) = log 2 at each depth."""
    found = Confidence()(two_token_blocks(Budgeted(1, 2), 0.8, 0.6))
    assert found.sum.item() == pytest.approx((1 + W2) * math.log(2))


def test_survival() -> None:
    """Chain 0, 0 with q(0) = 0.6: masses 0.6 and 0.36, edges -log 0.8 each; two valid (anchor, depth) pairs."""
    found = Survival()(two_token_blocks(Budgeted(1, 2), 0.8, 0.6))
    assert found.sum.item() == pytest.approx(-0.96 * math.log(0.8))
    assert found.weight.item() == 2


def test_survival_leaves_out_nodes_of_invalid_depths() -> None:
    """With one valid depth only the first edge counts: 0.6·(-log 0.8) over 1."""
    found = Survival()(two_token_blocks(Budgeted(1, 2), 0.8, 0.6, valid=1))
    assert found.sum.item() == pytest.approx(-0.6 * math.log(0.8))
    assert found.weight.item() == 1


def test_coverage() -> None:
    """K = 1: boundary log 0.8. Token 0 (q 0.6): gap 0.5. Token 1 (q 0.4): 0.5 + log(0.8/0.2) = 1.886, capped to 1.
    One parent a depth: (0.6·0.5 + 0.4·1)·(1 + w_2) = 0.7·(1 + w_2) over 1 + w_2.
    """
    found = Coverage(num_tokens=2, margin=0.5, cap=1.0)(two_token_blocks(Budgeted(1, 2), 0.8, 0.6))
    assert found.sum.item() == pytest.approx(0.7 * (1 + W2))
    assert found.weight.item() == pytest.approx(1 + W2)


def test_coverage_counts_every_expanded_parent() -> None:
    """K = F = 2: one parent into depth 1, two into depth 2, packed or not (N = 1): weight 1 + 2·w_2."""
    found = Coverage()(two_token_blocks(Budgeted(2, 1), 0.8, 0.6))
    assert found.weight.item() == pytest.approx(1 + 2 * W2)


def test_coverage_past_the_cap_has_no_gradient() -> None:
    """p(1) = 1e-4 lies more than a cap below the boundary: its hinge is flat; J = 1 would be token 0's alone."""
    blocks = two_token_blocks(Budgeted(1, 2), 0.9999, 1e-9)
    table = blocks.proposer.table.requires_grad_()  # type: ignore[attr-defined]
    (gradient,) = torch.autograd.grad(Coverage(num_tokens=1)(blocks).sum, table, allow_unused=True)
    assert gradient.abs().sum() == 0


def test_survival_by_mass() -> None:
    """Chain 0, 0 with q(0) = 0.6: masses 0.6 + 0.36 = 0.96; the value is the mean edge loss -log 0.8."""
    found = Survival(denominator="mass")(two_token_blocks(Budgeted(1, 2), 0.8, 0.6))
    assert found.sum.item() == pytest.approx(-0.96 * math.log(0.8))
    assert found.weight.item() == pytest.approx(0.96)
    mass, pairs = found.diagnostics["path_mass"]
    assert (mass.item(), pairs.item()) == (pytest.approx(0.96), 2)


def test_survival_on_the_reference_path() -> None:
    """All six nodes of two tokens and depths are packed; the path 0, 0 alone has masses 0.6 and 0.36.

    Every node: token 0 edges cost a = -log 0.8, token 1 edges b = -log 0.2: at depth 1 0.6·a + 0.4·b, at depth 2 the
    same again, since the masses of the parents add up to 1.
    """
    a, b = -math.log(0.8), -math.log(0.2)
    for paths, expected in (("all", 2 * (0.6 * a + 0.4 * b)), ("reference", 0.96 * a)):
        found = Survival(paths=paths)(two_token_blocks(Budgeted(2, 6), 0.8, 0.6))
        assert found.sum.item() == pytest.approx(expected)
        assert found.weight.item() == 2


def test_coverage_by_mass() -> None:
    """J = 1: token 0 alone with q = 0.6 at each of two parents: weight 0.6·(1 + w_2), hinges of 0.5."""
    found = Coverage(num_tokens=1, denominator="mass")(two_token_blocks(Budgeted(1, 2), 0.8, 0.6))
    assert found.weight.item() == pytest.approx(0.6 * (1 + W2))
    assert (found.sum / found.weight).item() == pytest.approx(0.5)


def test_active_and_capped_parents() -> None:
    """Token 0 lies at the boundary: gap = margin 0.5, below the cap of 1; token 1 (gap 1.886) is past it. Two parents.

    With margin 0 token 0's hinge is at 0: nothing but the capped token is left. With a cap of 2 nothing is capped.
    """
    for options, active, capped in (({}, 2, 2), ({"margin": 0.0}, 0, 2), ({"cap": 2.0}, 2, 0)):
        found = Coverage(num_tokens=2, **options)(two_token_blocks(Budgeted(1, 2), 0.8, 0.6))
        assert [float(x) for x in found.diagnostics["active"]] == [active, 2]
        assert [float(x) for x in found.diagnostics["capped"]] == [capped, 2]


def test_boundary_with_a_gradient() -> None:
    """One depth counts, token 1 of gap 1.886 under a cap of 4, q(1) = 0.4, logits z: the gap is
    margin + z_0 - z_1, so the gradient is (0.4, -0.4), plus 0 for token 0 that is the boundary itself.

    Detached, token y pulls by -q(y)·(onehot(y) - p): (-0.6·0.2 + 0.4·0.8, 0.6·0.2 - 0.4·0.8) = (0.2, -0.2).
    """
    for detach, expected in ((False, [0.4, -0.4]), (True, [0.2, -0.2])):
        blocks = two_token_blocks(Budgeted(1, 2), 0.8, 0.6, valid=1)
        table = blocks.proposer.table.requires_grad_()  # type: ignore[attr-defined]
        value = Coverage(num_tokens=2, cap=4.0, detach_boundary=detach)(blocks).sum
        (gradient,) = torch.autograd.grad(value, table)
        assert gradient[0, 0, 0].tolist() == pytest.approx(expected)
        assert gradient[0, 1].abs().sum() == 0


def test_undeclared_diagnostics_are_refused() -> None:
    """A loss that reports what it does not declare would make processes disagree."""

    class Chatty(Survival):
        diagnostics = ("mass",)

    del LossTerm._classes["Chatty"]
    with pytest.raises(ValueError, match=r"Chatty declares the diagnostics \['mass'\] but reports \['path_mass'\]"):
        Chatty()(two_token_blocks(Budgeted(1, 2), 0.8, 0.6))


def test_drafter_that_equals_the_target() -> None:
    """P = q: L1 is 0 and cross-entropy of target samples is the entropy's own term; overlap 1."""
    blocks = two_token_blocks(Budgeted(1, 2), 0.6, 0.6)
    assert L1()(blocks).sum.item() == pytest.approx(0.0, abs=1e-12)
    assert Confidence()(blocks).sum.item() == pytest.approx((1 + W2) * math.log(2))


def plain(term: LossTerm, blocks: DraftBlocks) -> tuple[float, float]:
    """The formulas as loops over anchors, depths, nodes and tokens, on lists and the full log-softmax."""
    table: torch.Tensor = blocks.proposer.table  # type: ignore[attr-defined]
    labels, policy = blocks.labels, blocks.policy
    q = blocks.target_logits.softmax(-1)
    tree = policy.build(blocks.proposer)
    packed = tree.pack()
    total, weight = 0.0, 0.0
    for m in range(len(labels)):
        for d in range(labels.tokens.shape[1]):
            if not labels.valid[m, d]:
                continue
            w = math.exp(-d / 4)
            parent = labels.root_tokens[m] if d == 0 else labels.tokens[m, d - 1]
            p = table[m, d, parent].softmax(-1)
            overlap = 1 - 0.5 * (p - q[m, d]).abs().sum()
            if isinstance(term, CrossEntropy):
                total, weight = total + w * -p[labels.tokens[m, d]].log().item(), weight + w
            elif isinstance(term, L1):
                total, weight = total + w * (p - q[m, d]).abs().sum().item(), weight + w
            elif isinstance(term, Confidence):
                c = blocks.proposer.confidence[m, d].sigmoid()  # type: ignore[attr-defined]
                value = -(overlap * c.log() + (1 - overlap) * (1 - c).log())
                total, weight = total + w * value.item(), weight + w
            elif isinstance(term, Survival):
                weight += 1
            for u in range(tree.tokens.shape[1]):
                if isinstance(term, Coverage) and tree.expanded[m, u] and tree.depths[m, u] == d:
                    log_p = table[m, d, tree.tokens[m, u]].log_softmax(-1)
                    boundary = log_p.sort(descending=True).values[policy.k - 1]  # type: ignore[attr-defined]
                    for y in q[m, d].topk(term.num_tokens).indices:
                        gap = term.margin + boundary - log_p[y]
                        total += float(q[m, d, y] * w * min(term.cap, max(0.0, gap)))
                    weight += w
        if isinstance(term, Survival):
            mass = {0: 1.0}
            for i in range(1, int(packed.num_nodes[m]) + 1):
                u, d = int(packed.parents[m, i]), int(packed.depths[m, i]) - 1
                mass[i] = mass[u] * float(q[m, d, packed.tokens[m, i]])
                if labels.valid[m, d]:
                    log_p = table[m, d, packed.tokens[m, u]].log_softmax(-1)[packed.tokens[m, i]]
                    total += mass[i] * -float(log_p)
    return total, weight


@pytest.mark.parametrize("term", [CrossEntropy(), L1(), Confidence(), Survival(), Coverage()], ids=lambda t: t.name)
@pytest.mark.parametrize("policy", [Budgeted(3, 12), Budgeted(2, 5, 1)], ids=["tree", "narrow"])
def test_equals_the_formula_in_loops(term: LossTerm, policy: TreePolicy) -> None:
    """Numerator and denominator of the vectorised loss equal the loops, over random tables, labels and spans."""
    for seed in range(5):
        found = term(random_blocks(policy, seed))
        total, weight = plain(term, random_blocks(policy, seed))
        assert found.sum.item() == pytest.approx(total, rel=1e-10)
        assert found.weight.item() == pytest.approx(weight, rel=1e-10)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: CrossEntropy(coefficient=-1.0), "finite coefficient >= 0, got -1.0"),
        (lambda: L1(gamma=0.0), "gamma > 0, got 0.0"),
        (lambda: Coverage(num_tokens=0), "num_tokens >= 1, got 0"),
        (lambda: Coverage(margin=-0.1), "margin >= 0"),
        (lambda: Coverage(cap=0.0), "cap > 0"),
        (lambda: Coverage(denominator="sum"), 'Coverage needs denominator "count" or "mass", got \'sum\''),
        (lambda: Survival(paths="some"), 'Survival needs paths "all" or "reference", got \'some\''),
        (lambda: Survival(denominator=""), 'Survival needs denominator "count" or "mass"'),
    ],
)
def test_options_out_of_range(build, words: str) -> None:  # type: ignore[no-untyped-def]
    """Each impossible option is an error that says what is needed."""
    with pytest.raises(ValueError, match=words):
        build()


def test_retention() -> None:
    """A chain of token 0 (p = 0.8) is packed, cut at 2·log 0.8; the reference is 0, 1.

    Depth 1: s = log 0.8, gap 0.5 + 2·log 0.8 - log 0.8 = 0.5 + log 0.8 > 0. Depth 2, whose parent is packed:
    s = log 0.8 + log 0.2, gap 0.5 + log 0.8 - log 0.2. Two depths count.
    """
    blocks = two_token_blocks(Budgeted(1, 2), 0.8, 0.6)
    blocks.labels.tokens[0, 1] = 1
    found = Retention(margin=0.5, cap=3.0)(blocks)
    assert found.sum.item() == pytest.approx(0.5 + math.log(0.8) + 0.5 + math.log(0.8) - math.log(0.2))
    assert found.weight.item() == 2
    assert [float(item) for item in found.diagnostics["active"]] == [2, 2]
    assert Retention(margin=0.5, cap=1.0)(blocks).sum.item() == pytest.approx(0.5 + math.log(0.8) + 1.0)


def test_retention_stops_after_the_first_lost_token() -> None:
    """The reference begins with 1, which is not packed: depth 1 counts, depth 2 has a parent that is never verified."""
    blocks = two_token_blocks(Budgeted(1, 2), 0.8, 0.6)
    blocks.labels.tokens[0, 0] = 1
    found = Retention(margin=0.5, cap=9.0)(blocks)
    assert found.sum.item() == pytest.approx(0.5 + 2 * math.log(0.8) - math.log(0.2))
    assert found.weight.item() == 1


def test_retention_needs_a_full_tree() -> None:
    """Two children and their four hold 6 candidates; a budget of 7 is never full, so there is no cut."""
    policy = Budgeted(2, 6)
    blocks = two_token_blocks(policy, 0.8, 0.6)
    assert Retention()(blocks).weight.item() == 2
    policy.num_draft_nodes = 7
    found = Retention()(two_token_blocks(policy, 0.8, 0.6))
    assert found.sum.item() == found.weight.item() == 0


@pytest.mark.parametrize("seed", range(4))
def test_retention_is_its_formula(seed: int) -> None:
    """Against plain loops over anchors and depths, with membership found by walking the packed tree from the root."""
    policy = Budgeted(2, 6)
    blocks = random_blocks(policy, seed)
    packed, labels = blocks.replay.packed, blocks.labels
    total, count = 0.0, 0
    for anchor in range(len(labels)):
        nodes = int(packed.num_nodes[anchor])
        if nodes < 6:
            continue
        cut = min(float(packed.scores[anchor, node]) for node in range(1, nodes + 1))
        node, score = 0, 0.0
        for depth in range(labels.tokens.shape[1]):
            if not labels.valid[anchor, depth] or node is None:
                break
            token = int(labels.tokens[anchor, depth])
            score += float(blocks.label_log_probs[anchor, depth])
            total += min(3.0, max(0.0, 0.5 + cut - score))
            count += 1
            children = [
                child
                for child in range(1, nodes + 1)
                if int(packed.parents[anchor, child]) == node and int(packed.tokens[anchor, child]) == token
            ]
            node = children[0] if children else None
    found = Retention(margin=0.5, cap=3.0)(blocks)
    assert found.sum.item() == pytest.approx(total)
    assert found.weight.item() == count
