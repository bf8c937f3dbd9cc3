"""Features that were computed once and stay in memory: the target's share of a step is paid in the first epoch only.

Shapes: R rows, S sequence, H hidden, m tapped layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from treespark.target.model import Target, TargetFeatures


class FeatureMemory:
    """Target features by sample in the host's memory, up to a limit; what does not fit is computed anew each time.

    Each sample is computed by itself, without padding or neighbours in its row, so that its features do not depend on
    the batch that it came with, and a resumed training sees the same numbers.

    Args:
        target: The target.
        layer_ids: Its tapped layers.
        limit: Bytes that may be kept.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int], limit: int) -> None:
        self._target, self._layer_ids, self.limit = target, layer_ids, limit
        self._kept: dict[int, TargetFeatures] = {}
        self.num_bytes = 0

    def features(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, ids: Tensor) -> TargetFeatures:
        """Returns the features of right-padded rows, zeros on padding.

        Args:
            input_ids: [R, S] token ids.
            attention_mask: [R, S] True on tokens.
            position_ids: [R, S]; where it restarts inside a row, the next document begins.
            ids: [R] sample of each row, or [R, D] of each document of a row; -1 is never kept.
        """
        lengths = attention_mask.sum(1).tolist()
        rows = []
        for row, (samples, length) in enumerate(zip(ids.view(len(lengths), -1).tolist(), lengths, strict=True)):
            positions = position_ids[row, :length]
            starts = (torch.diff(positions) != 1).nonzero()[:, 0] + 1
            edges = [0, *starts.tolist(), length]
            parts = [
                self._row(sample, input_ids[row : row + 1, start:stop], positions[start:stop].unsqueeze(0))
                for sample, (start, stop) in zip(samples, itertools.pairwise(edges), strict=False)
            ]
            rows.append([torch.cat(part) for part in zip(*parts, strict=True)])
        context, final = (
            torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*rows, strict=True)
        )
        missing = input_ids.shape[1] - final.shape[1]
        return TargetFeatures(*(torch.nn.functional.pad(part, (0, 0, 0, missing)) for part in (context, final)))

    def _row(self, sample: int, input_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
        if sample in self._kept:
            return TargetFeatures(*(part.to(input_ids.device) for part in self._kept[sample]))
        found = self._target.features(input_ids, self._layer_ids, None, position_ids)
        row = TargetFeatures(found.context[0], found.final[0])
        size = sum(part.numel() * part.element_size() for part in row)
        if sample >= 0 and self.num_bytes + size <= self.limit:
            self._kept[sample] = TargetFeatures(*(part.cpu() for part in row))
            self.num_bytes += size
        return row
