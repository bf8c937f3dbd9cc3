"""Tree policies: how a draft tree is built. A new one is one file with one subclass of `TreePolicy`."""

if __name__ != "treespark.policies":
    raise ImportError("Import this package as treespark.policies.")

from treespark.policies.base import TreePolicy
from treespark.policies.best_first import BestFirst, fit_edges
from treespark.policies.budgeted import Budgeted
from treespark.policies.chain import Chain
from treespark.policies.ddtree import DDTree
from treespark.policies.spec import parse

__all__ = ["BestFirst", "Budgeted", "Chain", "DDTree", "TreePolicy", "fit_edges", "parse"]
