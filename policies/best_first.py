"""Best first: the N nodes of largest calibrated path mass, and fewer where a further node promises too little."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from treespark.cost import CostModel
from treespark.policies.budgeted import Budgeted
from treespark.tree import CandidateTree, Proposer


class BestFirst(Budgeted):
    """The N best nodes under the product of calibrated edge probabilities σ(a · logit p + b), down to a threshold θ.

    A node's path mass is the chance that verification reaches it, so it is what packing the node adds to the expected
    number of accepted tokens: nodes below θ are left out, and a row that is unsure of itself packs a smaller tree.
    Path mass falls along a path, so going through the depths with the N best nodes so far finds the same nodes as
    taking the best one at a time, in one call for each depth.

    Instead of θ, a cost profile can say where to stop: a row keeps the size whose expected tokens per second are the
    most, so a node is added while its mass exceeds its share of a round's cost times the expected tokens, the present
    rate tau / t. The more rows decode side by side, the more a node costs, and the smaller the trees.

    With a = 1, b = 0, θ = 0 and a frontier width it is `Budgeted`; with k = 1 and N = the number of depths it is
    `Chain`. `fit_edges` finds a and b.

    Args:
        k: Children per parent.
        num_draft_nodes: N, the most nodes that are packed and verified, root excluded.
        frontier_width: The most parents that are expanded per depth; None expands whatever can still be packed.
        a: Slope of the calibration, above 0.
        b: Intercept of the calibration.
        theta: θ, the smallest path mass of a packed node, from 0 to below 1.
        cost: File of a cost profile (`treespark bench --profile`), which takes the place of θ. Masses are expected
            tokens only where a and b are fitted. Training and simulated rounds take the costs of a single request.

    Raises:
        ValueError: For an option out of range.
        FileNotFoundError: When there is no cost profile at that place (from `check`).
    """

    def __init__(
        self,
        k: int = 4,
        num_draft_nodes: int = 32,
        frontier_width: int | None = None,
        a: float = 1.0,
        b: float = 0.0,
        theta: float = 0.0,
        cost: str | None = None,
    ) -> None:
        super().__init__(k, num_draft_nodes, frontier_width)
        self.a, self.b, self.theta, self.cost = a, b, theta, cost
        if not (0 < a < math.inf and math.isfinite(b)):
            raise ValueError(f"BestFirst needs a > 0 and a finite b, got a = {a}, b = {b}.")
        if not 0 <= theta < 1:
            raise ValueError(f"BestFirst needs 0 <= theta < 1, got {theta}.")
        if theta and cost:
            raise ValueError(f"BestFirst stops at theta = {theta} or by the cost profile '{cost}': give one of them.")
        self._adapts = theta > 0 or cost is not None or frontier_width is None
        self._costs: CostModel | None = None
        self._seconds: dict[tuple[int, torch.device], Tensor] = {}
        self._least = math.log(theta) if theta else -math.inf

    def check(self, depths: int, vocab_size: int) -> None:
        """Checks the options as `Budgeted` does, and reads the cost profile.

        Raises:
            ValueError: When an option is out of range, or the file is no cost profile.
            FileNotFoundError: When there is no such file.
        """
        super().check(depths, vocab_size)
        self._read_costs()

    def build(self, proposer: Proposer, *, generator: torch.Generator | None = None) -> CandidateTree:
        """Builds the tree depth by depth, and with a cost profile cuts each row's to the size that pays."""
        tree = super().build(proposer, generator=generator)
        costs = self._read_costs()
        return tree if costs is None else self._cut(tree, costs, getattr(proposer, "num_requests", 1))

    def _read_costs(self) -> CostModel | None:
        if self.cost is not None and self._costs is None:
            self._costs = CostModel.load(self.cost)
        return self._costs

    def _cut(self, tree: CandidateTree, costs: CostModel, requests: int) -> CandidateTree:
        """Keeps each row's first nodes in the order of packing, as many as give the most tokens per second."""
        scores, most = tree.scores.detach(), min(self.num_draft_nodes, tree.scores.shape[1] - 1)
        device = scores.device
        if (requests, device) not in self._seconds:
            sizes = range(self.num_draft_nodes + 1)
            seconds = [costs.round_seconds(requests, size) for size in sizes]
            self._seconds[requests, device] = torch.tensor(seconds, dtype=torch.float64, device=device)
        ranked = scores[:, 1:].sort(dim=1, descending=True, stable=True)
        masses = ranked.values[:, :most].double().exp().nan_to_num(0.0)
        expected = 1 + torch.cat([torch.zeros_like(masses[:, :1]), masses.cumsum(1)], 1)  # [M, most + 1] tokens
        best = (expected / self._seconds[requests, device][: most + 1]).argmax(
            1, keepdim=True
        )  # ties: the smaller tree
        kept = torch.arange(scores.shape[1] - 1, device=device) < best
        kept = torch.zeros_like(tree.exists).scatter_(1, ranked.indices + 1, kept)
        kept[:, 0] = True
        return dataclasses.replace(tree, scores=tree.scores.masked_fill(~kept, -torch.inf), exists=tree.exists & kept)

    def frontier_limits(self, depths: int) -> list[int]:
        """Returns the most parents that are expanded into each depth: no more than N can matter."""
        widths = [1]
        while len(widths) < depths:
            widths.append(min(self.frontier_width or self.num_draft_nodes, widths[-1] * self.k))
        return widths

    def expanded_per_depth(self, depths: int) -> list[int] | None:
        """Returns None, since rows differ; with a frontier width and θ = 0 what `Budgeted` returns."""
        return None if self._adapts else self.frontier_limits(depths)

    def frontier_size(self, scores: Tensor, limit: int) -> int:
        """Returns the number of candidates that the row with most of them still expands."""
        # On an accelerator reading the number back would cost more than the padding does.
        if not self._adapts or scores.device.type != "cpu":
            return min(limit, scores.shape[1])
        return min(limit, int(torch.isfinite(scores).sum(1).max()))

    def edge_scores(self, log_probs: Tensor) -> Tensor:
        """Returns log σ(a · logit p + b)."""
        if self.a == 1 and self.b == 0:
            return log_probs
        return F.logsigmoid(self.a * log_odds(log_probs) + self.b)

    def prune(self, scores: Tensor, former: list[Tensor]) -> Tensor:
        """Leaves out what lies below θ or, where parents are not limited, below the N best candidates so far."""
        if self.theta:
            scores = scores.masked_fill(scores < self._least, -torch.inf)
        if self.frontier_width is None:
            pool = torch.cat([*(level.to(scores.dtype) for level in former[1:]), scores], 1)
            if pool.shape[1] > self.num_draft_nodes:
                last = pool.topk(self.num_draft_nodes, dim=1).values[:, -1:]
                scores = scores.masked_fill(scores < last, -torch.inf)
        return scores


def log_odds(log_probs: Tensor) -> Tensor:
    """Returns log p - log(1 - p); infinite for p = 1 and for p = 0."""
    return log_probs - torch.log(-torch.expm1(log_probs))


def fit_edges(log_probs: Tensor, accepted: Tensor, *, prior: float = 1.0) -> tuple[float, float]:
    """Fits the calibration of `BestFirst` on edges that verification has judged.

    Penalised logistic regression of the verdict on the log-odds of the draft's probability, in float64; the penalty
    pulls towards a = 1, b = 0, so that few or separable edges stay finite.

    Args:
        log_probs: [n] log-probability of each edge whose parent was accepted (or is the root).
        accepted: [n] True where the edge's child was accepted too.
        prior: Weight of the penalty, in edges.

    Returns:
        (a, b).

    Raises:
        ValueError: Without edges, for tensors of different shapes, or when likelier edges are accepted less often.
    """
    if log_probs.shape != accepted.shape or log_probs.dim() != 1 or len(log_probs) == 0:
        raise ValueError(
            f"Expected log-probabilities and verdicts of n >= 1 edges, got shapes {list(log_probs.shape)} and "
            f"{list(accepted.shape)}."
        )
    odds = log_odds(log_probs.double().clamp(max=0)).clamp(-30, 30)
    usable = ~odds.isnan()
    inputs = torch.stack([odds[usable], torch.ones_like(odds[usable])], 1)  # [n, 2]
    labels, identity = accepted[usable].double(), torch.tensor([1.0, 0.0], dtype=torch.float64, device=odds.device)

    def loss(at: Tensor) -> Tensor:
        fit = F.binary_cross_entropy_with_logits(inputs @ at, labels, reduction="sum")
        return fit + prior / 2 * (at - identity).square().sum()

    found, eye = identity.clone(), torch.eye(2, dtype=torch.float64, device=odds.device)
    for _ in range(50):
        probs = torch.sigmoid(inputs @ found)
        gradient = inputs.T @ (probs - labels) + prior * (found - identity)
        curvature = (inputs.T * (probs * (1 - probs))) @ inputs + prior * eye
        step = torch.linalg.solve(curvature, gradient)
        # The loss is convex; halving keeps Newton's first steps from overshooting.
        while loss(found - step) > loss(found) and step.abs().max() > 1e-12:
            step = step / 2
        found = found - step
        if step.abs().max() < 1e-10:
            break
    a, b = found.tolist()
    if a <= 0:
        raise ValueError(
            f"The fitted slope is {a:.3g}: edges that the drafter holds for likelier were accepted less often. Use "
            "edges of the same drafter and target."
        )
    return a, b
