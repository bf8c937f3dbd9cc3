"""The TreeSpark tree: breadth-limited expansion, then the globally best N nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from treespark.policies.base import TreePolicy
from treespark.tree import CandidateTree, Proposer, gather_rows


class Budgeted(TreePolicy):
    """Top-k children of a frontier of F parents per depth; the N best candidates are packed.

    Source: arXiv 2610.20175 §3.1, A.1. Frontier ties are broken by candidate order.

    Args:
        k: Children per parent.
        num_draft_nodes: N, nodes that are packed and verified, root excluded.
        frontier_width: F, parents expanded per depth; None takes k.

    Raises:
        ValueError: For an option below 1 (when built), or one out of range for a drafter (from `check`).
    """

    def __init__(self, k: int = 4, num_draft_nodes: int = 32, frontier_width: int | None = None) -> None:
        self.k, self.num_draft_nodes, self.frontier_width = k, num_draft_nodes, frontier_width
        for name, value in (("k", k), ("num_draft_nodes", num_draft_nodes), ("frontier_width", frontier_width)):
            if value is not None and value < 1:
                raise ValueError(f"{type(self).__name__} needs {name} >= 1, got {value}.")

    def num_nodes(self, depths: int) -> int:
        """Returns N."""
        return self.num_draft_nodes

    def frontier_limits(self, depths: int) -> list[int]:
        """Returns [1, min(F, k), min(F, ·k), …]: the most parents that are expanded into each depth."""
        widths = [1]
        while len(widths) < depths:
            widths.append(min(self.frontier_width or self.k, widths[-1] * self.k))
        return widths

    def expanded_per_depth(self, depths: int) -> list[int] | None:
        """Returns how many parents are expanded into each depth: always as many as there may be."""
        return self.frontier_limits(depths)

    def frontier_size(self, scores: Tensor, limit: int) -> int:
        """Returns how many of a depth's candidates, with `scores` [M, width], are expanded; 0 ends the tree."""
        return limit

    def edge_scores(self, log_probs: Tensor) -> Tensor:
        """Returns what an edge adds to its parent's score, from the child's log-probability given the path."""
        return log_probs

    def prune(self, scores: Tensor, former: list[Tensor]) -> Tensor:
        """Returns the scores [M, width] of a new depth's candidates, -inf for those to be left out at once.

        Args:
            scores: [M, width], -inf where they are not finite.
            former: Scores [M, ·] of the root and of the depths before.
        """
        return scores

    def check(self, depths: int, vocab_size: int) -> None:
        """Checks k against the vocabulary and N against the number of candidates.

        Raises:
            ValueError: When k exceeds the vocabulary or N exceeds the full pool.
        """
        if self.k > vocab_size:
            raise ValueError(f"{type(self).__name__}: k = {self.k} exceeds the vocabulary of {vocab_size} tokens.")
        pool = self.k * sum(self.frontier_limits(depths))
        if not 1 <= self.num_nodes(depths) <= pool:
            raise ValueError(
                f"{type(self).__name__}: num_draft_nodes = {self.num_nodes(depths)}, but {depths} depths with "
                f"k = {self.k} and at most {max(self.frontier_limits(depths))} parents a depth propose {pool} "
                f"candidates; choose 1 to {pool}."
            )

    def build(self, proposer: Proposer, *, generator: torch.Generator | None = None) -> CandidateTree:
        """Builds the tree depth by depth; see the class."""
        # One level per depth: tokens, parents (as tree indices), log_probs, scores; all [M, width].
        tokens, carry = proposer.root_tokens.unsqueeze(1), proposer.root_carry()
        zeros = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        levels: list[tuple[Tensor, ...]] = [(tokens, torch.zeros_like(tokens), zeros, zeros)]
        expansions: list[Tensor] = []
        start = 0  # tree index of the level's first node
        for depth, limit in enumerate(self.frontier_limits(proposer.depths), start=1):
            tokens, _, _, scores = levels[-1]
            width = self.frontier_size(scores, limit)
            if width == 0:
                break
            best = scores.sort(dim=1, descending=True, stable=True).indices[:, :width].sort(dim=1).values
            expansions.append(best + start)
            start += tokens.shape[1]
            children = proposer.expand(depth, gather_rows(tokens, best), gather_rows(carry, best), self.k)
            log_probs = children.log_probs.clamp(max=0.0)
            pool = gather_rows(scores, best).unsqueeze(-1) + self.edge_scores(log_probs)
            pool = torch.where(torch.isfinite(pool), pool, -torch.inf)
            level = (children.tokens, expansions[-1].unsqueeze(-1).expand_as(pool), log_probs)
            scores = self.prune(pool.flatten(1), [former[3] for former in levels])
            levels.append((*(part.flatten(1) for part in level), scores))
            carry = children.carry.repeat_interleave(self.k, dim=1)
        columns = zip(*levels, strict=True)
        token, parent, log_prob, score = (
            torch.cat([part.to(parts[-1].dtype) for part in parts], 1) for parts in columns
        )
        depths = torch.cat([token.new_full(level[0].shape[1:], depth) for depth, level in enumerate(levels)])
        exists = torch.isfinite(score)
        return CandidateTree(
            tokens=token,
            parents=parent,
            depths=depths.expand(len(token), -1),
            log_probs=log_prob,
            scores=score,
            exists=exists,
            expansions=torch.cat(expansions, 1),
            num_draft_nodes=self.num_nodes(proposer.depths),
        )
