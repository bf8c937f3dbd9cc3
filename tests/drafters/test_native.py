"""The native checkpoint format: layout, round trips, damaged and foreign files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_drafter, tiny_target
from treespark.drafters import Drafter, DSparkDrafter

TARGET = tiny_target("llama", torch.float32)
POLICY = {"class_path": "Budgeted", "init_args": {"k": 2, "num_draft_nodes": 6}}


def saved(tmp_path: Path, **options: Any) -> Path:
    folder = tmp_path / "drafter"
    tiny_drafter(TARGET, **options).save_pretrained(folder, tree_policy=POLICY, extra={"provenance": {"git": "abc"}})
    return folder


@pytest.mark.parametrize("kind", ["gated", "rnn", "none", "causal"])
def test_round_trip_of_every_kind(kind: str, tmp_path: Path) -> None:
    """Head, rank and block attention come back as they were, with equal files when saved again."""
    options: dict[str, dict[str, Any]] = {
        "none": {"markov_rank": 0, "confidence": False},
        "causal": {"block_attention": "causal"},
    }
    drafter = tiny_drafter(TARGET, **options.get(kind, {"markov_head": kind}))
    drafter.save_pretrained(tmp_path / "a")
    loaded = Drafter.from_pretrained(tmp_path / "a")
    assert loaded.config() == drafter.config()
    state = loaded.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in drafter.state_dict().items())
    loaded.save_pretrained(tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    names = {key.removeprefix("markov_head.") for key in state_keys(tmp_path / "a") if key.startswith("markov_head.")}
    joint = {"gated": {"gate_proj"}, "rnn": {"joint_proj"}}.get(kind, set())
    heads = set() if kind == "none" else {"markov_w1.weight", "markov_w2.weight"}
    assert names == heads | {f"{name}.{part}" for name in joint for part in ("weight", "bias")}


def state_keys(folder: Path) -> list[str]:
    return list(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_equal(family: str, tie: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Save, load, save again: equal tensors, equal files; the loaded drafter binds to the target it was made for."""
    target = tiny_target(family, dtype, tie=tie)
    drafter = tiny_drafter(target, head_dim=10)
    drafter.save_pretrained(tmp_path / "a", tree_policy=POLICY, extra={"provenance": {"git": "abc"}})
    loaded = Drafter.from_pretrained(tmp_path / "a")
    assert isinstance(loaded, DSparkDrafter) and loaded.spec == drafter.spec
    assert loaded.recorded_policy == POLICY and loaded.extra == {"provenance": {"git": "abc"}}
    state = loaded.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in drafter.state_dict().items())
    assert not loaded.lm_head.weight.requires_grad and loaded.fc.weight.requires_grad
    loaded.save_pretrained(tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    loaded.bind(target)
    assert loaded.lm_head.weight is target.output_head().weight
    at_once = Drafter.from_pretrained(tmp_path / "a", target=target, dtype=torch.float64)
    assert at_once.embed_tokens.weight is target.input_embedding().weight and at_once.fc.weight.dtype == torch.float64


def test_layout_is_deepspecs(tmp_path: Path) -> None:
    """Flat keys and a Qwen3 config filled with the (Llama) target's sizes, as serving engines read it."""
    folder = saved(tmp_path, head_dim=10)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    shapes = {key: list(value.shape) for key, value in load_file(folder / "model.safetensors").items()}
    layer = {
        "input_layernorm.weight": [32],
        "post_attention_layernorm.weight": [32],
        "self_attn.q_proj.weight": [40, 32],
        "self_attn.k_proj.weight": [20, 32],
        "self_attn.v_proj.weight": [20, 32],
        "self_attn.o_proj.weight": [32, 40],
        "self_attn.q_norm.weight": [10],
        "self_attn.k_norm.weight": [10],
        "mlp.gate_proj.weight": [48, 32],
        "mlp.up_proj.weight": [48, 32],
        "mlp.down_proj.weight": [32, 48],
    }
    assert shapes == {f"layers.{i}.{key}": shape for i in range(2) for key, shape in layer.items()} | {
        "embed_tokens.weight": [64, 32],
        "lm_head.weight": [64, 32],
        "fc.weight": [32, 64],
        "hidden_norm.weight": [32],
        "norm.weight": [32],
        "markov_head.markov_w1.weight": [64, 8],
        "markov_head.markov_w2.weight": [64, 8],
        "confidence_head.proj.weight": [1, 40],
        "confidence_head.proj.bias": [1],
    }
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "target_model_type": "llama",
        "block_size": 4,
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "target_layer_ids": [0, 2],
        "layer_types": ["full_attention", "full_attention"],
        "tie_word_embeddings": False,
        "mask_token_id": 63,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "block_attention": "bidirectional",
        "head_dim": 10,
        "eos_token_id": 2,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tree_policy": POLICY,
        "provenance": {"git": "abc"},
    }
    assert {key: config[key] for key in expected} == expected
    assert config["target_spec"]["fingerprint"] == TARGET.spec.fingerprint
    assert "markov_head_type" not in json.loads(
        (saved(tmp_path / "dflash", markov_rank=0, confidence=False) / "config.json").read_text()
    )


def test_qwen3_config_class_reads_it(tmp_path: Path) -> None:
    """Engines build a Qwen3 config from the file: it must take every field without complaint."""
    from transformers import Qwen3Config

    config = Qwen3Config.from_pretrained(saved(tmp_path))
    assert (config.head_dim, config.num_hidden_layers, config.rms_norm_eps) == (8, 2, 1e-6)


def test_foreign_file_without_a_fingerprint_binds_by_its_head(tmp_path: Path) -> None:
    """Released checkpoints record no identity: the copy of the head tells the target."""
    folder = saved(tmp_path)
    edit(
        folder,
        lambda config: [
            config.pop(key) for key in ("target_spec", "sample_from_anchor", "tree_policy", "block_attention")
        ],
    )
    drafter = Drafter.from_pretrained(folder)
    assert drafter.recorded_policy is None and drafter.spec.fingerprint == ""
    with pytest.raises(ValueError, match="made for the target"):
        drafter.bind(tiny_target("llama", torch.float32, seed=5))
    drafter.bind(TARGET)


def test_saving_again_replaces_and_keeps_other_files(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "notes.txt").write_text("mine")
    tiny_drafter(TARGET, seed=1).save_pretrained(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert "tree_policy" not in json.loads((folder / "config.json").read_text())
    expected = tiny_drafter(TARGET, seed=1).fc.weight
    assert torch.equal(Drafter.from_pretrained(folder).fc.weight, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_failed_save_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        tiny_drafter(TARGET, seed=1).save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_saving_needs_the_targets_tensors_and_free_field_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bind"):
        tiny_drafter(TARGET, bind=False).save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match=r"\['block_size'\] are written by the checkpoint format"):
        tiny_drafter(TARGET).save_pretrained(tmp_path / "a", extra={"block_size": 3})


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"no config\.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "no architecture": (lambda f: edit(f, lambda c: c.pop("architectures")), "architecture None.*Qwen3DSparkModel"),
    "other architecture": (
        lambda f: edit(f, lambda c: c.update(architectures=["LlamaForCausalLM"])),
        "'LlamaForCausalLM', which is no drafter.*Known: .*Qwen3DSparkModel",
    ),
    "other slot layout": (
        lambda f: edit(f, lambda c: c.update(sample_from_anchor=False)),
        "sample_from_anchor is False; only True",
    ),
    "missing field": (lambda f: edit(f, lambda c: c.pop("block_size")), "no `block_size`"),
    "other activation": (lambda f: edit(f, lambda c: c.update(hidden_act="gelu")), "hidden_act is 'gelu'"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"no model\.safetensors"),
    "truncated weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        "damaged",
    ),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged"),
    "missing tensor": (lambda f: edit_weights(f, lambda s: s.pop("fc.weight")), r"missing in .*: fc\.weight"),
    "unexpected tensor": (
        lambda f: edit_weights(f, lambda s: s.update({"t2d": torch.zeros(3)})),
        "Unexpected tensors in .*: t2d",
    ),
    "mis-shaped tensor": (
        lambda f: edit_weights(f, lambda s: s.update({"norm.weight": torch.ones(31)})),
        r"norm\.weight has \[31\], expected \[32\]",
    ),
    "config of other sizes": (
        lambda f: edit(f, lambda c: c.update(head_dim=12)),
        "config says head_dim 12, but the file holds 8",
    ),
    "rank gone": (
        lambda f: edit(f, lambda c: c.update(markov_rank=0, enable_confidence_head=False)),
        "Unexpected tensors in .*confidence_head",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folders_give_one_clear_error(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    damage, message = DAMAGE[case]
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Drafter.from_pretrained(folder)


def test_another_target_is_refused_at_loading(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Load the target that it was trained with"):
        Drafter.from_pretrained(saved(tmp_path), target=tiny_target("llama", torch.float32, seed=9))


def test_subclass_asks_for_its_own_kind(tmp_path: Path) -> None:
    assert isinstance(DSparkDrafter.from_pretrained(saved(tmp_path)), DSparkDrafter)
