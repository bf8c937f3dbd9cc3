"""Metrics with sum states: acceptance, packed-tree diagnostics and the confidence head's error."""

from treespark.metrics.acceptance import AcceptanceByPosition, AcceptanceLength, ConditionalAcceptance, MeanAccepted
from treespark.metrics.confidence import ConfidenceError
from treespark.metrics.packed_tree import (
    ArgmaxSurvival,
    CutScore,
    ExpandedParentsByDepth,
    PackedNodesByDepth,
    PackedTreeCoverage,
    TargetRank,
)
from treespark.metrics.ratio import Ratio
from treespark.metrics.validation import ValidationMetrics, WeightedRatio

__all__ = [
    "AcceptanceByPosition",
    "AcceptanceLength",
    "ArgmaxSurvival",
    "ConditionalAcceptance",
    "ConfidenceError",
    "CutScore",
    "ExpandedParentsByDepth",
    "MeanAccepted",
    "PackedNodesByDepth",
    "PackedTreeCoverage",
    "Ratio",
    "TargetRank",
    "ValidationMetrics",
    "WeightedRatio",
]
