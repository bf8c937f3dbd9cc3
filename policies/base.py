"""What a tree policy is: one object that builds the draft tree, in training replay and in decoding alike."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from treespark.registry import Registered
from treespark.tree import CandidateTree, Proposer


class TreePolicy(Registered, ABC, kind="policy"):
    """Decides which nodes a draft tree proposes and how they are ranked for packing.

    A new policy is one subclass with `build` and `num_nodes`. Options of `__init__` are kept as attributes of the same
    name, so that the policy is recorded with the drafter that was trained under it.
    """

    @abstractmethod
    def build(self, proposer: Proposer, *, generator: torch.Generator | None = None) -> CandidateTree:
        """Builds the candidate tree of every row of `proposer`.

        Args:
            proposer: The drafter's distributions for M rows.
            generator: Source of randomness for policies that draw.

        Returns:
            A tree whose rows are independent of each other.
        """

    @abstractmethod
    def num_nodes(self, depths: int) -> int:
        """Returns N, the most nodes that are packed (root excluded) when `depths` depths can be drafted."""

    def expanded_per_depth(self, depths: int) -> list[int] | None:
        """Returns how many parents are expanded into depth 1, 2, …, `depths` where that is fixed, else None."""
        return None

    def check(self, depths: int, vocab_size: int) -> None:
        """Checks the options against a drafter's depths and vocabulary.

        Raises:
            ValueError: When an option is out of range, with the allowed range.
        """
        if self.num_nodes(depths) < 1:
            raise ValueError(f"{type(self).__name__} packs {self.num_nodes(depths)} nodes; at least 1 is needed.")
