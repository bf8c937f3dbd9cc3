"""How far the confidence head is from the acceptance probability that it predicts.

Shapes: n predictions, B bins. The truth is the overlap of drafter and target, 1 - L1 / 2: the probability that
rejection sampling accepts, not greedy acceptance. Source: arXiv 2610.20175 §B.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import Metric

from treespark.metrics.ratio import ratio


def confidence_sums(logits: Tensor, overlap: Tensor, mask: Tensor | None, num_bins: int) -> dict[str, Tensor]:
    """Sums the errors of confidence logits against overlaps.

    Args:
        logits: Confidence logits, any shape.
        overlap: 1 - L1 / 2 in [0, 1], same shape.
        mask: Same shape, True = counts; None counts all.
        num_bins: B, bins of equal width over the predicted probability.

    Returns:
        Scalars `absolute`, `squared`, `cross_entropy`, and [B] `bin_confidence`, `bin_overlap`, `bin_count`.
    """
    keep = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask.bool()
    logit, truth = logits.detach()[keep].double(), overlap.detach()[keep].double()
    confidence = logit.sigmoid()
    bins = (confidence * num_bins).long().clamp(0, num_bins - 1)
    zeros = torch.zeros(num_bins, dtype=torch.float64, device=logit.device)
    return {
        "absolute": (confidence - truth).abs().sum(),
        "squared": (confidence - truth).square().sum(),
        "cross_entropy": binary_cross_entropy_with_logits(logit, truth, reduction="sum"),
        "bin_confidence": zeros.index_add(0, bins, confidence),
        "bin_overlap": zeros.index_add(0, bins, truth),
        "bin_count": torch.bincount(bins, minlength=num_bins),
    }


class ConfidenceError(Metric):
    """Mean absolute error, Brier score, cross-entropy (nats) and expected calibration error of the confidence head.

    The calibration error is the mean over bins, weighted by their counts, of |mean prediction - mean overlap|.

    Args:
        num_bins: Bins of the calibration error.

    >>> metric = ConfidenceError()
    >>> metric.update(torch.tensor([0.0, 0.0]), torch.tensor([0.7, 0.4]))
    >>> {name: round(float(value), 4) for name, value in metric.compute().items()}
    {'mean_absolute_error': 0.15, 'brier': 0.025, 'cross_entropy': 0.6931, 'calibration_error': 0.05}
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    absolute: Tensor
    squared: Tensor
    cross_entropy: Tensor
    bin_confidence: Tensor
    bin_overlap: Tensor
    bin_count: Tensor

    def __init__(self, num_bins: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_bins = num_bins
        for name in ("absolute", "squared", "cross_entropy"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("bin_confidence", "bin_overlap"):
            self.add_state(name, torch.zeros(num_bins, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("bin_count", torch.zeros(num_bins, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, overlap: Tensor, mask: Tensor | None = None) -> None:
        """Adds predictions; see `confidence_sums`."""
        for name, value in confidence_sums(logits, overlap, mask, self.num_bins).items():
            setattr(self, name, getattr(self, name) + value)

    def compute(self) -> dict[str, Tensor]:
        """Returns the four errors as float64 scalars, nan without data."""
        count = self.bin_count.sum()
        return {
            "mean_absolute_error": ratio(self.absolute, count),
            "brier": ratio(self.squared, count),
            "cross_entropy": ratio(self.cross_entropy, count),
            "calibration_error": ratio((self.bin_confidence - self.bin_overlap).abs().sum(), count),
        }

    def reliability(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns mean prediction, mean overlap and count of each bin, [B] each; nan in empty bins."""
        mean_confidence = ratio(self.bin_confidence, self.bin_count)
        return mean_confidence, ratio(self.bin_overlap, self.bin_count), self.bin_count
