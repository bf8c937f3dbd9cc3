"""Documents that share a row of fixed length, and anchors that share a step's budget."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch

from treespark.data.collate import seeded_generator


class Packing:
    """Rows of documents for each epoch; every epoch has the same number of rows.

    Documents go, longest first, into the fullest row that still has room (best-fit decreasing), which depends on
    nothing but their lengths: so do the number of rows, and with it the number of steps of an epoch. An epoch draws
    which documents of a length take whose places, and the order of the rows.

    Args:
        lengths: tokens of each document.
        row_length: the most tokens of a row.

    Attributes:
        num_rows: rows of an epoch.

    Raises:
        ValueError: a document is longer than a row.
    """

    def __init__(self, lengths: Sequence[int], row_length: int) -> None:
        if lengths and max(lengths) > row_length:
            raise ValueError(
                f"A document of {max(lengths)} tokens does not fit into a row of {row_length}. Cut, split or drop it."
            )
        self._lengths = torch.tensor(lengths, dtype=torch.long)
        self._ranks = best_fit(sorted(lengths, reverse=True), row_length)
        self.num_rows = len(self._ranks)

    def rows(self, seed: int, epoch: int) -> list[list[int]]:
        """Indices of the documents of each row: a function of (seed, epoch) and of the lengths alone."""
        drawn = torch.randperm(len(self._lengths), generator=seeded_generator(seed, epoch, "order"))
        by_length = drawn[self._lengths[drawn].argsort(descending=True, stable=True)].tolist()
        order = torch.randperm(self.num_rows, generator=seeded_generator(seed, epoch, "rows"))
        return [[by_length[rank] for rank in self._ranks[row]] for row in order.tolist()]


def best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Puts items one after the other into the fullest row with room for them, or into a new row.

    Args:
        lengths: of the items, each at most ``row_length``.
        row_length: room of an empty row.

    Returns:
        Indices of the items of each row.

    >>> best_fit([6, 5, 4, 3], 10)
    [[0, 2], [1, 3]]
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # rows by the room that is left in them
    rooms: list[int] = []  # its keys, ascending
    for index, length in enumerate(lengths):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            left = row_length
            row = len(rows)
            rows.append([])
        else:
            left = rooms[place]
            row = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[place]
        rows[row].append(index)
        left -= length
        if left > 0:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(row)
    return rows


def share_anchors(eligible: Sequence[int], budget: int) -> list[int]:
    """Shares a number of anchors out in proportion to what each document offers, by largest remainders.

    No document gets more than it offers, and the shares add up to the budget, or to all that is offered.

    Args:
        eligible: positions of each document that may be anchors.
        budget: anchors to share out.

    >>> share_anchors([10, 5, 1], 4)
    [3, 1, 0]
    """
    total = sum(eligible)
    if total <= budget:
        return list(eligible)
    shares = [budget * number // total for number in eligible]
    remainders = [budget * number % total for number in eligible]
    # Fewer are left over than documents have a remainder, so that nobody is rounded up past what it offers.
    first = sorted(range(len(eligible)), key=lambda i: (-remainders[i], i))[: budget - sum(shares)]
    for i in first:
        shares[i] += 1
    return shares
