"""Names of targets and the errors of a bad one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.tiny_text import save_tiny_target
from treespark.target import Target, load_tokenizer, resolve
from treespark.target.loading import cache_folder, parse_dtype

SMOLLM2 = "smollm2-135m-instruct"


def test_local_folder_is_loaded(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "target")
    target = Target.load(folder, dtype="float64")
    assert target.dtype == torch.float64 and target.spec.name == folder
    assert target.tokenizer.convert_ids_to_tokens(target.spec.mask_token_id) == "<|mask|>"


def test_known_target_that_is_absent_names_its_make_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREESPARK_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make target"):
        resolve(SMOLLM2)
    (tmp_path / "targets" / SMOLLM2).mkdir(parents=True)
    (tmp_path / "targets" / SMOLLM2 / "config.json").write_text("{}")
    assert resolve(SMOLLM2) == str(tmp_path / "targets" / SMOLLM2)


def test_bad_names_give_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Target.load(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        Target.load(str(tmp_path))
    for load in (Target.load, load_tokenizer):
        with pytest.raises(ValueError, match=r"Cannot load the .* of the target 'nobody/nothing'.*hub id.*OFFLINE"):
            load("nobody/nothing")
    with pytest.raises(ValueError, match="Unknown dtype 'float31'"):
        parse_dtype("float31")
    with pytest.raises(ValueError, match="Unknown dtype 'int64'"):
        parse_dtype("int64")


def test_smollm2() -> None:
    """The real target: Llama family, tied head, taps as hidden states, a special token for the mask."""
    if not (cache_folder() / "targets" / SMOLLM2 / "config.json").is_file():
        if os.environ.get("TREESPARK_REQUIRE_TARGET") == "1":
            pytest.fail(f"TREESPARK_REQUIRE_TARGET=1, but {SMOLLM2} is not in the cache: run `make target`.")
        pytest.skip(f"{SMOLLM2} is not in the cache (`make target` fetches it)")
    target = Target.load(SMOLLM2)
    spec = target.spec
    assert (spec.model_type, spec.vocab_size, spec.hidden_size, spec.num_layers) == ("llama", 49152, 576, 30)
    assert target.output_head().weight is target.input_embedding().weight
    ids = torch.tensor([target.tokenizer.encode("The capital of France is")])
    features = target.features(ids, [1, 27])
    with torch.no_grad():
        output = target.model(ids, output_hidden_states=True)
    expected = torch.cat([output.hidden_states[2], output.hidden_states[28]], -1)
    assert torch.allclose(features.context, expected, atol=1e-4)
    assert torch.allclose(target.logits(features.final), output.logits, atol=1e-3)
    assert "Paris" in target.tokenizer.decode(output.logits[0, -1].argmax())
    assert target.tokenizer.convert_ids_to_tokens(spec.mask_token_id) == "<repo_name>"
