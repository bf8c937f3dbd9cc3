"""Checkpoints with flat keys, and the native format among them: DeepSpec's, which serving engines read.

Source: arXiv 2607.05147 and the code that its authors released.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from treespark.drafters.base import EXTRA_FIELDS, Drafter
from treespark.drafters.dspark import DSparkDrafter
from treespark.drafters.fields import Fields
from treespark.drafters.files import CONFIG, Weights, write_folder
from treespark.drafters.formats import CheckpointFormat, check_tensors
from treespark.target.spec import TargetSpec, end_tokens, rope_parameters

if TYPE_CHECKING:
    from treespark.target import Target

# Names of modules: ours -> the file's.
_RENAMED = {"markov.": "markov_head."}
_SHARED = ("embed_tokens.weight", "lm_head.weight")
# Our fields, which every format carries beside its own.
_OWN_FIELDS = (
    "sample_from_anchor",
    "block_attention",
    "tree_policy",
    "target_model_type",
    "target_model_name_or_path",
    "target_spec",
)
# What others' configurations carry and drafters do not use; `auto_map` would point to code.
_IGNORED_FIELDS = ("auto_map", "initializer_range", "max_window_layers", "transformers_version", "use_cache")
# Anchors per sequence in the reference training; readers expect the field, decoding does not use it.
_NUM_ANCHORS = 512


class FlatFormat(CheckpointFormat):
    """Base of the formats whose file has DeepSpec's flat keys; they differ in their config.json.

    Attributes:
        ignored_tensors: Prefixes of tensors that need not be read.
        block_attentions: What the format's readers understand.
        holds_embeddings: Whether a file may hold the target's embedding and head.
    """

    ignored_tensors: ClassVar[tuple[str, ...]] = ("rotary_emb.",)
    block_attentions: ClassVar[tuple[str, ...]] = ("bidirectional",)
    holds_embeddings: ClassVar[bool] = True

    @abstractmethod
    def describe(self, drafter: DSparkDrafter) -> dict[str, Any]:
        """Returns the content of config.json, without our own fields.

        Raises:
            ValueError: For a drafter that the format cannot express.
        """

    @abstractmethod
    def parse(self, fields: Fields) -> tuple[TargetSpec, dict[str, Any]]:
        """Returns what a config.json tells of the target, and the options of the drafter.

        Raises:
            ValueError: For settings that are missing or not supported, or a slot layout that cannot be told.
        """

    def tensors(self, drafter: DSparkDrafter) -> dict[str, Tensor]:
        """Returns the file's tensors by the file's names."""
        if drafter.draft_ids is not None:
            raise ValueError(
                f"The {self.name or type(self).__name__} layout has no reduced draft vocabulary; use speculators."
            )
        return {_file_key(key): value for key, value in drafter.state_dict().items()}

    def vocabulary(self, fields: Fields, tensors: dict[str, Tensor]) -> Tensor | None:
        """Takes the description of a reduced vocabulary out of `tensors` and returns its tokens, if there is one."""
        return None

    def vocabulary_shapes(self, spec: TargetSpec, options: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors that `vocabulary` takes out."""
        return {}

    def save(
        self,
        drafter: Drafter,
        directory: Path,
        tree_policy: dict[str, Any] | None,
        extra: dict[str, Any],
        *,
        embeddings: bool = True,
        files: Mapping[str, str] | None = None,
    ) -> None:
        """Writes beside `directory` and renames; see the base class."""
        if not isinstance(drafter, DSparkDrafter):
            raise ValueError(f"{type(self).__name__} stores a DSparkDrafter, not a {type(drafter).__name__}.")
        if drafter.block_attention not in self.block_attentions:
            raise ValueError(
                f"The {self.name or type(self).__name__} layout cannot say block_attention: {drafter.block_attention}, "
                "and its readers would assume bidirectional blocks. Save it in the deepspec layout."
            )
        embeddings = embeddings and self.holds_embeddings
        if embeddings and not drafter.is_bound:
            raise ValueError("The checkpoint holds the target's embedding and head: call drafter.bind(target) first.")
        config = self.describe(drafter) | {
            "sample_from_anchor": drafter.sample_from_anchor,
            "block_attention": drafter.block_attention,
            "target_model_type": drafter.spec.model_type,
            "target_model_name_or_path": drafter.spec.name,
            "target_spec": dataclasses.asdict(drafter.spec),
        }
        if tree_policy is not None:
            config["tree_policy"] = tree_policy
        taken = sorted(extra.keys() & (config.keys() | set(_OWN_FIELDS)))
        if taken:
            raise ValueError(f"Extra fields {taken} are written by the checkpoint format itself; rename them.")
        state = {key: value for key, value in self.tensors(drafter).items() if embeddings or key not in _SHARED}
        # A copy for each: a tied target's embedding and head share memory, which the file format refuses.
        state = {key: value.detach().cpu().clone() for key, value in state.items()}
        write_folder(directory, {"num_anchors": _NUM_ANCHORS} | config | extra, state, files)

    def load(
        self, directory: Path, config: dict[str, Any], *, target: Target | None, dtype: torch.dtype | None
    ) -> DSparkDrafter:
        """Reads and checks a checkpoint folder: first the config, then the headers, then the tensors.

        Raises:
            FileNotFoundError: When the weights are missing.
            ValueError: For settings that are not supported, a damaged file, or tensors that do not fit the config.
        """
        fields = Fields(config, str(directory / CONFIG))
        weights = Weights(directory)
        spec, options = self.parse(fields)
        found = {key: shape for key, shape in weights.shapes.items() if not key.startswith(self.ignored_tensors)}
        _check_sizes(options, found, weights.place)
        with torch.device("meta"):  # no memory until the file's headers are known to fit
            drafter = DSparkDrafter(spec, **options)
        expected = {_file_key(key): tuple(value.shape) for key, value in drafter.state_dict().items()}
        expected.pop("draft_ids", None)
        expected |= self.vocabulary_shapes(spec, options)
        check_tensors(
            {key: shape for key, shape in expected.items() if key in found or key not in _SHARED}, found, weights.place
        )
        tensors = weights.read(key for key in found if target is None or key not in _shared_with(target, options))
        drafter.draft_ids = self.vocabulary(fields, tensors)
        _assign(drafter, tensors, dtype, weights.place)
        drafter.recorded_policy = config.get("tree_policy")
        known = {*self.describe(drafter), *config.keys() & {*_OWN_FIELDS, *_IGNORED_FIELDS}, "markov_head_type"}
        drafter.extra = self.carried({key: value for key, value in config.items() if key not in known})
        if target is not None:
            drafter.bind(target)
        return drafter

    def carried(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Returns what is kept of the fields that the format does not know: our own in a foreign file."""
        return {key: value for key, value in extra.items() if key in EXTRA_FIELDS}


class DeepSpecFormat(FlatFormat):
    """`config.json` is a Qwen3 config filled with the target's sizes; `model.safetensors` holds flat keys.

    `model_type` stays `qwen3`, so the architecture tells what it is. Slot j predicts the token at anchor + j + 1.
    """

    name = "deepspec"
    architectures = ("Qwen3DSparkModel",)
    block_attentions = ("bidirectional", "causal")

    def describe(self, drafter: DSparkDrafter) -> dict[str, Any]:
        """See the base class."""
        if not drafter.sample_from_anchor:
            raise ValueError(
                "The deepspec layout is read as 'slot j predicts the token at anchor + j + 1', but this drafter has "
                "sample_from_anchor: false; engines would accept next to nothing. Export it as speculators, or as "
                "specforge where it has no Markov head."
            )
        config = qwen3_config(drafter) | {
            "architectures": list(self.architectures),
            "block_size": drafter.block_size,
            "confidence_head_with_markov": drafter.confidence_with_markov,
            "enable_confidence_head": drafter.has_confidence,
            "markov_rank": drafter.markov_rank,
            "mask_token_id": drafter.mask_token_id,
            "num_target_layers": drafter.spec.num_layers,
            "target_layer_ids": list(drafter.layer_ids),
        }
        if drafter.markov_rank:
            config["markov_head_type"] = drafter.markov_head
        return config

    def parse(self, fields: Fields) -> tuple[TargetSpec, dict[str, Any]]:
        """See the base class."""
        fields.only(sample_from_anchor=True)
        options = backbone_options(fields) | head_options(fields)
        options["block_size"] = fields.integer("block_size")
        # DeepSpec's own files know no other kind.
        options["block_attention"] = fields.get("block_attention", "bidirectional")
        options["target_layer_ids"] = fields.integers("target_layer_ids")
        options["mask_token_id"] = fields.integer("mask_token_id")
        return target_spec(fields, fields, fields.integer("num_target_layers"), options["mask_token_id"]), options

    def carried(self, extra: dict[str, Any]) -> dict[str, Any]:
        """In our own format every further field stays."""
        if extra.get("num_anchors") == _NUM_ANCHORS:
            del extra["num_anchors"]
        return extra


def qwen3_config(drafter: DSparkDrafter) -> dict[str, Any]:
    """Returns the fields of the Qwen3 config that describes a drafter's layers, filled with the target's sizes."""
    spec = drafter.spec
    ends: int | list[int] | None = list(spec.eos_token_ids) or None
    if isinstance(ends, list) and len(ends) == 1:
        ends = ends[0]
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": spec.bos_token_id,
        "dtype": str(drafter.fc.weight.dtype).removeprefix("torch."),
        "eos_token_id": ends,
        "head_dim": drafter.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "layer_types": ["full_attention"] * drafter.num_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "num_attention_heads": drafter.num_attention_heads,
        "num_hidden_layers": drafter.num_layers,
        "num_key_value_heads": drafter.num_key_value_heads,
        "pad_token_id": spec.pad_token_id,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": drafter.rope_parameters,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": spec.vocab_size,
    }


def backbone_options(fields: Fields) -> dict[str, Any]:
    """Returns the drafter's options that its Qwen3 config tells.

    Raises:
        ValueError: For layers that drafters here do not have.
    """
    fields.only(hidden_act="silu", attention_bias=False, use_sliding_window=False, is_causal=False)
    kinds = set(fields.get("layer_types", []))
    if kinds - {"full_attention"}:
        raise ValueError(f"{fields.place}: layers of type {sorted(kinds)} found; only full attention is supported.")
    heads = fields.integer("num_attention_heads")
    return {
        "num_layers": fields.integer("num_hidden_layers"),
        "head_dim": fields.integer("head_dim"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("num_key_value_heads", heads),
    }


def head_options(fields: Fields) -> dict[str, Any]:
    """Returns the drafter's options about its Markov head and its confidence head."""
    rank = fields.integer("markov_rank", 0)
    return {
        "markov_rank": rank,
        "markov_head": str(fields.get("markov_head_type", "vanilla")) if rank else "vanilla",
        "confidence": fields.flag("enable_confidence_head", False),
        "confidence_with_markov": fields.flag("confidence_head_with_markov", False),
    }


def target_spec(fields: Fields, layers: Fields, num_layers: int, mask_token_id: int, name: str = "") -> TargetSpec:
    """Returns the recorded target, or what a checkpoint from elsewhere tells of it (then without a fingerprint).

    Args:
        fields: The configuration.
        layers: The part of it that describes the drafter's layers.
        num_layers: Of the target; 0 for unknown.
        mask_token_id: The drafter's.
        name: Of the target, if the format tells it.
    """
    recorded = fields.section("target_spec").values
    if recorded:
        try:
            return TargetSpec(**{**recorded, "eos_token_ids": tuple(recorded["eos_token_ids"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"{fields.place}: `target_spec` is not one that was written here ({error}).") from error
    source: Any = type("Config", (), layers.values)
    layers.section("rope_parameters").only(partial_rotary_factor=1.0)
    heads = layers.integer("num_attention_heads")
    return TargetSpec(
        name=str(fields.get("target_model_name_or_path", name)),
        model_type=str(fields.get("target_model_type", layers.get("model_type"))),
        vocab_size=layers.integer("vocab_size"),
        hidden_size=layers.integer("hidden_size"),
        num_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=layers.integer("num_key_value_heads", heads),
        head_dim=layers.integer("head_dim"),
        intermediate_size=layers.integer("intermediate_size"),
        rms_norm_eps=layers.number("rms_norm_eps"),
        rope_parameters=rope_parameters(source),
        max_position_embeddings=layers.integer("max_position_embeddings"),
        bos_token_id=layers.get("bos_token_id"),
        eos_token_ids=end_tokens(source),
        pad_token_id=layers.get("pad_token_id"),
        fingerprint="",
        mask_token_id=mask_token_id,
    )


def _file_key(key: str) -> str:
    for ours, theirs in _RENAMED.items():
        if key.startswith(ours):
            return theirs + key.removeprefix(ours)
    return key


def _shared_with(target: Target | None, options: dict[str, Any]) -> tuple[str, ...]:
    """Tensors that come from the target; a reduced vocabulary's head is the file's own."""
    return _SHARED[:1] if options.get("draft_vocab_size") else _SHARED


def _check_sizes(options: dict[str, Any], found: dict[str, tuple[int, ...]], place: str) -> None:
    """Compares with the headers what would take time or memory even without tensors."""
    layers = {key.split(".")[1] for key in found if key.startswith("layers.")}
    sizes = {"num_hidden_layers": (options["num_layers"], len(layers))}
    norm = found.get("layers.0.self_attn.q_norm.weight")
    if norm is not None:
        sizes["head_dim"] = (options["head_dim"], norm[0] if norm else 0)
    for name, (claimed, held) in sizes.items():
        if claimed != held:
            raise ValueError(f"{place}: the config says {name} {claimed}, but the file holds {held}. Do they fit?")
    if not 1 <= options["block_size"] <= 4096:
        raise ValueError(f"{place}: the config says block_size {options['block_size']}; expected 1 to 4096 depths.")


def _assign(drafter: DSparkDrafter, tensors: dict[str, Tensor], dtype: torch.dtype | None, place: str) -> None:
    stored = tensors["fc.weight"].dtype
    if stored not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"{place} stores {stored}; expected float32, bfloat16, float16 or float64.")
    own = stored if dtype is None else dtype
    state = {}
    for key in drafter.trainable_state_dict():
        if key != "draft_ids":
            state[key] = tensors[_file_key(key)].to(own)
    drafter.load_state_dict(state, strict=False, assign=True)
    for name in ("embed_tokens", "lm_head"):
        if f"{name}.weight" in tensors:
            weight = tensors[f"{name}.weight"]
            weight = weight if dtype is None else weight.to(dtype)
            getattr(drafter, name).weight = nn.Parameter(weight, requires_grad=False)
