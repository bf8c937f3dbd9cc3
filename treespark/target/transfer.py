"""Small tables from the host to the device, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def send(values: Sequence[Any], device: torch.device) -> Tensor:
    """Returns integers, in lists nested as a table, as a long tensor on `device`.

    A plain `torch.tensor(values, device="cuda")` copies from pageable memory and waits until all former work is done.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.long, device=device)
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)
