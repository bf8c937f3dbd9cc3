"""The chain that DSpark decodes with."""

from __future__ import annotations

from treespark.policies.budgeted import Budgeted


class Chain(Budgeted):
    """The greedy chain: one child per depth, all of them packed.

    The same code as `Budgeted` with k = F = 1 and N = the number of depths. Source: arXiv 2607.05147.
    """

    def __init__(self) -> None:
        super().__init__(k=1, num_draft_nodes=1)

    def num_nodes(self, depths: int) -> int:
        """Returns the number of depths: the whole chain is packed."""
        return depths
