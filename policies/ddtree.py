"""DDTree: the best N paths of the depths' own distributions, which know nothing of the path."""

from __future__ import annotations

import torch
from torch import Tensor

from treespark.policies.base import TreePolicy
from treespark.tree import CandidateTree, Proposer, gather_rows


class DDTree(TreePolicy):
    """The N likeliest nodes when every depth is drawn from its marginal distribution, whatever its parent is.

    Nothing is expanded: one call for the marginals gives the whole tree. For a drafter whose depths do not depend on
    the parent (no Markov head) it is `Budgeted` with k children and a frontier of N, and with k = 1 and N = K it is
    `Chain`. Ties are broken by the parent's order, then by the token's.

    Source: arXiv 2604.12989.

    Args:
        num_draft_nodes: N, nodes that are packed and verified, root excluded.
        k: Most children of a node; None does not limit them.

    Raises:
        ValueError: For an option below 1 (when built), or one out of range for a drafter (from `check`).
    """

    def __init__(self, num_draft_nodes: int = 32, k: int | None = None) -> None:
        self.num_draft_nodes, self.k = num_draft_nodes, k
        for name, value in (("num_draft_nodes", num_draft_nodes), ("k", k)):
            if value is not None and value < 1:
                raise ValueError(f"DDTree needs {name} >= 1, got {value}.")

    def num_nodes(self, depths: int) -> int:
        """Returns N."""
        return self.num_draft_nodes

    def expanded_per_depth(self, depths: int) -> list[int]:
        """Returns [1, 1, …]: each depth has one distribution, which all its parents share."""
        return [1] * depths

    def check(self, depths: int, vocab_size: int) -> None:
        """Checks k against the vocabulary and N against the number of paths.

        Raises:
            ValueError: When k exceeds the vocabulary or N exceeds the number of nodes of the full tree.
        """
        if self.k is not None and self.k > vocab_size:
            raise ValueError(f"DDTree: k = {self.k} exceeds the vocabulary of {vocab_size} tokens.")
        children = self.k or vocab_size
        full = sum(children**depth for depth in range(1, depths + 1))
        if self.num_draft_nodes > full:
            raise ValueError(
                f"DDTree: num_draft_nodes = {self.num_draft_nodes}, but {depths} depths of {children} children make "
                f"{full} nodes; choose 1 to {full}."
            )

    def build(self, proposer: Proposer, *, generator: torch.Generator | None = None) -> CandidateTree:
        """Builds the tree depth by depth: the N best nodes of a depth come from the N best of the depth before."""
        budget = self.num_draft_nodes
        k = min(self.k or budget, budget, proposer.vocab_size)
        choices, choice_log_probs = proposer.marginals(k)  # [M, K, k], best first
        choice_log_probs = choice_log_probs.clamp(max=0.0)
        roots = proposer.root_tokens.unsqueeze(1)
        score = torch.zeros(roots.shape, dtype=choice_log_probs.dtype, device=roots.device)
        levels: list[tuple[Tensor, ...]] = [(roots, torch.zeros_like(roots), score, score)]
        start = 0  # tree index of the former level's first node
        for depth in range(proposer.depths):
            width = score.shape[1]
            # Parents stand best first, and so do children: at least (i + 1)(j + 1) - 1 candidates come before child j
            # of parent i, so the others need not be looked at.
            places = torch.arange(width, device=roots.device)
            children = (budget // (places + 1)).clamp(max=k)  # of each parent
            num_pairs = sum(min(k, budget // (i + 1)) for i in range(width))
            # `output_size` is known here: nothing has to be read back.
            parent = places.repeat_interleave(children, output_size=num_pairs)
            before = (children.cumsum(0) - children).repeat_interleave(children, output_size=num_pairs)
            child = torch.arange(num_pairs, device=roots.device) - before
            log_prob = choice_log_probs[:, depth, child]  # [M, pairs]
            pool = score[:, parent] + log_prob
            pool = torch.where(torch.isfinite(pool), pool, -torch.inf)
            order = pool.sort(dim=1, descending=True, stable=True).indices[:, :budget]
            score = gather_rows(pool, order)
            levels.append(
                (choices[:, depth].gather(1, child[order]), start + parent[order], gather_rows(log_prob, order), score)
            )
            start += width
        token, parents, log_probs, scores = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
        depths = torch.cat([token.new_full(level[0].shape[1:], depth) for depth, level in enumerate(levels)])
        return CandidateTree(
            tokens=token,
            parents=parents,
            depths=depths.expand(len(token), -1),
            log_probs=log_probs,
            scores=scores,
            exists=torch.isfinite(scores),
            expansions=parents[:, :0],
            num_draft_nodes=budget,
        )
