"""Acceptance metrics against plain Python counting."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treespark.metrics import AcceptanceByPosition, AcceptanceLength, ConditionalAcceptance, MeanAccepted

DEPTHS = 4
METRICS = {
    "tau": AcceptanceLength,
    "mean_accepted": MeanAccepted,
    "by_position": lambda: AcceptanceByPosition(DEPTHS),
    "conditional": lambda: ConditionalAcceptance(DEPTHS),
}

# (num_accepted, has_bonus) of the rounds of several updates.
batches = st.lists(st.lists(st.tuples(st.integers(0, DEPTHS), st.booleans()), max_size=6), max_size=4)


def as_tensors(batch: list[tuple[int, bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    accepted = torch.tensor([a for a, _ in batch], dtype=torch.long)
    return accepted, accepted + torch.tensor([b for _, b in batch], dtype=torch.long)


@given(batches=batches)
def test_pooled_over_all_rounds(batches: list[list[tuple[int, bool]]]) -> None:
    """Every figure is a ratio of sums over all rounds, whatever batches they came in; nan without a round."""
    metrics = {name: make() for name, make in METRICS.items()}
    for batch in batches:
        for metric in metrics.values():
            metric.update(*as_tensors(batch))
    rounds = [item for batch in batches for item in batch]

    def share(part: int | float, whole: int) -> float:
        return part / whole if whole else math.nan

    expected = {
        "tau": share(sum(a + b for a, b in rounds), len(rounds)),
        "mean_accepted": share(sum(a for a, _ in rounds), len(rounds)),
        "by_position": [share(sum(a >= d for a, _ in rounds), len(rounds)) for d in range(1, DEPTHS + 1)],
        "conditional": [
            share(sum(a >= d for a, _ in rounds), sum(a >= d - 1 for a, _ in rounds)) for d in range(1, DEPTHS + 1)
        ],
    }
    for name, metric in metrics.items():
        if not batches:
            continue  # torchmetrics warns of a compute before any update; see the next test
        got = metric.compute()
        torch.testing.assert_close(got, torch.tensor(expected[name], dtype=torch.float64), equal_nan=True)
    if rounds:
        torch.testing.assert_close(metrics["by_position"].compute().sum(), metrics["mean_accepted"].compute())


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_no_data_is_nan_and_states_survive_pickling(name: str) -> None:
    metric = METRICS[name]()
    assert torch.isnan(metric.compute()).all()
    metric.reset()
    metric.update(torch.tensor([3, 1]), torch.tensor([4, 1]))
    copy = pickle.loads(pickle.dumps(metric))
    torch.testing.assert_close(copy.compute(), metric.compute(), equal_nan=True)
    copy.reset()
    assert torch.isnan(copy.compute()).all()


def test_counts_are_exact_beyond_float32() -> None:
    """2^24 + 1 rounds of 1 token: float32 sums would stop at 2^24 and give another ratio."""
    metric = AcceptanceLength()
    metric.numerator = torch.tensor(2.0**24, dtype=torch.float64)
    metric.denominator = torch.tensor(2**24)
    metric.update(torch.tensor([0]), torch.tensor([1]))
    assert metric.compute() == 1.0 and int(metric.denominator) == 2**24 + 1


def test_states_stay_double_in_a_half_precision_module() -> None:
    metric = AcceptanceLength().to(torch.bfloat16)
    metric.update(torch.tensor([1]), torch.tensor([2]))
    assert metric.compute().dtype == torch.float64
