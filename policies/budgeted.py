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

    def expanded_per_depth(self, depths: int) -> list[int]:
        """Returns [1, min(F, k), min(F, ·k), …]: parents expanded into each depth."""
        widths = [1]
        while len(widths) < depths:
            widths.append(min(self.frontier_width or self.k, widths[-1] * self.k))
        return widths

    def check(self, depths: int, vocab_size: int) -> None:
        """Checks k against the vocabulary and N against the number of candidates.

        Raises:
            ValueError: When k exceeds the vocabulary or N exceeds the full pool.
        """
        if self.k > vocab_size:
            raise ValueError(f"{type(self).__name__}: k = {self.k} exceeds the vocabulary of {vocab_size} tokens.")
        pool = self.k * sum(self.expanded_per_depth(depths))
        if not 1 <= self.num_nodes(depths) <= pool:
            raise ValueError(
                f"{type(self).__name__}: num_draft_nodes = {self.num_nodes(depths)}, but {depths} depths with "
                f"k = {self.k} and frontier_width = {self.frontier_width or self.k} propose {pool} candidates; "
                f"choose 1 to {pool}."
            )

    def build(self, proposer: Proposer, *, generator: torch.Generator | None = None) -> CandidateTree:
        """Builds the tree depth by depth; see the class."""
        # One level per depth: tokens, parents (as tree indices), log_probs, scores; all [M, width].
        tokens, carry = proposer.root_tokens.unsqueeze(1), proposer.root_carry()
        zeros = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        levels: list[tuple[Tensor, ...]] = [(tokens, torch.zeros_like(tokens), zeros, zeros)]
        expansions: list[Tensor] = []
        start = 0  # tree index of the level's first node
        for depth, width in enumerate(self.expanded_per_depth(proposer.depths), start=1):
            tokens, _, _, scores = levels[-1]
            best = scores.sort(dim=1, descending=True, stable=True).indices[:, :width].sort(dim=1).values
            expansions.append(best + start)
            start += tokens.shape[1]
            children = proposer.expand(depth, gather_rows(tokens, best), gather_rows(carry, best), self.k)
            log_probs = children.log_probs.clamp(max=0.0)
            pool = gather_rows(scores, best).unsqueeze(-1) + log_probs
            pool = torch.where(torch.isfinite(pool), pool, -torch.inf)
            level = (children.tokens, expansions[-1].unsqueeze(-1).expand_as(pool), log_probs, pool)
            levels.append(tuple(part.flatten(1) for part in level))
            carry = children.carry.repeat_interleave(self.k, dim=1)
        columns = zip(*levels, strict=True)
        token, parent, log_prob, score = (
            torch.cat([part.to(parts[-1].dtype) for part in parts], 1) for parts in columns
        )
        sizes = torch.tensor([level[0].shape[1] for level in levels], device=token.device)
        depths = torch.arange(len(sizes), device=token.device).repeat_interleave(sizes, output_size=token.shape[1])
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
