"""The frozen target: a Hugging Face causal language model with tapped hidden states, own head and own cache."""

from __future__ import annotations

from treespark.target.loading import KNOWN_TARGETS, load_tokenizer, resolve
from treespark.target.model import Target, TargetFeatures, TargetOutput
from treespark.target.spec import TargetSpec, check_mask_token, default_mask_token

__all__ = [
    "KNOWN_TARGETS",
    "Target",
    "TargetFeatures",
    "TargetOutput",
    "TargetSpec",
    "check_mask_token",
    "default_mask_token",
    "load_tokenizer",
    "resolve",
]
