"""Micro-batches: right-padded rows, their documents, and the anchors drawn from them.

Shapes: R rows, S sequence, A anchors per row. Masks: True = keep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from treespark.data.samples import Sample


@dataclass
class MicroBatch:
    """Rows that go through the target and the drafter together.

    Attributes:
        input_ids: [R, S] long, padded on the right with 0.
        attention_mask: [R, S] bool, True on tokens.
        loss_mask: [R, S] bool, True on supervised tokens.
        document_ids: [R, S] long, counted from 0 in each row, -1 on padding.
        position_ids: [R, S] long, starting again at 0 in each document.
        anchors: [R, A] long, ascending positions, padded with 0.
        anchor_mask: [R, A] bool, True on anchors that exist.
        sample_ids: [R] long, index into the data set (of a row's first document); -1 for a row that only pads.
        prompt_lengths: [R] long, start of the last supervised span.
        own_text: [R] bool, the answer is the target's own greedy text, known token for token.
        document_samples: [R, D] long, index into the data set of each document of a row, filled up with -1.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    position_ids: Tensor
    anchors: Tensor
    anchor_mask: Tensor
    sample_ids: Tensor
    prompt_lengths: Tensor
    own_text: Tensor
    document_samples: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """A copy on another device."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        return MicroBatch(**moved)

    def pin_memory(self) -> MicroBatch:
        """A copy in page-locked memory; torch's loader calls this where an accelerator is present."""
        return MicroBatch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


def eligible_anchors(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Positions that may be anchors: they and their successors are supervised, in one document.

    The last token of a prompt is never one: its own token is not supervised.

    Args:
        loss_mask: [..., S] bool.
        document_ids: [..., S] long.

    Returns:
        [..., S] bool.

    >>> eligible_anchors(torch.tensor([0, 1, 1, 1, 0]) == 1, torch.tensor([0, 0, 0, 1, 1])).long().tolist()
    [0, 1, 0, 0, 0]
    """
    pairs = loss_mask[..., :-1] & loss_mask[..., 1:] & (document_ids[..., :-1] == document_ids[..., 1:])
    eligible = torch.zeros_like(loss_mask)
    eligible[..., :-1] = pairs
    return eligible


def sample_anchors(eligible: Tensor, num_anchors: int, seed: int, epoch: int, sample_id: int) -> Tensor:
    """Uniform anchors without replacement, ascending; all of them where there are no more than ``num_anchors``.

    The draw depends on its arguments alone: not on batch order, workers or processes.

    Args:
        eligible: [S] bool.
        num_anchors: the most that are drawn.
        seed: the run's seed.
        epoch: counted from 0.
        sample_id: index of the sample in its data set.

    Returns:
        [at most num_anchors] long.
    """
    positions = eligible.nonzero().squeeze(-1)
    generator = seeded_generator(seed, epoch, sample_id)
    chosen = torch.randperm(positions.numel(), generator=generator)[:num_anchors]
    return positions[chosen].sort().values


def seeded_generator(*key: int | str) -> torch.Generator:
    """A CPU generator whose seed is a hash of the key, so that neighbouring keys give unrelated streams."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def collate(
    rows: Sequence[Sequence[Sample]],
    sample_ids: Sequence[Sequence[int]],
    *,
    num_anchors: int | Mapping[int, int],
    seed: int,
    epoch: int,
) -> MicroBatch:
    """Pad rows into one micro-batch and draw their anchors.

    A row is a list of documents that follow each other; an empty row pads the batch: a single unsupervised token.
    Anchors are drawn in each document by itself, so that packing does not change them. The anchor axis is as long as
    the row with most anchors needs, at least 1.

    Args:
        rows: documents of each row.
        sample_ids: index of each of these documents in the data set.
        num_anchors: the most anchors per document; or each document's own number, by its index.
        seed: the run's seed.
        epoch: counted from 0.
    """
    num_rows = len(rows)
    length = max(1, *(sum(len(sample) for sample in row) for row in rows)) if rows else 1
    input_ids = torch.zeros(num_rows, length, dtype=torch.long)
    document_ids = torch.full_like(input_ids, -1)
    position_ids = torch.zeros_like(input_ids)
    loss_mask = torch.zeros(num_rows, length, dtype=torch.bool)
    prompt_lengths = torch.ones(num_rows, dtype=torch.long)
    own_text = torch.zeros(num_rows, dtype=torch.bool)
    document_samples = torch.full((num_rows, max([1, *map(len, rows)])), -1)
    drawn: list[Tensor] = []
    for r, (row, ids) in enumerate(zip(rows, sample_ids, strict=True)):
        offset = 0
        anchors_of_row = [torch.zeros(0, dtype=torch.long)]
        if not row:
            document_ids[r, 0] = 0  # one visible token: a row without any would attend to nothing
        for document, (sample, sample_id) in enumerate(zip(row, ids, strict=True)):
            here = slice(offset, offset + len(sample))
            input_ids[r, here] = sample.ids.long()
            document_ids[r, here] = document
            position_ids[r, here] = torch.arange(len(sample))
            for start, stop in sample.spans:
                loss_mask[r, offset + start : offset + stop] = True
            most = num_anchors if isinstance(num_anchors, int) else num_anchors[sample_id]
            eligible = eligible_anchors(loss_mask[r, here], document_ids[r, here])
            anchors_of_row.append(offset + sample_anchors(eligible, most, seed, epoch, sample_id))
            prompt_lengths[r] = offset + sample.prompt_length
            own_text[r] = sample.own_text
            document_samples[r, document] = sample_id
            offset += len(sample)
        drawn.append(torch.cat(anchors_of_row))

    width = max([1, *(row.numel() for row in drawn)])
    anchors = torch.zeros(num_rows, width, dtype=torch.long)
    anchor_mask = torch.zeros(num_rows, width, dtype=torch.bool)
    for r, positions in enumerate(drawn):
        anchors[r, : positions.numel()] = positions
        anchor_mask[r, : positions.numel()] = True
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=document_ids >= 0,
        loss_mask=loss_mask,
        document_ids=document_ids,
        position_ids=position_ids,
        anchors=anchors,
        anchor_mask=anchor_mask,
        sample_ids=document_samples[:, 0].clone(),
        prompt_lengths=prompt_lengths,
        own_text=own_text,
        document_samples=document_samples,
    )
