"""The native checkpoint format: DeepSpec's flat layout, which serving engines read (arXiv 2607.05147)."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treespark.drafters.base import FROZEN_PREFIXES, CheckpointFormat, Drafter, check_tensors
from treespark.drafters.dspark import DSparkDrafter
from treespark.target.spec import TargetSpec, end_tokens, rope_parameters

if TYPE_CHECKING:
    from treespark.target import Target

_WEIGHTS = "model.safetensors"
# Names of modules: ours -> the file's.
_RENAMED = {"markov.": "markov_head."}
# Fields that the format writes itself; everything else in a config.json is kept as `extra`.
_OWN_FIELDS = (
    "sample_from_anchor",
    "block_attention",
    "tree_policy",
    "target_model_type",
    "target_model_name_or_path",
    "target_spec",
)


class DeepSpecFormat(CheckpointFormat):
    """`config.json` is a Qwen3 config filled with the target's sizes; `model.safetensors` holds flat keys.

    The file includes the target's embedding and output head, as the layout asks. `model_type` stays `qwen3`, so the
    architecture tells what it is.
    """

    architectures = ("Qwen3DSparkModel",)

    def save(
        self, drafter: Drafter, directory: Path, tree_policy: dict[str, Any] | None, extra: dict[str, Any]
    ) -> None:
        """Writes into a temporary folder beside `directory` and renames it.

        Raises:
            ValueError: For a drafter of another class or without the target's tensors, or a reserved extra field.
        """
        from safetensors.torch import save_file

        if not isinstance(drafter, DSparkDrafter):
            raise ValueError(f"{type(self).__name__} stores a DSparkDrafter, not a {type(drafter).__name__}.")
        if not drafter.is_bound:
            raise ValueError("The checkpoint holds the target's embedding and head: call drafter.bind(target) first.")
        config = _config(drafter)
        if tree_policy is not None:
            config["tree_policy"] = tree_policy
        taken = sorted(extra.keys() & (config.keys() | set(_OWN_FIELDS)))
        if taken:
            raise ValueError(f"Extra fields {taken} are written by the checkpoint format itself; rename them.")
        config = {"num_anchors": _NUM_ANCHORS} | config | extra
        # A copy for each: a tied target's embedding and head share memory, which the file format refuses.
        state = {_file_key(key): value.detach().cpu().clone() for key, value in drafter.state_dict().items()}
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
            written = Path(temporary) / "new"
            written.mkdir()
            save_file(state, written / _WEIGHTS, metadata={"format": "pt"})
            text = json.dumps(config, indent=2, sort_keys=True)
            (written / "config.json").write_text(text + "\n", encoding="utf-8")
            _replace(written, directory, Path(temporary) / "old")

    def load(
        self, directory: Path, config: dict[str, Any], *, target: Target | None, dtype: torch.dtype | None
    ) -> DSparkDrafter:
        """Reads and checks a checkpoint folder.

        Raises:
            FileNotFoundError: When the weights are missing.
            ValueError: For settings that are not supported, a damaged file, or tensors that do not fit the config.
        """
        from safetensors import SafetensorError, safe_open

        _check_config(config, directory)
        drafter = DSparkDrafter(_target_spec(config, directory), **_options(config, directory))
        path = directory / _WEIGHTS
        if not path.is_file():
            raise FileNotFoundError(f"{directory} holds no {_WEIGHTS}.")
        expected = {_file_key(key): tuple(value.shape) for key, value in drafter.state_dict().items()}
        state: dict[str, Tensor] = {}
        try:
            with safe_open(path, framework="pt") as file:
                found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
                check_tensors(expected, found, str(path))
                for key in expected:
                    if target is None or not key.startswith(FROZEN_PREFIXES):
                        state[key] = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or not a safetensors file ({error}); copy it again.") from error
        _assign(drafter, state, dtype)
        drafter.recorded_policy = config.get("tree_policy")
        known = {*_config(drafter), *_OWN_FIELDS, *_IGNORED_FIELDS}
        drafter.extra = {key: value for key, value in config.items() if key not in known}
        if drafter.extra.get("num_anchors") == _NUM_ANCHORS:
            del drafter.extra["num_anchors"]
        if target is not None:
            drafter.bind(target)
        return drafter


# What Qwen3 configs carry and drafters do not use.
_IGNORED_FIELDS = ("initializer_range", "markov_head_type", "max_window_layers", "transformers_version", "use_cache")
# Anchors per sequence in the reference training; readers expect the field, decoding does not use it.
_NUM_ANCHORS = 512


def _file_key(key: str) -> str:
    for ours, theirs in _RENAMED.items():
        if key.startswith(ours):
            return theirs + key.removeprefix(ours)
    return key


def _assign(drafter: DSparkDrafter, state: dict[str, Tensor], dtype: torch.dtype | None) -> None:
    own = dtype if dtype is not None else state["fc.weight"].dtype
    drafter.to(own)
    drafter.load_state_dict({key: state[_file_key(key)] for key in drafter.trainable_state_dict()}, strict=False)
    for name in ("embed_tokens", "lm_head"):
        if f"{name}.weight" in state:
            weight = state[f"{name}.weight"]
            weight = weight if dtype is None else weight.to(dtype)
            getattr(drafter, name).weight = nn.Parameter(weight, requires_grad=False)


def _replace(written: Path, directory: Path, aside: Path) -> None:
    """Renames `written` to `directory`; other files of an earlier folder stay."""
    if directory.exists():
        directory.rename(aside)
    written.rename(directory)
    if aside.exists():
        for item in aside.iterdir():
            if not (directory / item.name).exists():
                shutil.move(str(item), directory / item.name)


def _config(drafter: DSparkDrafter) -> dict[str, Any]:
    spec = drafter.spec
    ends: int | list[int] | None = list(spec.eos_token_ids) or None
    if isinstance(ends, list) and len(ends) == 1:
        ends = ends[0]
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": drafter.block_size,
        "bos_token_id": spec.bos_token_id,
        "confidence_head_with_markov": drafter.confidence_with_markov,
        "dtype": str(drafter.fc.weight.dtype).removeprefix("torch."),
        "enable_confidence_head": drafter.has_confidence,
        "eos_token_id": ends,
        "head_dim": drafter.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "layer_types": ["full_attention"] * drafter.num_layers,
        "markov_rank": drafter.markov_rank,
        "mask_token_id": drafter.mask_token_id,
        "max_position_embeddings": spec.max_position_embeddings,
        "num_attention_heads": drafter.num_attention_heads,
        "num_hidden_layers": drafter.num_layers,
        "num_key_value_heads": drafter.num_key_value_heads,
        "num_target_layers": spec.num_layers,
        "pad_token_id": spec.pad_token_id,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": drafter.rope_parameters,
        "sliding_window": None,
        "target_layer_ids": list(drafter.layer_ids),
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": spec.vocab_size,
        "sample_from_anchor": drafter.sample_from_anchor,
        "block_attention": drafter.block_attention,
        "target_model_type": spec.model_type,
        "target_model_name_or_path": spec.name,
        "target_spec": dataclasses.asdict(spec),
    }
    if drafter.markov_rank:
        config["markov_head_type"] = drafter.markov_head
    return config


def _check_config(config: dict[str, Any], directory: Path) -> None:
    if config.get("sample_from_anchor", True) is not True:
        raise ValueError(
            f"{directory}: sample_from_anchor is {config['sample_from_anchor']!r}; only true (slot j predicts "
            f"the token at anchor + j + 1) can be read from this format."
        )
    fixed = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise ValueError(f"{directory}: {key} is {config[key]!r}; only {value!r} is supported.")


def _field(config: dict[str, Any], key: str, directory: Path) -> Any:
    if config.get(key) is None:
        raise ValueError(f"{directory / 'config.json'} has no `{key}`, which a DSpark checkpoint needs.")
    return config[key]


def _options(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    rank = config.get("markov_rank") or 0
    return {
        "num_layers": _field(config, "num_hidden_layers", directory),
        "block_size": _field(config, "block_size", directory),
        "head_dim": _field(config, "head_dim", directory),
        "markov_rank": rank,
        "markov_head": config.get("markov_head_type", "vanilla") if rank else "vanilla",
        "confidence": bool(config.get("enable_confidence_head", False)),
        "confidence_with_markov": bool(config.get("confidence_head_with_markov", False)),
        "target_layer_ids": _field(config, "target_layer_ids", directory),
        "mask_token_id": _field(config, "mask_token_id", directory),
        "intermediate_size": _field(config, "intermediate_size", directory),
        "num_attention_heads": _field(config, "num_attention_heads", directory),
        "num_key_value_heads": _field(config, "num_key_value_heads", directory),
        # DeepSpec's own files know no other kind.
        "block_attention": config.get("block_attention", "bidirectional"),
    }


def _target_spec(config: dict[str, Any], directory: Path) -> TargetSpec:
    """Returns the recorded target, or what a checkpoint from elsewhere tells of it (then without a fingerprint)."""
    recorded = config.get("target_spec")
    if recorded is not None:
        return TargetSpec(**{**recorded, "eos_token_ids": tuple(recorded["eos_token_ids"])})
    source = type("Config", (), config)
    return TargetSpec(
        name=str(config.get("target_model_name_or_path") or directory),
        model_type=str(config.get("target_model_type") or config.get("model_type")),
        vocab_size=_field(config, "vocab_size", directory),
        hidden_size=_field(config, "hidden_size", directory),
        num_layers=_field(config, "num_target_layers", directory),
        num_attention_heads=_field(config, "num_attention_heads", directory),
        num_key_value_heads=_field(config, "num_key_value_heads", directory),
        head_dim=_field(config, "head_dim", directory),
        intermediate_size=_field(config, "intermediate_size", directory),
        rms_norm_eps=_field(config, "rms_norm_eps", directory),
        rope_parameters=rope_parameters(source),  # type: ignore[arg-type]
        max_position_embeddings=_field(config, "max_position_embeddings", directory),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=end_tokens(source),
        pad_token_id=config.get("pad_token_id"),
        fingerprint="",
        mask_token_id=config.get("mask_token_id"),
    )
