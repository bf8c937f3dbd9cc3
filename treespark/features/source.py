"""The switch where a training's target features come from: a class with its options, as for losses and policies.

Shapes: R rows, S sequence, H hidden, m tapped layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from treespark.features.identity import FeatureIdentity, document_key
from treespark.features.shards import split
from treespark.registry import Registered
from treespark.target import Target, TargetFeatures


class FeatureSource(Registered, ABC, kind="feature source"):
    """Where the features of training rows come from. Validation and test always run the target itself.

    Attributes:
        runs_evenly: Whether every process runs the target equally often, as a target that is sharded over processes
            needs it.
        num_computed: Documents (rows, for `Online`) that the target ran over so far.
        num_found: Documents that were found in a store so far.
    """

    runs_evenly: ClassVar[bool] = True

    def __init__(self) -> None:
        self.num_computed, self.num_found = 0, 0
        self._target: Target
        self._layer_ids: tuple[int, ...]

    def open(self, target: Target, layer_ids: Sequence[int]) -> None:
        """Gets ready for a target and its tapped layers.

        Raises:
            ValueError: When a store belongs to something else.
        """
        self._target, self._layer_ids = target, tuple(layer_ids)

    def check(self, documents: Iterable[Tensor], rendering: dict[str, Any] | None = None) -> None:
        """Refuses, at the start of a training, documents that it could not serve.

        Args:
            documents: Token ids [S] of each training document.
            rendering: What the documents' tokens depend on, to explain what is missing.
        """

    @abstractmethod
    def features(self, input_ids: Tensor, document_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
        """Returns the features of right-padded rows; those on padding mean nothing.

        Args:
            input_ids: [R, S] token ids.
            document_ids: [R, S] documents of each row, counted from 0 and in one piece each; -1 for what is not looked
                at, such as padding.
            position_ids: [R, S], starting again at 0 in each document.
        """


class Online(FeatureSource):
    """Runs the target at every step: no memory, no disk."""

    def features(self, input_ids: Tensor, document_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
        """Returns the features from one forward pass; see `FeatureSource.features`."""
        self.num_computed += len(input_ids)
        return self._target.features(input_ids, self._layer_ids, document_ids >= 0, position_ids)


class Stored(FeatureSource):
    """Looks documents up one by one, whatever row, neighbours, order or epoch they come in."""

    identity: FeatureIdentity

    def features(self, input_ids: Tensor, document_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
        """Returns the stored features, zeros outside documents; see `FeatureSource.features`."""
        tokens = input_ids.cpu()
        places = document_places(document_ids.cpu())
        found = self._fetch([tokens[row, start:stop] for row, start, stop in places])
        whole = torch.zeros(*input_ids.shape, self.identity.width, dtype=self._target.dtype, device=input_ids.device)
        for (row, start, stop), rows in zip(places, found, strict=True):
            whole[row, start:stop] = rows.to(whole.device)
        return split(whole, self.identity.hidden_size)

    @abstractmethod
    def _fetch(self, documents: list[Tensor]) -> list[Tensor]:
        """Returns the stored rows [S, (m + 1) * H] of documents given by their token ids [S] on the CPU."""


def document_places(document_ids: Tensor) -> list[tuple[int, int, int]]:
    """Returns row, start and end (exclusive) of each document, in order.

    Args:
        document_ids: [R, S]; -1 outside of documents.

    >>> document_places(torch.tensor([[0, 0, 1, -1], [-1, -1, -1, -1]]))
    [(0, 0, 2), (0, 2, 3)]
    """
    places = []
    for row, ids in enumerate(document_ids):
        values, counts = torch.unique_consecutive(ids, return_counts=True)
        ends = counts.cumsum(0)
        spans = zip(values.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
        places += [(row, start, stop) for document, start, stop in spans if document >= 0]
    return places


def unique_documents(documents: Iterable[Tensor]) -> dict[bytes, Tensor]:
    """Returns the documents by address, in the order of their first appearance; repeated ones are stored once."""
    unique: dict[bytes, Tensor] = {}
    for ids in documents:
        unique.setdefault(document_key(ids), ids)
    return unique
