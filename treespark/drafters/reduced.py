"""Training over a reduced draft vocabulary: the losses see the tokens that can be drafted, and nothing else.

Tokens are renumbered: 0..V_d-1 are the draft vocabulary in order, and V_d + m is the anchor token of row m, which may
be any token of the target. So a chunk's large tensors have V_d columns, in replay as in the losses.
Shapes: M anchors, K depths, P parents, T tokens, V_d draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treespark.distributions import Place, RowRecorder
from treespark.drafters.proposer import DraftProposer
from treespark.tree import Expansion


class ReducedProposer:
    """A proposer over the draft vocabulary's own numbers; see the module.

    Args:
        inner: A proposer of the same anchors whose head has the draft vocabulary's rows, and whose parents are tokens
            of the target.
        draft_ids: [V_d] the tokens that can be drafted.
    """

    def __init__(self, inner: DraftProposer, draft_ids: Tensor) -> None:
        self._inner, self._ids = inner, torch.cat([draft_ids, inner.root_tokens])
        self.depths, self.vocab_size = inner.depths, len(draft_ids)
        self.root_tokens = torch.arange(len(draft_ids), len(self._ids), device=draft_ids.device)

    @property
    def base_logits(self) -> Tensor:
        """[M, K, V_d] logits of each depth without any parent's correction."""
        return self._inner.base_logits

    def root_carry(self) -> Tensor:
        """See `treespark.tree.Proposer`."""
        return self._inner.root_carry()

    def logits(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the conditional logits [M, P, V_d], and the states of their children."""
        return self._inner.logits(depth, self._ids[parents], carry)

    def expand(self, depth: int | Tensor, parents: Tensor, carry: Tensor, k: int) -> Expansion:
        """See `treespark.tree.Proposer`."""
        return self._inner.expand(depth, self._ids[parents], carry, k)

    def score(self, depth: int | Tensor, parents: Tensor, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See `treespark.tree.Proposer`."""
        return self._inner.score(depth, self._ids[parents], carry, tokens)

    def marginals(self, k: int) -> tuple[Tensor, Tensor]:
        """See `treespark.tree.Proposer`."""
        return self._inner.marginals(k)

    def path_logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits [M, K, V_d] along one path of parents [M, K]."""
        return self._inner.path_logits(self._ids[tokens])

    def confidence_logits(self, tokens: Tensor, detach: bool = False) -> Tensor:
        """Returns confidence logits [M, K] along one path of parents [M, K]."""
        return self._inner.confidence_logits(self._ids[tokens], detach)

    def record(self, count: int | None) -> RowRecorder:
        """See `treespark.distributions.RecordingProposer`."""
        return _ReducedRows(self._inner.record(count), self._ids)


class _ReducedRows:
    """Hands parents on as tokens of the target."""

    def __init__(self, inner: RowRecorder, ids: Tensor) -> None:
        self._inner, self._ids = inner, ids

    def add(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Place, Tensor]:
        return self._inner.add(depth, self._ids[parents], carry)

    def finish(self) -> list[Tensor]:
        return self._inner.finish()


def frequent_tokens(counts: Tensor, size: int, always: tuple[int, ...] = ()) -> Tensor:
    """Returns the `size` most frequent tokens in ascending order; equal counts: the smaller id first.

    Args:
        counts: [V] how often each token occurs.
        size: V_d.
        always: Tokens that are among them whatever their count, such as the end tokens.

    >>> frequent_tokens(torch.tensor([5, 0, 7, 0]), 2, always=(3,))
    tensor([2, 3])
    """
    ranked = counts.clone()
    ranked[list(always)] = counts.max() + 1
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values
