"""A round reads back from the device at most twice, whatever the batch and the tree hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.decoding.test_loop import REGISTERED, target_of
from tests.tiny import tiny_drafter
from treespark.decoding import BatchDecoding, Request, batch
from treespark.policies import BestFirst, Budgeted, Chain, DDTree, TreePolicy
from treespark.target import cache

# Methods that copy to the host without passing the dispatcher on a CPU.
READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
# Operators whose result, or the size of it, the host has to wait for.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "equal", "is_nonzero"}
# A table made from Python numbers goes to the device by a blocking copy, unless `send` makes it.
UPLOADS = {torch.tensor, torch.as_tensor}


class Reads(TorchFunctionMode):
    """Counts the calls that read a tensor's values, and those that make one from Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS or func in UPLOADS:
            self.counts["upload" if func in UPLOADS else "read"] += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Counts the operators that the host waits for; indexing by a mask is one, since it looks for the True places."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        masks = name in ("index", "index_put_", "index_put") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITS or masks:
            self.counts["read"] += 1
        return func(*args, **(kwargs or {}))


def count(run: Callable[[], Any]) -> Counter[str]:
    with Reads() as reads, Waits(reads.counts):
        run()
    return reads.counts


def test_the_counters_count() -> None:
    """Each of these reads once; the sums themselves do not."""
    values = torch.arange(4)
    for read in (
        lambda: values.tolist(),
        lambda: int(values.sum()),
        lambda: bool((values > 1).any()),
        lambda: values.numpy(),
        lambda: values[values > 1],
        lambda: values[: values[1]],
        lambda: torch.nonzero(values),
    ):
        assert count(read)["read"] == 1
    assert count(lambda: torch.tensor([1]))["upload"] == 1
    assert not count(lambda: values.sum() + values[1:].cumsum(0).clamp(max=3).amax())


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What goes to the device without waiting for it; and no policy reads because reading is free on a CPU."""
    counts: Counter[str] = Counter()

    def send(values: Any, device: torch.device) -> torch.Tensor:
        counts["sent"] += 1
        with torch._C.DisableTorchFunction():
            return torch.tensor(values, dtype=torch.long, device=device)

    monkeypatch.setattr(batch, "send", send)
    monkeypatch.setattr(cache, "send", send)
    monkeypatch.setattr(BestFirst, "frontier_size", Budgeted.frontier_size)
    return counts


@pytest.mark.parametrize(
    "policy",
    [
        None,
        *REGISTERED,
        Chain(),
        Budgeted(k=4, num_draft_nodes=52),
        DDTree(num_draft_nodes=64),
        BestFirst(k=3, num_draft_nodes=9, a=1.2, b=-0.1, theta=0.02),
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [1, 5])
def test_two_reads_a_round(policy: TreePolicy | None, size: int, sent: Counter[str]) -> None:
    """The sizes of the trees, and the verified trees with the target's choices; plain decoding needs its tokens only.

    Prompts of 1, 3, 5, … tokens, so that rows differ in length; requests leave on the way and rows move up.
    """
    target = target_of("qwen3")
    drafter = None if policy is None else tiny_drafter(target)
    decoding = BatchDecoding(target, drafter=drafter, policy=policy, max_batch_size=size)
    for row in range(size):
        decoding.add(Request(target, list(range(1, 2 * row + 2)), max_new_tokens=6 + 2 * row, end_token_ids=[]))
    while decoding.active:
        sent.clear()
        found = count(decoding.step)
        assert found["read"] == (1 if policy is None else 2)
        assert found["upload"] == 0 and sent["sent"] <= 3
