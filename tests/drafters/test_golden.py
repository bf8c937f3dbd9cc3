"""Golden checkpoints: our own small one always, those computed with DeepSpec's model code where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.drafters.make_golden import outputs
from treespark.drafters import Drafter

OWN = {kind: Path(__file__).parent / folder for kind, folder in (("vanilla", "golden"), ("rnn", "golden_rnn"))}
DEEPSPEC = Path(os.environ.get("TREESPARK_GOLDEN") or Path(__file__).parents[3] / "shared" / "golden")


def check(folder: Path) -> None:
    drafter = Drafter.from_pretrained(folder)
    golden = load_file(folder / "golden.safetensors")
    with torch.no_grad():
        results = outputs(drafter, golden)
    for name, value in results.items():
        if value.is_floating_point():
            assert torch.allclose(value, golden[name], atol=1e-4), name
        else:
            assert torch.equal(value, golden[name]), name


@pytest.mark.parametrize("kind", OWN)
def test_own_golden_file(kind: str) -> None:
    """A Llama target's drafter with widened heads, rank 6 and a confidence head: the same numbers as when written."""
    check(OWN[kind])


@pytest.mark.parametrize("name", ["dspark_vanilla", "dspark_gated", "dflash"])
def test_deepspec_golden_files(name: str) -> None:
    """Backbone, base, teacher-forced and confidence logits within 1e-4 in float32, and the same greedy chains."""
    if not (DEEPSPEC / name).is_dir():
        pytest.skip(f"no golden files of DeepSpec at {DEEPSPEC}; TREESPARK_GOLDEN may name their folder")
    check(DEEPSPEC / name)
