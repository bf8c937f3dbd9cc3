"""Losses of the training objective. A new one is one file with one subclass of `LossTerm`."""

if __name__ != "treespark.losses":
    raise ImportError("Import this package as treespark.losses.")

from treespark.losses.base import DepthWeighted, LossTerm, WeightedSum
from treespark.losses.confidence import Confidence
from treespark.losses.coverage import Coverage
from treespark.losses.cross_entropy import CrossEntropy
from treespark.losses.l1 import L1
from treespark.losses.retention import Retention
from treespark.losses.survival import Survival

__all__ = [
    "L1",
    "Confidence",
    "Coverage",
    "CrossEntropy",
    "DepthWeighted",
    "LossTerm",
    "Retention",
    "Survival",
    "WeightedSum",
]
