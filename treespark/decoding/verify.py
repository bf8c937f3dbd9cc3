"""Greedy verification of packed trees: what the target sees, and the walk along its choices.

Shapes: M requests, N packed nodes (root excluded), L positions in the target's cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from treespark.tree import PackedTree


class Walk(NamedTuple):
    """The path of accepted nodes in each row.

    Attributes:
        accepted: [M, N+1] bool, True at the root and at the accepted nodes. Nodes stand by depth, so the True places
            of a row, in order, are its path.
        num_accepted: [M] accepted nodes, root excluded.
    """

    accepted: Tensor
    num_accepted: Tensor


def root_tree(anchors: Tensor) -> PackedTree:
    """Returns the trees that hold nothing but their roots: anchors [M, 1]."""
    zeros = torch.zeros_like(anchors)
    scores = zeros.float()
    return PackedTree(
        tokens=anchors,
        parents=zeros,
        depths=zeros,
        log_probs=scores,
        scores=scores,
        exists=torch.ones_like(anchors, dtype=torch.bool),
        index=zeros,
        num_nodes=zeros[:, 0],
    )


def trim(packed: PackedTree, num_nodes: int) -> PackedTree:
    """Drops the columns past the first `num_nodes` nodes, which are padding in every row."""
    width = num_nodes + 1
    return PackedTree(
        tokens=packed.tokens[:, :width],
        parents=packed.parents[:, :width],
        depths=packed.depths[:, :width],
        log_probs=packed.log_probs[:, :width],
        scores=packed.scores[:, :width],
        exists=packed.exists[:, :width],
        index=packed.index[:, :width],
        num_nodes=packed.num_nodes,
    )


def tree_attention_mask(ancestors: Tensor, prefix: int, seen: Tensor | None = None) -> Tensor:
    """Returns [M, N+1, L + N+1], True where a node looks: its own path, and of the prefix (L = `prefix`) what is seen.

    Args:
        ancestors: [M, N+1, N+1] `PackedTree.ancestor_mask()`.
        prefix: L, the cached positions.
        seen: [M, 1, L] True for the positions that a row's text fills; None: all of them.
    """
    rows, width, _ = ancestors.shape
    before = ancestors.new_ones(rows, width, prefix) if seen is None else seen.expand(-1, width, -1)
    return torch.cat([before, ancestors], dim=2)


def walk(packed: PackedTree, choices: Tensor, ancestors: Tensor | None = None) -> Walk:
    """Walks from the root to a child that carries the target's choice for as long as there is one.

    Args:
        packed: The verified trees. Siblings carry distinct tokens.
        choices: [M, N+1] the target's next token after each node (its argmax there).
        ancestors: [M, N+1, N+1] `packed.ancestor_mask()`, if at hand.

    Source: arXiv 2610.20175 §3.1, A.2.
    """
    agrees = packed.exists & (packed.tokens == choices.gather(1, packed.parents))
    agrees[:, 0] = True  # the root is committed text
    if ancestors is None:
        ancestors = packed.ancestor_mask()
    # A node is accepted when it and all its ancestors agree; at most one child of a node can.
    accepted = packed.exists & (agrees.unsqueeze(1) | ~ancestors).all(2)
    return Walk(accepted, accepted.sum(1) - 1)


def judged_edges(packed: PackedTree, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the edges that a verification has judged, as `fit_edges` takes them.

    An edge is judged when its parent was accepted or is the root; below a rejected node nothing is known.

    Args:
        packed: The verified trees.
        accepted: [M, N+1] `Walk.accepted`.

    Returns:
        Log-probabilities and verdicts, [n] each.
    """
    judged = packed.exists & accepted.gather(1, packed.parents)
    judged[:, 0] = False
    return packed.log_probs[judged], accepted[judged]
