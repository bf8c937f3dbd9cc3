"""Starting a new drafter from another one, or from layers of its target.

Shapes: H hidden, D head width, G heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treespark.drafters.base import Drafter
from treespark.drafters.dspark import DSparkDrafter

if TYPE_CHECKING:
    from treespark.target import Target

# What the drafter's function depends on without any tensor telling: these must agree.
_SETTINGS = (
    "layer_ids",
    "mask_token_id",
    "sample_from_anchor",
    "block_attention",
    "num_attention_heads",
    "num_key_value_heads",
)


def start_from_drafter(drafter: Drafter, source: Drafter, where: str) -> str:
    """Loads a drafter's tensors into a new one for the same target, and says in one line what was not loaded.

    Equal shapes give an equal function. Where the new heads are wider, values and outputs are kept exactly (each head's
    new value rows are random, its new output columns zero); queries and keys start anew, since rotary frequencies
    depend on the width. A source with a reduced vocabulary gets Markov rows of zero for the tokens it lacked.

    Args:
        drafter: The new drafter, changed in place.
        source: The drafter to start from.
        where: What messages call the source.

    Raises:
        ValueError: When the two read their target differently, so that nothing would be gained.
    """
    if not isinstance(drafter, DSparkDrafter) or not isinstance(source, DSparkDrafter):
        kinds = f"{type(source).__name__} into a {type(drafter).__name__}"
        raise ValueError(f"init_from: {where}: cannot load a {kinds}; only a DSparkDrafter can be a start.")
    settings = {name: (getattr(source, name), getattr(drafter, name)) for name in _SETTINGS}
    settings["rope_parameters"] = (source.rope_parameters, drafter.rope_parameters)
    settings["rms_norm_eps"] = (source.spec.rms_norm_eps, drafter.spec.rms_norm_eps)
    for name, (theirs, mine) in settings.items():
        if theirs != mine:
            option = "target_layer_ids" if name == "layer_ids" else name
            raise ValueError(
                f"init_from: {where} has {option} {_plain(theirs)}, the new drafter {_plain(mine)}: its weights would "
                f"mean nothing. Set the drafter's {option} to {_plain(theirs)} or start from another drafter."
            )
    state = _full_vocabulary(source)
    if drafter.draft_ids is not None:
        state["draft_ids"] = drafter.draft_ids
        if "markov.markov_w2.weight" in state:
            state["markov.markov_w2.weight"] = state["markov.markov_w2.weight"][drafter.draft_ids.cpu()]
    own = drafter.trainable_state_dict()
    missing = _load(drafter, state, source.head_dim)
    unused = sorted(_short(key, whole_layer=True) for key in state.keys() - own.keys())
    notes = [f"{_joined(missing)} start anew"] if missing else []
    notes += [f"{_joined(unused)} of the source are left out"] if unused else []
    if source.draft_ids is not None and drafter.draft_ids is None:
        notes.append(f"the reduced vocabulary ({len(source.draft_ids)} tokens) is gone: all tokens can be drafted")
    if source.block_size != drafter.block_size:
        notes.append(f"block_size is {drafter.block_size}, was {source.block_size}")
    return f"Started from {where}: " + ("; ".join(notes) if notes else "everything was loaded") + "."


def start_from_target(drafter: Drafter, target: Target, layers: list[int]) -> str:
    """Loads decoder layers of the target as the drafter's, and its final norm; says what was not loaded.

    Args:
        drafter: The new drafter, changed in place.
        target: Its target.
        layers: Target layer for each drafter layer, the first for the first.

    Raises:
        ValueError: For another number of layers, or layers that the target does not have.
    """
    if not isinstance(drafter, DSparkDrafter):
        raise ValueError(f"init_from_target_layers: a {type(drafter).__name__} has no layers like the target's.")
    if len(layers) != drafter.num_layers:
        raise ValueError(
            f"init_from_target_layers names {len(layers)} layers; expected one for each of the drafter's "
            f"{drafter.num_layers}."
        )
    state = {f"layers.{i}.{key}": item for i, j in enumerate(layers) for key, item in target.layer_state(j).items()}
    state["norm.weight"] = target.final_norm()
    missing = _load(drafter, state, target.spec.head_dim)
    kept = f"{_joined(missing)} start anew" if missing else "everything was loaded"
    return f"Started from the target's layers {layers}: {kept}."


def _load(drafter: DSparkDrafter, state: dict[str, Tensor], head_dim: int) -> list[str]:
    """Copies what fits; returns the short names of the drafter's tensors that keep their fresh start."""
    missing: dict[str, None] = {}
    with torch.no_grad():
        for key, mine in drafter.trainable_state_dict().items():
            theirs = state.get(key)
            if theirs is not None and _padded(key):
                theirs = _widened(key, theirs, mine, head_dim, drafter.head_dim)
            elif theirs is not None and head_dim != drafter.head_dim and _queries_keys(key):
                theirs = None
            if theirs is None or theirs.shape != mine.shape:
                layer = ".".join(key.split(".")[:2]) + "."
                missing[_short(key, whole_layer=not any(name.startswith(layer) for name in state))] = None
            else:
                mine.copy_(theirs)  # the state dictionary shares the parameters' memory
    return sorted(missing)


def _padded(key: str) -> bool:
    return key.endswith(("self_attn.v_proj.weight", "self_attn.o_proj.weight"))


def _queries_keys(key: str) -> bool:
    return key.endswith(tuple(f"self_attn.{i}_{kind}.weight" for i in "qk" for kind in ("proj", "norm")))


def _widened(key: str, theirs: Tensor, mine: Tensor, old: int, new: int) -> Tensor | None:
    """Pads inside each head's block: rows of v [G*D, H], columns of o [H, G*D]."""
    if old == new:
        return theirs
    values = key.endswith("v_proj.weight")
    dim = 0 if values else 1
    fits = theirs.shape[dim] % old == 0 and theirs.shape[dim] // old == mine.shape[dim] // new
    if old > new or not fits or theirs.shape[1 - dim] != mine.shape[1 - dim]:
        return None
    heads = mine.shape[dim] // new
    # The new value rows keep their random start; without output columns they do not matter until training moves both.
    if values:
        padded = mine.clone()
        padded.view(heads, new, -1)[:, :old] = theirs.view(heads, old, -1).to(mine.dtype)
    else:
        padded = torch.zeros_like(mine)
        padded.view(-1, heads, new)[..., :old] = theirs.view(-1, heads, old).to(mine.dtype)
    return padded


def _full_vocabulary(source: DSparkDrafter) -> dict[str, Tensor]:
    state = {key: value for key, value in source.trainable_state_dict().items() if key != "draft_ids"}
    if source.draft_ids is not None and "markov.markov_w2.weight" in state:
        rows = state["markov.markov_w2.weight"]
        full = rows.new_zeros(source.spec.vocab_size, rows.shape[1])
        state["markov.markov_w2.weight"] = full.index_copy(0, source.draft_ids.to(rows.device), rows)
    return state


def _short(key: str, whole_layer: bool) -> str:
    """A tensor's name without the number of its layer, where all layers share its fate, or that layer's name."""
    parts = key.removesuffix(".weight").split(".")
    if parts[0] != "layers":
        return ".".join(parts)
    return ".".join(parts[:2] if whole_layer else parts[2:])


def _joined(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
