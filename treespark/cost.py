"""What a round costs: seconds of the target and of the drafter, measured on a grid and read between its points."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the JSON layout; raised when a field changes its meaning."""


@dataclass(frozen=True)
class CostModel:
    """Seconds by batch size, by tokens that the target verifies for each request, and by context length.

    Between grid points the cost is linear; above the last one it goes on with the last slope, below the first it stays.

    Attributes:
        batch_sizes: B requests side by side, ascending.
        tokens: n tokens of each request in a forward pass (a root and its nodes; 1 is plain decoding), ascending.
        context_lengths: L positions before them, ascending.
        target: Seconds of the target's pass, [B][n][L].
        draft: Seconds to draft a tree, from the slots to the packed nodes, and to encode what was committed, [B][L].
        settings: What was measured with what.

    Raises:
        ValueError: For grids and tables that do not fit each other.
    """

    batch_sizes: tuple[int, ...]
    tokens: tuple[int, ...]
    context_lengths: tuple[int, ...]
    target: tuple[tuple[tuple[float, ...], ...], ...]
    draft: tuple[tuple[float, ...], ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "tokens", "context_lengths"):
            grid = getattr(self, name)
            if not grid or list(grid) != sorted(set(grid)) or grid[0] < (0 if name == "context_lengths" else 1):
                raise ValueError(f"A cost model needs ascending {name}, got {list(grid)}.")
        counts = [len(self.batch_sizes), len(self.tokens), len(self.context_lengths)]
        fits = len(self.target) == len(self.draft) == counts[0]
        fits = fits and all(len(rows) == counts[1] and all(len(r) == counts[2] for r in rows) for rows in self.target)
        if not fits or any(len(row) != counts[2] for row in self.draft):
            raise ValueError(f"A cost model needs one number for each of {counts} batch sizes, tokens and lengths.")

    @classmethod
    def fit(
        cls,
        batch_sizes: Sequence[int],
        tokens: Sequence[int],
        context_lengths: Sequence[int],
        target: Sequence[Sequence[Sequence[float]]],
        draft: Sequence[Sequence[float]],
        settings: dict[str, Any] | None = None,
    ) -> CostModel:
        """Builds the model from measured seconds: more rows, tokens or positions never cost less.

        Where a measurement falls along a grid, neighbours are averaged (isotonic regression). Going through the
        directions one after the other keeps the order along those before.
        """
        table = [[_isotonic(row) for row in rows] for rows in target]
        for rows in table:
            columns = [_isotonic(column) for column in zip(*rows, strict=True)]
            rows[:] = [list(row) for row in zip(*columns, strict=True)]
        for n in range(len(tokens)):
            for place in range(len(context_lengths)):
                for rows, value in zip(table, _isotonic([rows[n][place] for rows in table]), strict=True):
                    rows[n][place] = value
        drafts = [_isotonic(row) for row in draft]
        drafts = [list(row) for row in zip(*(_isotonic(c) for c in zip(*drafts, strict=True)), strict=True)]
        return cls(
            tuple(batch_sizes),
            tuple(tokens),
            tuple(context_lengths),
            tuple(tuple(tuple(row) for row in rows) for rows in table),
            tuple(tuple(row) for row in drafts),
            dict(settings or {}),
        )

    def target_seconds(self, batch_size: int, tokens: int, context_length: int | None = None) -> float:
        """Returns the seconds of a pass over `tokens` tokens of each request; None takes the middle context length."""
        return sum(
            weight * share * part * self.target[row][column][place]
            for row, weight in _places(self.batch_sizes, batch_size)
            for column, share in _places(self.tokens, tokens)
            for place, part in _places(self.context_lengths, self._length(context_length))
        )

    def draft_seconds(self, batch_size: int, context_length: int | None = None) -> float:
        """Returns the seconds that drafting takes in a round; None takes the middle context length."""
        return sum(
            weight * part * self.draft[row][place]
            for row, weight in _places(self.batch_sizes, batch_size)
            for place, part in _places(self.context_lengths, self._length(context_length))
        )

    def round_seconds(self, batch_size: int, num_nodes: int, context_length: int | None = None) -> float:
        """Returns the seconds of a round that drafts, and verifies `num_nodes` nodes and the root of each request."""
        drafting = self.draft_seconds(batch_size, context_length)
        return drafting + self.target_seconds(batch_size, num_nodes + 1, context_length)

    def speedup(self, tau: float, batch_size: int, num_nodes: int, context_length: int | None = None) -> float:
        """Returns tau * t(1) / (t(N + 1) + t(draft)): how much faster than plain decoding a round is."""
        plain = self.target_seconds(batch_size, 1, context_length)
        return tau * plain / self.round_seconds(batch_size, num_nodes, context_length)

    def save(self, path: str | Path) -> None:
        """Writes the model as JSON, and makes the folder where there is none."""
        file = Path(path).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Reads what `save` wrote.

        Raises:
            FileNotFoundError: When there is no such file.
            ValueError: When it is not a cost profile.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"{path}: no such cost profile; `treespark bench --profile {path}` measures one.")
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
            if fields.pop("format") != FORMAT:
                raise ValueError("another format")
            target = tuple(tuple(tuple(map(float, row)) for row in rows) for rows in fields.pop("target"))
            draft = tuple(tuple(map(float, row)) for row in fields.pop("draft"))
            grids = {name: tuple(fields.pop(name)) for name in ("batch_sizes", "tokens", "context_lengths")}
            return cls(**grids, target=target, draft=draft, settings=fields.pop("settings"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: not a cost profile of `treespark bench --profile` ({type(error).__name__}: {error})."
            ) from error

    def _length(self, context_length: int | None) -> int:
        return self.context_lengths[len(self.context_lengths) // 2] if context_length is None else context_length


def _places(grid: Sequence[int], value: int) -> list[tuple[int, float]]:
    """Returns the two grid points that a value lies between, with their weights, or the one that it is at."""
    if value <= grid[0] or len(grid) == 1:
        return [(0, 1.0)]
    right = next((i for i, point in enumerate(grid) if point >= value), len(grid) - 1)
    weight = (value - grid[right - 1]) / (grid[right] - grid[right - 1])
    return [(right - 1, 1 - weight), (right, weight)]


def _isotonic(values: Sequence[float]) -> list[float]:
    """Returns the non-decreasing values nearest to `values` in squares, by pooling neighbours that fall."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left, few), (right, more) = pools[-2:]
            pools[-2:] = [((left * few + right * more) / (few + more), few + more)]
    return [mean for mean, count in pools for _ in range(count)]
