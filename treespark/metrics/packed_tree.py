"""What packed trees hold of the target's distribution: diagnostics without any decoding.

Shapes: M anchors, N packed nodes (root excluded), C candidates (root included), K depths. `valid` [M, K] is True where
depth d = 1..K of an anchor has a label. Each depth has a denominator of its own: its valid anchors. So a mean over
anchors may rise from one depth to the next where that of a single anchor cannot. None of these is greedy acceptance.
Source: arXiv 2610.20175 §C.1, C.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treespark.metrics.ratio import Ratio
from treespark.tree import CandidateTree, PackedTree


def sum_by_depth(values: Tensor, depths: Tensor, keep: Tensor, valid: Tensor) -> Tensor:
    """Sums node values [M, C] by depth: only nodes of `keep` [M, C] at valid depths 1..K count; returns [K] float64."""
    rows, num_depths = valid.shape
    table = torch.zeros(rows, num_depths + 1, dtype=torch.float64, device=valid.device)
    table.scatter_add_(1, depths.clamp(0, num_depths), values.double().masked_fill(~keep, 0.0))
    return (table[:, 1:] * valid).sum(0)


class _ByDepth(Ratio):
    """A mean over the valid anchors of each depth."""

    def __init__(self, depths: int, **kwargs: Any) -> None:
        super().__init__(depths, **kwargs)
        self.depths = depths


class PackedTreeCoverage(_ByDepth):
    """Reference-mass coverage: path mass of the packed nodes of each depth, mean over the depth's valid anchors.

    Args:
        depths: K.

    A root with one packed child of mass 0.6, which has one packed child of mass 0.3:

    >>> from treespark.metrics.packed_tree import example_tree
    >>> metric = PackedTreeCoverage(depths=2)
    >>> metric.update(example_tree(), torch.tensor([[1.0, 0.6, 0.3]]), torch.tensor([[True, True]]))
    >>> metric.compute()
    tensor([0.6000, 0.3000], dtype=torch.float64)
    """

    higher_is_better = True

    def update(self, packed: PackedTree, mass: Tensor, valid: Tensor) -> None:
        """Adds anchors: packed trees, path mass [M, N+1], valid [M, K]."""
        self.add(sum_by_depth(mass, packed.depths, packed.exists, valid), valid.sum(0))


class ArgmaxSurvival(_ByDepth):
    """Reference-argmax survival: share of a depth's valid anchors whose tree holds the path argmax q_1, …, argmax q_d.

    Args:
        depths: K.

    >>> from treespark.metrics.packed_tree import example_tree
    >>> metric = ArgmaxSurvival(depths=2)
    >>> metric.update(example_tree(), torch.tensor([[7, 9]]), torch.tensor([[True, True]]))
    >>> metric.compute()  # the tree holds 7, then 8
    tensor([1., 0.], dtype=torch.float64)
    """

    higher_is_better = True

    def update(self, packed: PackedTree, argmax: Tensor, valid: Tensor) -> None:
        """Adds anchors: packed trees, the target's argmax [M, K] on the reference path, valid [M, K]."""
        held = packed.on_path(argmax)
        self.add(sum_by_depth(held, packed.depths, held, valid), valid.sum(0))


class PackedNodesByDepth(_ByDepth):
    """Number of packed nodes of each depth, mean over the depth's valid anchors.

    Args:
        depths: K.

    >>> from treespark.metrics.packed_tree import example_tree
    >>> metric = PackedNodesByDepth(depths=2)
    >>> metric.update(example_tree(), torch.tensor([[True, True]]))
    >>> metric.compute()
    tensor([1., 1.], dtype=torch.float64)
    """

    def update(self, packed: PackedTree, valid: Tensor) -> None:
        """Adds anchors: packed trees and valid [M, K]."""
        self.add(sum_by_depth(packed.exists, packed.depths, packed.exists, valid), valid.sum(0))


class ExpandedParentsByDepth(_ByDepth):
    """Number of parents that were expanded into each depth, packed or not, mean over the depth's valid anchors.

    Args:
        depths: K.
    """

    def update(self, candidates: CandidateTree, valid: Tensor) -> None:
        """Adds anchors: candidate trees and valid [M, K]."""
        into = candidates.depths + 1  # the depth of a parent's children
        # Parents at the last depth have no depth to expand into.
        keep = candidates.expanded & (into <= self.depths)
        self.add(sum_by_depth(keep, into, keep, valid), valid.sum(0))


class CutScore(Ratio):
    """Score at the cut: the smallest score among an anchor's packed nodes (a log-probability), mean over anchors.

    Anchors without a valid depth or without a packed node are left out.

    >>> from treespark.metrics.packed_tree import example_tree
    >>> metric = CutScore()
    >>> metric.update(example_tree(), torch.tensor([[True, True]]))
    >>> metric.compute()
    tensor(-1.5000, dtype=torch.float64)
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(None, **kwargs)

    def update(self, packed: PackedTree, valid: Tensor) -> None:
        """Adds anchors: packed trees and valid [M, K]."""
        counts = valid[:, 0] & (packed.num_nodes > 0)
        lowest = packed.scores.masked_fill(~packed.exists, torch.inf).amin(1)
        self.add(lowest[counts].double().sum(), counts.sum())


class TargetRank(_ByDepth):
    """Rank of the target's argmax among its packed siblings along the reference-argmax path, 1 = the drafter's first.

    The mean runs over the anchors whose tree holds that path down to the depth (`ArgmaxSurvival` is their share); nan
    where none does.

    Args:
        depths: K.

    >>> from treespark.metrics.packed_tree import example_tree
    >>> metric = TargetRank(depths=2)
    >>> metric.update(example_tree(), torch.tensor([[7, 9]]), torch.tensor([[True, True]]))
    >>> metric.compute()
    tensor([1., nan], dtype=torch.float64)
    """

    higher_is_better = False

    def update(self, packed: PackedTree, argmax: Tensor, valid: Tensor) -> None:
        """Adds anchors: packed trees, the target's argmax [M, K] on the reference path, valid [M, K]."""
        held = packed.on_path(argmax)
        siblings = (packed.parents.unsqueeze(2) == packed.parents.unsqueeze(1)) & packed.exists.unsqueeze(1)
        siblings[:, :, 0] = False  # the root is nobody's sibling
        better = siblings & (packed.log_probs.unsqueeze(1) > packed.log_probs.unsqueeze(2))
        ranks = better.sum(2) + 1
        num_held = sum_by_depth(held, packed.depths, held, valid)
        self.add(sum_by_depth(ranks, packed.depths, held, valid), num_held)


def example_tree() -> PackedTree:
    """Returns a small tree for examples: the anchor 5, its child 7 (score -0.5), and that one's child 8 (-1.5)."""
    return PackedTree(
        tokens=torch.tensor([[5, 7, 8]]),
        parents=torch.tensor([[0, 0, 1]]),
        depths=torch.tensor([[0, 1, 2]]),
        log_probs=torch.tensor([[0.0, -0.5, -1.0]]),
        scores=torch.tensor([[0.0, -0.5, -1.5]]),
        exists=torch.ones(1, 3, dtype=torch.bool),
        index=torch.arange(3).unsqueeze(0),
        num_nodes=torch.tensor([2]),
    )
