"""Settings that every test shares: no hub, few threads, reproducible property tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

settings.register_profile("treespark", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("treespark")
torch.set_num_threads(1)

SmallFiles = Callable[[int], AbstractContextManager[None]]


@pytest.fixture
def small_files() -> SmallFiles:
    """Inside `with small_files(n)`, no file of this process grows past n bytes: its system refuses, as a full disk."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def limited(num_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
