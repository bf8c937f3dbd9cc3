"""Acceptance of decoded or simulated rounds.

Shapes: n rounds, K depths. `num_accepted` leaves the bonus token out, `committed` counts it; both are what was left
after the stop rules. Source: arXiv 2610.20175 §3.1, A.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treespark.metrics.ratio import Ratio


def acceptance_sums(num_accepted: Tensor, depths: int) -> tuple[Tensor, Tensor]:
    """Counts rounds by accepted length.

    Args:
        num_accepted: [n] accepted tokens of each round.
        depths: K.

    Returns:
        [K] rounds with at least d = 1..K accepted tokens, and [K] rounds with at least d - 1.
    """
    floors = torch.arange(depths + 1, device=num_accepted.device)
    at_least = (num_accepted.reshape(-1, 1) >= floors).sum(0)  # [K+1]
    return at_least[1:], at_least[:-1]


class AcceptanceLength(Ratio):
    """tau: committed tokens per round, the bonus counted, pooled over all rounds; nan without rounds.

    >>> metric = AcceptanceLength()
    >>> metric.update(torch.tensor([2, 0]), torch.tensor([3, 1]))
    >>> metric.update(torch.tensor([1]), torch.tensor([1]))  # the limit cut this round's bonus
    >>> metric.compute()
    tensor(1.6667, dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(None, **kwargs)

    def update(self, num_accepted: Tensor, committed: Tensor) -> None:
        """Adds rounds: both [n] long."""
        self.add(committed.sum(), committed.numel())


class MeanAccepted(Ratio):
    """Accepted draft tokens per round, the bonus left out; nan without rounds.

    >>> metric = MeanAccepted()
    >>> metric.update(torch.tensor([2, 0, 1]), torch.tensor([3, 1, 1]))
    >>> metric.compute()
    tensor(1., dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(None, **kwargs)

    def update(self, num_accepted: Tensor, committed: Tensor) -> None:
        """Adds rounds: both [n] long."""
        self.add(num_accepted.sum(), num_accepted.numel())


class AcceptanceByPosition(Ratio):
    """Share of all rounds that accept at least d tokens, for d = 1..K; its sum over d is the mean accepted length.

    Args:
        depths: K.

    >>> metric = AcceptanceByPosition(depths=3)
    >>> metric.update(torch.tensor([2, 0, 1, 2]), torch.tensor([3, 1, 2, 3]))
    >>> metric.compute()
    tensor([0.7500, 0.5000, 0.0000], dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(self, depths: int, **kwargs: Any) -> None:
        super().__init__(depths, **kwargs)
        self.depths = depths

    def update(self, num_accepted: Tensor, committed: Tensor) -> None:
        """Adds rounds: both [n] long."""
        reached, _ = acceptance_sums(num_accepted, self.depths)
        self.add(reached, torch.full_like(reached, num_accepted.numel()))


class ConditionalAcceptance(AcceptanceByPosition):
    """Share of the rounds with d - 1 accepted tokens that accept a d-th, for d = 1..K; nan where none got that far.

    A round that the stop rules cut after d - 1 tokens counts as one that went no further.

    Args:
        depths: K.

    >>> metric = ConditionalAcceptance(depths=3)
    >>> metric.update(torch.tensor([2, 0, 1, 2]), torch.tensor([3, 1, 2, 3]))
    >>> metric.compute()
    tensor([0.7500, 0.6667, 0.0000], dtype=torch.float64)
    """

    def update(self, num_accepted: Tensor, committed: Tensor) -> None:
        """Adds rounds: both [n] long."""
        self.add(*acceptance_sums(num_accepted, self.depths))
