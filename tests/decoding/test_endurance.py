"""Long answers and many requests: storage follows the committed text, and goes back to where it was."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from tests.tiny import tiny_drafter, tiny_target
from treespark.decoding import BatchDecoding, Request
from treespark.policies import Budgeted

STATM = Path("/proc/self/statm")
PROMPTS = [[1, 2, 3], [3], [1, 3, 3, 2, 3, 1, 3, 2], [0, 1], [3, 1, 0]]
# Of four tokens and two depths a tree of 4 + 16 nodes holds everything: every round commits 2 and the bonus.
FULL = Budgeted(k=4, num_draft_nodes=20)


def new_batch(rows: int) -> BatchDecoding:
    target = tiny_target(layers=2, vocab=4, initializer_range=0.5, max_position_embeddings=4096)
    return BatchDecoding(
        target, drafter=tiny_drafter(target, num_layers=1, block_size=2), policy=FULL, max_batch_size=rows
    )


def buffers(batch: BatchDecoding) -> list[torch.Tensor]:
    """All tensors of both caches."""
    assert batch.cache is not None and batch.context is not None
    held = [[layer.key_buffer, layer.value_buffer] for layer in batch.cache.hf.layers]
    return [tensor for tensors in [*held, *batch.context._tensors()] for tensor in tensors]


def test_storage_grows_by_the_committed_tokens_only() -> None:
    """2,000 tokens beside another request: each round the caches end where the longest text does.

    Room is made for 1,024 tokens at once and doubles when it is full: buffers are moved once, never in a round between.
    Trees that stayed would have filled 21 places a round.
    """
    batch = new_batch(2)
    long, short = (
        Request(batch.target, prompt, max_new_tokens=limit, end_token_ids=[])
        for prompt, limit in (([1, 2], 2000), ([3], 90))
    )
    batch.add(long)
    batch.add(short)
    assert batch.cache is not None and batch.context is not None
    moves, places = 0, [tensor.data_ptr() for tensor in buffers(batch)]
    while batch.active:
        before = long.length
        records = batch.step()
        assert records[0][0] is long and long.length - before == records[0][1].committed
        longest = max(request.length for request, _ in records)
        assert batch.cache.length == longest
        assert long.finish_reason is not None or batch.context.length <= longest
        now = [tensor.data_ptr() for tensor in buffers(batch)]
        moves, places = moves + (now[0] != places[0]), now
    assert len(long.tokens) == 2000 and moves == 1
    # Doubling leaves at most twice the room that the text, a tree and its root need.
    assert all(tensor.shape[2] <= 2 * (long.length + 21) for tensor in buffers(batch))


def test_200_requests_in_and_out_leave_memory_where_it_was() -> None:
    """Neither the caches' buffers, nor the tensors that live, nor the process's memory grow with the requests."""
    batch = new_batch(3)

    def serve(count: int) -> tuple[list[int], int, int]:
        batch.run(
            Request(batch.target, PROMPTS[i % 5], max_new_tokens=2 + i % 6, end_token_ids=[]) for i in range(count)
        )
        gc.collect()
        live = sum(item.nbytes for item in gc.get_objects() if type(item) is torch.Tensor)
        pages = int(STATM.read_text(encoding="ascii").split()[1]) if STATM.is_file() else 0
        return [tensor.data_ptr() for tensor in buffers(batch)], live, pages * os.sysconf("SC_PAGE_SIZE")

    places, live, resident = serve(30)
    grown = []
    for _ in range(3):
        after = serve(200)
        assert not batch.active
        assert after[0] == places and after[1] <= live
        grown.append(after[2] - resident)
        resident = after[2]
    # The allocator may keep some pages once; what every 200 requests left behind would be there each time.
    assert min(grown) < 4 * 2**20
