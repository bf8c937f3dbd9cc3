"""Everything that a validation measures, in one collection.

Shapes: F figures of the losses, M anchors of a chunk, K depths, N packed nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from treespark.blocks import DraftBlocks
from treespark.metrics.acceptance import AcceptanceByPosition, AcceptanceLength, MeanAccepted
from treespark.metrics.confidence import ConfidenceError
from treespark.metrics.packed_tree import ArgmaxSurvival, PackedNodesByDepth, PackedTreeCoverage
from treespark.metrics.ratio import Ratio


class WeightedRatio(Ratio):
    """A `Ratio` whose denominators are weights instead of counts.

    Args:
        size: Length of the result, or None for a scalar.

    >>> metric = WeightedRatio()
    >>> metric.update(torch.tensor(1.0), torch.tensor(0.5))
    >>> metric.update(torch.tensor(2.0), torch.tensor(1.0))
    >>> metric.compute()
    tensor(2., dtype=torch.float64)
    """

    def __init__(self, size: int | None = None) -> None:
        super().__init__(size)
        self.add_state("denominator", torch.zeros_like(self.numerator), dist_reduce_fx="sum")

    def update(self, numerator: Tensor, denominator: Tensor) -> None:
        """Adds to both sums (same shape as the result)."""
        self.add(numerator, denominator)


class ValidationMetrics(nn.Module):
    """Losses, packed-tree diagnostics, confidence error and simulated acceptance of one validation pass.

    Args:
        depths: K.
        figures: Names of the F figures of the losses: their values and what they report besides.
        has_confidence: Whether the drafter has a confidence head.
    """

    def __init__(self, depths: int, figures: Sequence[str], has_confidence: bool) -> None:
        super().__init__()
        self.depths, self.figures = depths, list(figures)
        self.num_simulated = 0
        self.losses = WeightedRatio(len(self.figures))
        self.edge_loss = WeightedRatio()
        self.coverage = PackedTreeCoverage(depths)
        self.argmax_survival = ArgmaxSurvival(depths)
        self.packed_nodes = PackedNodesByDepth(depths)
        self.confidence = ConfidenceError() if has_confidence else None
        self.tau = AcceptanceLength()
        self.mean_accepted = MeanAccepted()
        self.acceptance = AcceptanceByPosition(depths)

    def visit(self, blocks: DraftBlocks) -> None:
        """Adds a chunk of anchors."""
        packed, valid = blocks.replay.packed, blocks.labels.valid
        self.coverage.update(packed, blocks.path_mass, valid)
        self.argmax_survival.update(packed, blocks.target_logits.argmax(-1), valid)
        self.packed_nodes.update(packed, valid)
        mass = torch.where(blocks.retained, blocks.path_mass, 0.0).double()
        self.edge_loss.update(-(mass * blocks.replay.edge_log_probs()).sum(), mass.sum())
        if self.confidence is not None:
            logits = blocks.proposer.confidence_logits(blocks.reference_parents)
            self.confidence.update(logits, 1.0 - 0.5 * blocks.l1, valid)

    def add_losses(self, sums: Tensor, weights: Tensor) -> None:
        """Adds numerators and denominators [F]."""
        self.losses.update(sums, weights)

    def add_rounds(self, rounds: Iterable[Iterable[tuple[int, int, bool]]]) -> None:
        """Adds the simulated rounds of some requests, each (num_accepted, committed, has_bonus)."""
        rounds = [list(request) for request in rounds]
        self.num_simulated += len(rounds)
        table = torch.tensor([item[:2] for item in itertools.chain(*rounds)], dtype=torch.long).view(-1, 2)
        for metric in (self.tau, self.mean_accepted, self.acceptance):
            metric.update(table[:, 0], table[:, 1])

    def reset(self) -> None:
        """Starts anew."""
        self.num_simulated = 0
        for metric in self.children():
            assert isinstance(metric, Metric)
            metric.reset()

    def compute(self) -> dict[str, Tensor]:
        """Returns every figure by its name, without the stage; figures without data are left out."""
        found: dict[str, Tensor] = dict(zip(self.figures, self.losses.compute(), strict=True))
        found["edge_loss"] = self.edge_loss.compute()
        for name, metric in (
            ("coverage", self.coverage),
            ("argmax_survival", self.argmax_survival),
            ("packed_nodes", self.packed_nodes),
        ):
            found |= {f"{name}/depth_{depth}": value for depth, value in enumerate(metric.compute(), start=1)}
        found["coverage/total"] = self.coverage.compute().nansum()
        if self.confidence is not None:
            found |= {f"confidence/{name}": value for name, value in self.confidence.compute().items()}
        found["tau"] = self.tau.compute()
        found["mean_accepted"] = self.mean_accepted.compute()
        by_position = self.acceptance.compute()
        found |= {f"acceptance/position_{d}": value for d, value in enumerate(by_position, start=1)}
        return {name: value for name, value in found.items() if torch.isfinite(value)}
