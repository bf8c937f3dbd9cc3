"""Errors of the confidence head against numpy-free arithmetic, and a calibrated head."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from treespark.metrics import ConfidenceError


def test_by_hand() -> None:
    """Two predictions of one half (logit 0) for 0.7 and 0.4.

    Errors 0.2 and 0.1: mean absolute 0.15, Brier (0.04 + 0.01) / 2 = 0.025, cross-entropy log 2 for any truth, and one
    bin with mean prediction 0.5 and mean overlap 0.55: calibration error 0.05. The third is masked out.
    """
    metric = ConfidenceError()
    metric.update(torch.tensor([0.0, 0.0, 9.0]), torch.tensor([0.7, 0.4, 0.0]), torch.tensor([True, True, False]))
    found = {name: float(value) for name, value in metric.compute().items()}
    expected = {
        "mean_absolute_error": 0.15,
        "brier": 0.025,
        "cross_entropy": math.log(2),
        "calibration_error": 0.05,
    }
    assert found == pytest.approx(expected, abs=1e-7)


def test_a_head_that_tells_the_truth() -> None:
    """Predicting the overlap itself leaves no error but the truth's own entropy."""
    truth = torch.linspace(0.05, 0.95, 37, dtype=torch.float64)
    metric = ConfidenceError()
    metric.update(truth.logit(), truth)
    found = metric.compute()
    assert float(found["mean_absolute_error"]) < 1e-12 and float(found["calibration_error"]) < 1e-12
    entropy = -(truth * truth.log() + (1 - truth) * (1 - truth).log()).mean()
    torch.testing.assert_close(found["cross_entropy"], entropy)


def test_updates_pool_and_pickle() -> None:
    """Unequal parts give the figures of the whole; extreme logits land in the outer bins."""
    generator = torch.Generator().manual_seed(0)
    logits, truth = 40 * torch.randn(50, generator=generator), torch.rand(50, generator=generator)
    whole, parts = ConfidenceError(num_bins=5), ConfidenceError(num_bins=5)
    whole.update(logits, truth)
    for chunk in (slice(0, 3), slice(3, 3), slice(3, 50)):
        parts.update(logits[chunk], truth[chunk])
    copy = pickle.loads(pickle.dumps(parts))
    for name, value in whole.compute().items():
        torch.testing.assert_close(copy.compute()[name], value)
    mean_confidence, _, counts = copy.reliability()
    assert int(counts.sum()) == 50 and float(mean_confidence[-1]) > 0.8


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_no_data_is_nan() -> None:
    assert all(torch.isnan(value) for value in ConfidenceError().compute().values())
