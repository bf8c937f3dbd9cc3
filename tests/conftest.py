"""Settings that every test shares: no hub, few threads, reproducible property tests."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from hypothesis import settings

settings.register_profile("treespark", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("treespark")
torch.set_num_threads(1)
