"""Every format in and out: equal tensors, equal tokens, and what cannot be expressed or told is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_drafter, tiny_target
from treespark.decoding import decode, decode_plain
from treespark.drafters import CheckpointFormat, Drafter, DSparkDrafter, writable_formats
from treespark.drafters.markov import MARKOV_HEADS
from treespark.policies import Budgeted, Chain
from treespark.target import Target

TARGET = tiny_target("qwen3")
POLICY = Budgeted(k=2, num_draft_nodes=6).config()
EXTRA = {"chat_template_kwargs": {"enable_thinking": False}, "provenance": {"data_hash": "abc"}}
PROMPT = [5, 9, 13, 20]

DRAFTERS: dict[str, dict[str, Any]] = {
    **{f"{kind} head": {"markov_head": kind} for kind in MARKOV_HEADS},
    "wide, no confidence": {"head_dim": 12, "confidence": False},
    "no Markov head": {"markov_rank": 0, "confidence_with_markov": False},
    "own slot": {"sample_from_anchor": False, "markov_rank": 0, "confidence": False},
    "own slot, heads": {"sample_from_anchor": False},
    "reduced": {"draft_vocab_size": 20},
}
# Which formats cannot express a drafter.
REFUSED = {
    "own slot": {"deepspec"},
    "own slot, heads": {"deepspec", "specforge"},
    "reduced": {"deepspec", "specforge"},
}


def make(name: str, target: Target = TARGET) -> DSparkDrafter:
    drafter = tiny_drafter(target, bind=False, **DRAFTERS[name])
    assert isinstance(drafter, DSparkDrafter)
    if drafter.draft_ids is not None:
        drafter.draft_ids = torch.arange(3, 63, 3)[:20]
    drafter.bind(target)
    drafter.recorded_policy = POLICY
    drafter.extra = EXTRA
    return drafter


def write(drafter: DSparkDrafter, name: str, folder: Path, **options: Any) -> Path:
    writable_formats()[name]().save(drafter, folder, drafter.recorded_policy, drafter.extra, **options)
    return folder


def tokens(target: Target, drafter: Drafter, policy: Any = None) -> tuple[list[int], list[int]]:
    options: dict[str, Any] = {"policy": policy, "allow_other_policy": True, "end_token_ids": []}
    result = decode(target, drafter, PROMPT, max_new_tokens=24, **options)
    return result.tokens, [record.num_accepted for record in result.rounds]


CASES = [(name, form) for name in DRAFTERS for form in ("deepspec", "speculators", "specforge")]


@pytest.mark.parametrize(("name", "form"), CASES)
@pytest.mark.parametrize("embeddings", [True, False])
def test_round_trip(name: str, form: str, embeddings: bool, tmp_path: Path) -> None:
    """Export, import, export: equal bytes; the same tokens and rounds in decoding; < 100 kB beyond the tensors."""
    drafter = make(name)
    if form in REFUSED.get(name, ()):
        with pytest.raises(ValueError, match=r"[Ee]xport it as speculators|use speculators"):
            write(drafter, form, tmp_path / "a")
        assert not (tmp_path / "a").exists()
        return
    folder = write(drafter, form, tmp_path / "a", embeddings=embeddings)
    loaded = Drafter.from_pretrained(folder)
    assert isinstance(loaded, DSparkDrafter) and loaded.config() == drafter.config()
    assert loaded.is_bound == (embeddings and form != "specforge")
    assert (loaded.recorded_policy, loaded.extra, loaded.spec) == (POLICY, EXTRA, drafter.spec)
    loaded.bind(TARGET)
    state = loaded.state_dict()
    for key, value in drafter.state_dict().items():
        assert torch.equal(value, state[key]), key
    write(loaded, form, tmp_path / "b", embeddings=embeddings)
    for file in ("config.json", "model.safetensors"):
        assert (folder / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert tokens(TARGET, loaded) == tokens(TARGET, drafter)
    assert tokens(TARGET, loaded, Chain()) == tokens(TARGET, drafter, Chain())
    held = load_file(folder / "model.safetensors")
    assert {"embed_tokens.weight", "lm_head.weight"} & held.keys() == (
        {"embed_tokens.weight", "lm_head.weight"} if embeddings and form != "specforge" else set()
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size - sum(value.numel() * value.element_size() for value in held.values()) < 100_000


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["deepspec", "speculators", "specforge"])
def test_tied_targets_padding_rows_and_dtypes(form: str, tie: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Files have the embedding's rows, 70 here of which the tokenizer would use 64; tied targets write both tensors."""
    target = tiny_target("llama", dtype, tie=tie, vocab=70)
    drafter = tiny_drafter(target)
    writable_formats()[form]().save(drafter, tmp_path / "a", None, {})
    held = load_file(tmp_path / "a" / "model.safetensors")
    assert held["markov_head.markov_w2.weight"].shape == (70, 8) and held["fc.weight"].dtype == dtype
    loaded = Drafter.from_pretrained(tmp_path / "a", target=target)
    assert loaded.lm_head.weight is target.output_head().weight
    for key, value in drafter.trainable_state_dict().items():
        assert torch.equal(value, loaded.trainable_state_dict()[key])


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("policy", [Chain(), Budgeted(k=3, num_draft_nodes=9)])
def test_decoding_gives_the_targets_own_text(name: str, policy: Any) -> None:
    """Slot layout and vocabulary change what is drafted, never what is written (float64)."""
    expected = decode_plain(TARGET, PROMPT, max_new_tokens=24, end_token_ids=[]).tokens
    drafter = make(name)
    drafter.recorded_policy = policy.config()
    assert tokens(TARGET, drafter)[0] == expected


def test_depths_are_slots_one_later_when_the_anchor_is_not_read() -> None:
    """sample_from_anchor false: K + 1 slots, and depth d is the state of slot d (the true layout's slot d of K + 1)."""
    options = {"markov_rank": 0, "confidence": False}
    own = tiny_drafter(TARGET, block_size=3, sample_from_anchor=False, **options)
    whole = tiny_drafter(TARGET, block_size=4, **options)
    ids = torch.tensor([PROMPT])
    features = TARGET.features(ids, own.layer_ids).context[:, :3]
    positions = torch.arange(3).unsqueeze(0)
    anchor, at = ids[:, 3:], torch.tensor([[3]])
    states = [model.draft(model.encode(features, positions), anchor, at) for model in (own, whole)]
    assert states[0].shape[2] == 3
    assert torch.equal(states[0], states[1][:, :, 1:])


def test_reduced_vocabulary_is_the_full_one_cut() -> None:
    """Logits of the kept tokens are the full head's, all others -inf; parents keep their Markov rows."""
    full, cut = make("vanilla head"), make("reduced")
    ids = cut.draft_ids
    assert ids is not None and full.markov is not None and cut.markov is not None
    with torch.no_grad():
        cut.markov.markov_w1.weight.copy_(full.markov.markov_w1.weight)
        cut.markov.markov_w2.weight.copy_(full.markov.markov_w2.weight[ids])
    hidden, roots = torch.randn(2, 4, 32, dtype=torch.float64), torch.tensor([7, 60])  # no draft token among them
    parents = torch.tensor([[7, 60, 61, 62], [1, 2, 4, 5]])
    a, b = (drafter.propose(hidden, roots) for drafter in (full, cut))
    others = torch.ones(64, dtype=torch.bool)
    others[ids] = False
    for mine, theirs in ((b.path_logits(parents), a.path_logits(parents)), (b.base_logits, a.base_logits)):
        assert mine.shape == (2, 4, 64) and b.vocab_size == 64
        assert torch.allclose(mine[..., ids], theirs[..., ids]) and bool((mine[..., others] == -torch.inf).all())
    carry = b.root_carry()
    children = b.expand(1, roots.unsqueeze(1), carry, 20)
    assert set(children.tokens[0, 0].tolist()) == set(ids.tolist())
    expected = a.logits(1, roots.unsqueeze(1), carry)[0][..., ids].log_softmax(-1).sort(descending=True).values
    assert torch.allclose(children.log_probs, expected)
    packed = Budgeted(k=30, num_draft_nodes=25).build(b).pack()  # more children than draft tokens
    assert set(packed.tokens[packed.exists & (packed.depths > 0)].tolist()) <= set(ids.tolist())


# What engines require, one field after another ------------------------------------------------------------------------


def test_deepspec_fields_that_sglang_and_vllm_read(tmp_path: Path) -> None:
    config = json.loads((write(make("vanilla head"), "deepspec", tmp_path / "a") / "config.json").read_text())
    expected: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_target_layers": 4,
        "num_hidden_layers": 2,
        "block_size": 4,
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
        "mask_token_id": 63,
        "target_layer_ids": [0, 2],
        "num_anchors": 512,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "sample_from_anchor": True,
        "target_model_type": "qwen3",
        "target_model_name_or_path": "tiny",
        "tree_policy": POLICY,
    } | EXTRA
    for key, value in expected.items():
        assert config[key] == value, key


def test_speculators_fields_that_vllm_reads(tmp_path: Path) -> None:
    folder = write(make("own slot, heads"), "speculators", tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    expected: dict[str, Any] = {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkSpeculator"],
        "draft_vocab_size": 64,
        "block_size": 5,  # slots: the anchor's and 4 depths
        "target_hidden_size": 32,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 63,
        "sample_from_anchor": False,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "tiny", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    for key, value in expected.items():
        assert config[key] == value, key
    assert config["speculators_version"] and config["transformer_layer_config"]["num_hidden_layers"] == 2
    reduced = write(make("reduced"), "speculators", tmp_path / "b")
    held = load_file(reduced / "model.safetensors")
    assert json.loads((reduced / "config.json").read_text())["draft_vocab_size"] == 20
    assert held["d2t"].tolist() == [3 * i + 3 - i for i in range(20)]
    assert held["t2d"].nonzero()[:, 0].tolist() == list(range(3, 63, 3))
    assert held["lm_head.weight"].shape == (20, 32) and held["markov_head.markov_w1.weight"].shape == (64, 8)


def test_specforge_fields(tmp_path: Path) -> None:
    config = json.loads((write(make("vanilla head"), "specforge", tmp_path / "a") / "config.json").read_text())
    assert (config["architectures"], config["block_size"], config["num_target_layers"]) == (["DSparkDraftModel"], 4, 4)
    assert config["dflash_config"] == {
        "mask_token_id": 63,
        "target_layer_ids": [0, 2],
        "projector_type": "dspark",
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    config = json.loads((write(make("own slot"), "specforge", tmp_path / "b") / "config.json").read_text())
    assert (config["architectures"], config["block_size"]) == (["DFlashDraftModel"], 5)


# Files as others write them ------------------------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def foreign(folder: Path) -> None:
    """Takes away what only we write."""
    ours = ("sample_from_anchor", "tree_policy", "target_spec", "target_model_type", "target_model_name_or_path")
    edit(folder, lambda config: [config.pop(key, None) for key in (*ours, *EXTRA)])


def test_released_dflash(tmp_path: Path) -> None:
    """Block 16 is 15 depths with sample_from_anchor false, no embedding or head, and no word about its target."""
    target = tiny_target("qwen3", torch.float32)
    drafter = tiny_drafter(target, block_size=15, sample_from_anchor=False, markov_rank=0, confidence=False, seed=3)
    writable_formats()["specforge"]().save(drafter, tmp_path / "a", None, {})
    foreign(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["block_size"] == 16 and not {"markov_rank", "tree_policy"} & config.keys()
    loaded = Drafter.from_pretrained(tmp_path / "a")
    assert loaded.block_size == 15 and not loaded.sample_from_anchor and not loaded.is_bound
    assert (loaded.spec.name, loaded.spec.num_layers, loaded.recorded_policy) == ("", 4, None)
    loaded.bind(target)
    assert loaded.spec.fingerprint == target.spec.fingerprint
    assert tokens(target, loaded, Chain()) == tokens(target, drafter, Chain())


def test_released_speculators(tmp_path: Path) -> None:
    """Newer files leave embedding and head to the target, and say nothing of its number of layers."""
    drafter = make("vanilla head")
    folder = write(drafter, "speculators", tmp_path / "a", embeddings=False)
    edit(folder, lambda config: config.pop("target_spec"))
    edit(folder, lambda config: config.pop("target_model_name_or_path"))
    loaded = Drafter.from_pretrained(folder)
    assert (loaded.spec.num_layers, loaded.spec.name, loaded.layer_ids) == (0, "tiny", (0, 2))
    loaded.bind(TARGET)
    assert loaded.spec.num_layers == 4 and tokens(TARGET, loaded, Chain()) == tokens(TARGET, drafter, Chain())
    with pytest.raises(ValueError, match=r"taps the layers \[0, 2\], but the target 'tiny' offers 0 to 1"):
        Drafter.from_pretrained(folder).bind(tiny_target("qwen3", layers=3))


UNTOLD: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "speculators without the field": ("speculators", lambda c: c.pop("sample_from_anchor"), "nothing says"),
    "old SpecForge": (
        "specforge",
        lambda c: (c.pop("sample_from_anchor"), c["dflash_config"].pop("projector_type")),
        "nothing says",
    ),
    "contradiction": ("specforge", lambda c: c["dflash_config"].update(shift_label=False), "contradicting fields"),
    "false in SpecForge": ("specforge", lambda c: c.update(sample_from_anchor=False), "read in two ways"),
    "false in DeepSpec": ("deepspec", lambda c: c.update(sample_from_anchor=False), "only True is supported"),
    "no flag": ("deepspec", lambda c: c.update(sample_from_anchor="yes"), "only True is supported"),
    "another projector": ("specforge", lambda c: c["dflash_config"].update(projector_type="domino"), "'domino'"),
    "sliding layers": ("deepspec", lambda c: c.update(layer_types=["sliding_attention"] * 2), "full attention"),
    "causal": ("specforge", lambda c: c.update(is_causal=True), "is_causal is True"),
    "another algorithm": ("speculators", lambda c: c.update(speculators_model_type="eagle3"), "'eagle3'"),
    "another vocabulary": ("speculators", lambda c: c.update(draft_vocab_size=20), r"missing in .*: d2t; t2d"),
    "text for a number": ("deepspec", lambda c: c.update(block_size="7"), "expected a whole number"),
    "a list for a number": ("deepspec", lambda c: c.update(num_hidden_layers=[2]), "expected a whole number"),
    "target of another kind": ("deepspec", lambda c: c.update(target_spec={"name": "x"}), "`target_spec` is not one"),
    "scaled embedding": ("own", lambda c: c["dflash_config"].update(input_embedding_scale=2.0), "only 1.0"),
    "a head in DFlash": ("own", lambda c: c["dflash_config"].update(markov_rank=8), "only 0 is supported"),
}


@pytest.mark.parametrize("case", UNTOLD)
def test_what_cannot_be_told_or_done_is_refused(case: str, tmp_path: Path) -> None:
    form, change, message = UNTOLD[case]
    if form == "own":
        folder = write(make("own slot"), "specforge", tmp_path / "a")
    else:
        folder = write(make("vanilla head"), form, tmp_path / "a")
    edit(folder, change)
    with pytest.raises(ValueError, match=message) as error:
        Drafter.from_pretrained(folder)
    assert "config.json" in str(error.value) or "safetensors" in str(error.value)


def test_vocabulary_maps_that_disagree(tmp_path: Path) -> None:
    folder = write(make("reduced"), "speculators", tmp_path / "a")
    held = load_file(folder / "model.safetensors")
    held["t2d"] = held["t2d"].roll(1)
    save_file(held, folder / "model.safetensors")
    with pytest.raises(ValueError, match="name different tokens"):
        Drafter.from_pretrained(folder)


def test_formats_are_registered() -> None:
    assert set(writable_formats()) == {"deepspec", "speculators", "specforge"}
    assert {"DFlashFormat", "DeepSpecFormat"} <= CheckpointFormat.available().keys()
