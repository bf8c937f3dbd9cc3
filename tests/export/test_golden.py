"""Folders that DeepSpec's own code wrote pass through loading, decoding and every format."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_model
from treespark.decoding import decode, decode_plain
from treespark.drafters import Drafter, writable_formats
from treespark.drafters.markov import MARKOV_HEADS
from treespark.policies import Budgeted, Chain
from treespark.target import Target

GOLDEN = Path(os.environ.get("TREESPARK_GOLDEN") or Path(__file__).parents[3] / "shared" / "golden")
PROMPT = [5, 9, 13, 20]


@pytest.mark.parametrize("name", ["dspark_vanilla", "dspark_gated", "dflash"])
def test_golden_folders_decode(name: str, tmp_path: Path) -> None:
    """Bound to a target with the file's embedding and head, the text is plain decoding's; formats change nothing."""
    folder = GOLDEN / name
    if not folder.is_dir():
        pytest.skip(f"no golden files of DeepSpec at {GOLDEN}; TREESPARK_GOLDEN may name their folder")
    kind = json.loads((folder / "config.json").read_text()).get("markov_head_type", "vanilla")
    if kind not in MARKOV_HEADS:
        pytest.skip(f"there is no Markov head of the kind {kind}")
    drafter = Drafter.from_pretrained(folder, dtype=torch.float64)
    model = tiny_model("qwen3", vocab=96, layers=6, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model.get_input_embeddings().weight.data.copy_(drafter.embed_tokens.weight)
    model.get_output_embeddings().weight.data.copy_(drafter.lm_head.weight)
    target = Target(model, name="golden")
    drafter.bind(target)
    text = decode_plain(target, PROMPT, max_new_tokens=24, end_token_ids=[]).tokens
    for form, writable in writable_formats().items():
        writable().save(drafter, tmp_path / form, None, {})
    loaded = {form: Drafter.from_pretrained(tmp_path / form, target=target) for form in writable_formats()}
    for policy in (Chain(), Budgeted(k=2, num_draft_nodes=8)):
        own = decode(target, drafter, PROMPT, policy=policy, max_new_tokens=24, end_token_ids=[])
        assert own.tokens == text
        for form, other in loaded.items():
            again = decode(target, other, PROMPT, policy=policy, max_new_tokens=24, end_token_ids=[])
            assert (again.tokens, again.rounds) == (text, own.rounds), form
