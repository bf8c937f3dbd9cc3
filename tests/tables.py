"""A drafter's proposer read from a table of logits, for tests without a network."""

from __future__ import annotations

import torch
from torch import Tensor

from treespark.blocks import DraftBlocks, Labels
from treespark.policies import TreePolicy
from treespark.selection import at_least_float32, top_children
from treespark.tree import Expansion


class TableProposer:
    """Logits [M, K, V, V]: row m, depth d, parent token y -> logits of the child."""

    def __init__(self, table: Tensor, root_tokens: Tensor, confidence: Tensor | None = None) -> None:
        self.table, self.root_tokens, self.confidence = table, root_tokens, confidence
        self.depths, self.vocab_size = table.shape[1], table.shape[-1]

    def root_carry(self) -> Tensor:
        return self.table.new_zeros(len(self.root_tokens), 1, 0)

    def logits(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(parents)).unsqueeze(1)
        return self.table[rows, torch.as_tensor(depth) - 1, parents], carry

    def expand(self, depth: int | Tensor, parents: Tensor, carry: Tensor, k: int) -> Expansion:
        logits, carry = self.logits(depth, parents, carry)
        return Expansion(*top_children(logits, k), carry)

    def score(self, depth: int | Tensor, parents: Tensor, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits, carry = self.logits(depth, parents, carry)
        return at_least_float32(logits).log_softmax(-1).gather(-1, tokens), carry

    def marginals(self, k: int) -> tuple[Tensor, Tensor]:
        return top_children(self.base_logits, k)

    @property
    def base_logits(self) -> Tensor:
        return self.table.mean(2)

    def path_logits(self, tokens: Tensor) -> Tensor:
        rows, depths = torch.arange(len(tokens)).unsqueeze(1), torch.arange(self.depths)
        return self.table[rows, depths, tokens]

    def confidence_logits(self, tokens: Tensor, detach: bool = False) -> Tensor:
        assert self.confidence is not None
        return self.confidence[:, : tokens.shape[1]] + 0.0 * self.path_logits(tokens)[..., 0]


def random_proposer(seed: int, rows: int = 3, depths: int = 4, vocab: int = 8, scale: float = 1.5) -> TableProposer:
    """Returns a proposer with random float64 logits."""
    generator = torch.Generator().manual_seed(seed)
    table = scale * torch.randn(rows, depths, vocab, vocab, generator=generator, dtype=torch.float64)
    confidence = torch.randn(rows, depths, generator=generator, dtype=torch.float64)
    return TableProposer(table, torch.randint(vocab, (rows,), generator=generator), confidence)


def random_blocks(policy: TreePolicy, seed: int = 0, proposer: TableProposer | None = None) -> DraftBlocks:
    """Returns blocks over a random table, with random labels, valid spans of every length and a random target."""
    proposer = proposer or random_proposer(seed)
    rows, depths, vocab = len(proposer.root_tokens), proposer.depths, proposer.vocab_size
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(vocab, (rows, depths), generator=generator)
    spans = 1 + torch.arange(rows) % depths
    valid = torch.arange(depths) < spans.unsqueeze(1)
    labels = Labels(proposer.root_tokens, tokens, valid, policy.expanded_per_depth(depths))
    target = 1.5 * torch.randn(rows, depths, vocab, generator=generator, dtype=torch.float64)
    return DraftBlocks(labels, proposer, target, lambda hidden: hidden, policy)
