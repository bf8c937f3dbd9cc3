"""Fake drafters for a real target: random tables, and drafters that know what the target will write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treespark.selection import top_children
from treespark.target import Target, TargetSpec
from treespark.tree import Expansion


class FakeProposer:
    """Proposes from logits [M, K, V] plus a table [V, V] of corrections by parent."""

    def __init__(self, logits: Tensor, table: Tensor, root_tokens: Tensor) -> None:
        self.base, self.table, self.root_tokens = logits, table, root_tokens
        self.depths, self.vocab_size = logits.shape[1:]

    def prepare(self) -> None:
        """The logits are there."""

    def root_carry(self) -> Tensor:
        return self.base.new_zeros(len(self.base), 1, 0)

    def expand(self, depth: int | Tensor, parents: Tensor, carry: Tensor, k: int) -> Expansion:
        depth = torch.as_tensor(depth).expand_as(parents)
        rows = torch.arange(len(parents)).unsqueeze(1)
        logits = self.base[rows, depth - 1] + self.table[parents]
        tokens, log_probs = top_children(logits, k)
        return Expansion(tokens, log_probs, carry)

    def score(self, depth: int | Tensor, parents: Tensor, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def marginals(self, k: int) -> tuple[Tensor, Tensor]:
        return top_children(self.base, k)


@dataclass
class FakeContext:
    """What was encoded: features [R, S, m*H] and positions [R, S]; -1 where a row of several is not filled."""

    features: Tensor
    positions: Tensor
    rows: int = 1
    length: int = 0

    def spread(self, rows: int) -> FakeContext:
        room = FakeContext(self.features.new_zeros(rows, 256, self.features.shape[2]), torch.full((rows, 256), -1))
        room.put(0, self)
        return room

    def select(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length

    def put(self, row: int, other: FakeContext) -> None:
        self.positions[row] = -1
        self.write(torch.tensor(row), torch.arange(other.positions.shape[1]), 256, other)

    def write(self, rows: Tensor, places: Tensor, end: int, other: FakeContext) -> None:
        assert int(places.max()) < end <= 256
        self.features[rows, places], self.positions[rows, places] = other.features[0], other.positions[0]

    def copy_row(self, source: int, destination: int, length: int) -> None:
        self.positions[destination] = -1
        for held in (self.features, self.positions):
            held[destination, :length] = held[source, :length]


class FakeDrafter:
    """Drafts by position: at an anchor's position t, depth d has the logits of place t + d.

    It checks on the way that its context holds exactly the features that it is owed, each position once and in order.

    Args:
        logits: [places, V] logits by place.
        table: [V, V] corrections by parent; None adds nothing.
    """

    def __init__(
        self, target: Target, logits: Tensor, depths: int = 4, table: Tensor | None = None, recorded: Any = None
    ) -> None:
        self.spec: TargetSpec = target.spec
        self.block_size, self.layer_ids, self.recorded_policy = depths, (0, 1), recorded
        self.places = logits
        self.table = torch.zeros(logits.shape[1], logits.shape[1]) if table is None else table
        self.is_bound = True
        self.anchors: list[int] = []

    def encode(self, features: Tensor, positions: Tensor, context: FakeContext | None = None) -> FakeContext:
        assert features.shape[:2] == positions.shape
        if context is None:
            return FakeContext(features, positions)
        return FakeContext(torch.cat([context.features, features], 1), torch.cat([context.positions, positions], 1))

    def draft(self, context: FakeContext, tokens: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        rows = len(tokens)
        held = context.positions
        if context.length:
            assert context.rows == rows
            held = held[:rows, : context.length]
        if mask is None:
            mask = torch.ones(rows, 1, held.shape[1], dtype=torch.bool)
        assert tokens.shape == positions.shape == (rows, 1)
        assert mask.shape == (rows, 1, held.shape[1])
        for row in range(rows):
            t = int(positions[row])
            assert held[row][mask[row, 0]].tolist() == list(range(t))
            self.anchors.append(t)
        return positions.unsqueeze(-1).unsqueeze(-1).expand(rows, 1, self.block_size, 1).double()

    def propose(self, hidden: Tensor, root_tokens: Tensor) -> FakeProposer:
        place = hidden[:, :, 0].long() + torch.arange(1, self.block_size + 1)
        return FakeProposer(self.places[place.clamp(max=len(self.places) - 1)], self.table, root_tokens)


def random_drafter(target: Target, seed: int, depths: int = 4, places: int = 128, **options: Any) -> FakeDrafter:
    """Returns a drafter with random logits by place and random corrections by parent."""
    generator = torch.Generator().manual_seed(seed)
    vocab = target.spec.vocab_size
    logits = 2 * torch.randn(places, vocab, generator=generator, dtype=torch.float64)
    table = torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
    return FakeDrafter(target, logits, depths, table, **options)


def knowing_drafter(
    target: Target, text: list[int], agree: str, seed: int = 0, depths: int = 4, places: int = 128, **options: Any
) -> FakeDrafter:
    """Returns a drafter that knows the text and always, never or sometimes proposes its tokens.

    "sometimes" leaves the text's token among the drafter's first few at some places and drops it at others.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(places, target.spec.vocab_size, generator=generator, dtype=torch.float64)
    for place, token in enumerate(text[:places]):
        if agree == "always":
            logits[place, token] = 20.0
        elif agree == "never":
            logits[place, token] = -torch.inf
        else:
            logits[place, token] = float(logits[place].max()) + float(torch.randn((), generator=generator))
    return FakeDrafter(target, logits, depths, **options)
