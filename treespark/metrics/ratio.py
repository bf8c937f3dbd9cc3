"""A sum divided by a sum: the state that all our metrics have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns numerator / denominator in double precision, nan where the denominator is 0.

    >>> ratio(torch.tensor([3, 1]), torch.tensor([2, 0]))
    tensor([1.5000,    nan], dtype=torch.float64)
    """
    quotient = numerator.double() / denominator.double()
    return torch.where(denominator == 0, torch.nan, quotient)


class Ratio(Metric):
    """Pools numerators and denominators over updates and processes and divides once: never a mean of means.

    A subclass has an `update` that calls `add`.

    Args:
        size: Length of the result, or None for a scalar.
    """

    is_differentiable = False
    full_state_update = False
    numerator: Tensor
    denominator: Tensor

    def __init__(self, size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        shape = () if size is None else (size,)
        self.add_state("numerator", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("denominator", torch.zeros(shape, dtype=torch.long), dist_reduce_fx="sum")

    def add(self, numerator: Tensor, denominator: Tensor | int) -> None:
        """Adds to both sums (same shape as the result)."""
        self.numerator = self.numerator + numerator.detach().to(self.numerator)
        self.denominator = self.denominator + torch.as_tensor(denominator).detach().to(self.denominator)

    def compute(self) -> Tensor:
        """Returns the pooled ratio as float64, nan without data."""
        return ratio(self.numerator, self.denominator)
