"""Training a drafter of a reduced vocabulary: which tokens it can draft, and labels and blocks that know only them.

Losses and replay see the draft vocabulary alone, renumbered (`treespark.drafters.reduced`). The target's distribution
is the one among these tokens. A label that cannot be drafted ends its block's valid depths: no draft goes on past it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treespark.blocks import DraftBlocks, Labels
from treespark.drafters.reduced import frequent_tokens

if TYPE_CHECKING:
    from treespark.drafters import Drafter
    from treespark.policies import TreePolicy
    from treespark.target import Target


def choose_tokens(drafter: Drafter, target: Target, data: Any) -> None:
    """Gives a drafter of a reduced vocabulary the most frequent supervised tokens of the training data.

    The target's end tokens are always among them. Without training data nothing changes: a checkpoint brings its own.

    Args:
        drafter: Any drafter; one with a full vocabulary stays as it is.
        target: Its target.
        data: The datamodule.

    Raises:
        ValueError: When the data cannot count its tokens.
    """
    if drafter.draft_ids is None or data is None:
        return
    size = len(drafter.draft_ids)
    count = getattr(data, "token_counts", None)
    if count is None:
        raise ValueError(
            f"draft_vocab_size: {size} takes the most frequent tokens of the training data, but a "
            f"{type(data).__name__} has no method token_counts(vocab_size): add it, or leave draft_vocab_size out."
        )
    counts: Tensor | None = count(target.spec.vocab_size)
    if counts is not None:
        drafter.select_tokens(frequent_tokens(counts, size, target.spec.eos_token_ids))


def draftable(labels: Labels, drafter: Drafter) -> Labels:
    """Returns the labels in the draft vocabulary's numbers, valid up to the first that cannot be drafted.

    Anchors keep their tokens of the target. A full vocabulary changes nothing.
    """
    ids = drafter.draft_ids
    if ids is None:
        return labels
    number = torch.full((drafter.spec.vocab_size,), -1, device=ids.device)
    number[ids] = torch.arange(len(ids), device=ids.device)
    tokens = number[labels.tokens]
    valid = labels.valid & (tokens >= 0).cumprod(1).bool()
    return replace(labels, tokens=tokens.clamp(min=0), valid=valid)


def draft_blocks(
    target: Target, drafter: Drafter, policy: TreePolicy, labels: Labels, hidden: Tensor, target_hidden: Tensor
) -> DraftBlocks:
    """Returns what the losses see of M anchors.

    Args:
        target: The target.
        drafter: The drafter.
        policy: The tree policy that replay runs.
        labels: From `draftable`.
        hidden: [M, K, H] the drafter's slot states.
        target_hidden: [M, K, H] final-normed target states at anchor + d - 1.
    """
    if drafter.draft_ids is None:
        proposer = drafter.propose(hidden, labels.root_tokens)
        return DraftBlocks(labels, proposer, target_hidden, target.logits, policy)
    reduced = drafter.propose_reduced(hidden, labels.root_tokens)
    labels = replace(labels, root_tokens=reduced.root_tokens)
    # A drafter in training has the target's own rows.
    head = partial(target.logits, rows=drafter.lm_head.weight)
    return DraftBlocks(labels, reduced, target_hidden, head, policy)
