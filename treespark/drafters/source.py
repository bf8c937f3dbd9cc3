"""Drafters as users name them: a folder in any format, a hub id, or a checkpoint file of a training run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from treespark.drafters.base import EXTRA_FIELDS, Drafter
from treespark.drafters.formats import check_tensors
from treespark.registry import load_all
from treespark.target.loading import template_sha256

if TYPE_CHECKING:
    from torch import Tensor

    from treespark.target import Target, TargetSpec

_PREFIX = "drafter."
_MOST_DEPTHS = 4096
_DISTRIBUTED = "meta.pt"  # Lightning's mark of a folder with one part of a checkpoint for each process


@dataclass(frozen=True)
class DrafterSource:
    """A drafter that is about to be loaded.

    Attributes:
        path: What the user named.
        target_name: The target that it was trained for, as its trainer called it; empty if the checkpoint does not
            say.
        load: Builds the drafter in the target's precision and binds it to the target.
    """

    path: str
    target_name: str
    load: Callable[[Target], Drafter]


def open_drafter(path: str | Path) -> DrafterSource:
    """Opens a drafter's folder or checkpoint file.

    Args:
        path: A checkpoint folder, a hub id (owner/name), or a `.ckpt` file of `treespark fit`.

    Raises:
        FileNotFoundError: When there is no such path.
        ValueError: When the file is not a checkpoint of this framework. `load` raises ValueError for another target
            than the drafter's.
    """
    place = Path(path).expanduser()
    if not place.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)):
        return _open_folder(str(path))
    if not place.exists():
        raise FileNotFoundError(
            f"{path}: no such drafter. Give a checkpoint folder, a hub id (owner/name), or a checkpoint file (.ckpt) "
            "of `treespark fit`."
        )
    if (place / _DISTRIBUTED).is_file():
        raise ValueError(
            f"{path} is a checkpoint in parts, one for each process of a sharded training, and its index is pickled. "
            "Train with ModelParallelStrategy's save_distributed_checkpoint: false, or, if you trust it, make one file "
            f"of it: python -m lightning.pytorch.utilities.consolidate_checkpoint {path}"
        )
    return _open_folder(place) if place.is_dir() else _open_checkpoint(place)


def check_template(
    drafter: Drafter, target: Target, given: dict[str, Any] | None, allow_other: bool
) -> tuple[dict[str, Any], bool]:
    """Returns the chat template options to render with, and whether prompts look otherwise than in training.

    Args:
        drafter: The drafter.
        target: The target, whose template renders the prompts.
        given: Options that were asked for; None takes the recorded ones.
        allow_other: Whether others than the recorded ones may be used.

    Raises:
        ValueError: For other options, or another template, without `allow_other`: prompts would not look as they did
            in training.
    """
    known = drafter.extra.get("chat_template_sha256")
    other_text = known is not None and known != template_sha256(target.tokenizer)
    if other_text and not allow_other:
        raise ValueError(
            f"The drafter was trained with another chat template (SHA-256 {str(known)[:12]}) than '{target.spec.name}' "
            "has: restore the tokenizer's template, or set allow_other_template to compare on purpose."
        )
    recorded = drafter.extra.get("chat_template_kwargs")
    if given is None:
        return dict(recorded or {}), other_text
    other = recorded is not None and dict(recorded) != dict(given)
    if other and not allow_other:
        raise ValueError(
            f"The drafter was trained with the chat template options {dict(recorded or {})}, but {dict(given)} are "
            "given: leave chat_template_kwargs out, or set allow_other_template to compare on purpose."
        )
    return dict(given), other or other_text


def weights_hash(drafter: Drafter) -> str:
    """Returns the SHA-256 of the drafter's own tensors: the same weights in the same precision give the same text."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.trainable_state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _open_folder(folder: Path | str) -> DrafterSource:
    drafter: Drafter = Drafter.from_pretrained(folder)
    return DrafterSource(str(folder), drafter.spec.name, lambda target: _fit(drafter, target))


def _open_checkpoint(file: Path) -> DrafterSource:
    try:
        checkpoint: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        record, weights = checkpoint["treespark"], checkpoint["state_dict"]
        name, identity = str(record["target"]), str(record["fingerprint"])
    except Exception as error:  # unpickling raises whatever the bytes lead it to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{file}: not a checkpoint of `treespark fit` ({type(error).__name__}: {reason}). Give its .ckpt file, or "
            "a folder that save_pretrained wrote."
        ) from error

    def load(target: Target) -> Drafter:
        if identity != target.spec.fingerprint:
            raise ValueError(
                f"{file} was trained for the target '{name}' (identity {identity[:12]}), but '{target.spec.name}' "
                f"({target.spec.fingerprint[:12]}) was loaded. Give the target it was trained for."
            )
        load_all()
        held = {key.removeprefix(_PREFIX): value for key, value in weights.items() if key.startswith(_PREFIX)}
        drafter = _without_memory(record["drafter"], target.spec, held, file)
        drafter.load_state_dict(held, strict=False, assign=True)
        drafter.recorded_policy = record["policy"]
        drafter.extra = {key: record[key] for key in EXTRA_FIELDS if key in record}
        if "provenance" in drafter.extra:
            drafter.extra["provenance"] |= {"step": checkpoint.get("global_step")}
        return _fit(drafter, target)

    return DrafterSource(str(file), name, load)


def _without_memory(config: dict[str, Any], spec: TargetSpec, held: dict[str, Tensor], file: Path) -> Drafter:
    """Builds a recorded drafter without memory and compares it with the tensors that the file holds.

    Raises:
        ValueError: When they differ: options that claim sizes which no file has cost neither time nor memory.
    """
    options = dict(config["init_args"]) | {"target": spec}
    layers = len({key.split(".")[1] for key in held if key.startswith("layers.")})
    for name, most in (("num_layers", layers), ("block_size", _MOST_DEPTHS)):
        if not 1 <= options.get(name, 1) <= most:
            raise ValueError(f"{file}: the recorded {name} is {options[name]}; expected 1 to {most}.")
    with torch.device("meta"):
        drafter: Drafter = Drafter.from_config({"class_path": config["class_path"], "init_args": options})
    expected = {key: tuple(value.shape) for key, value in drafter.trainable_state_dict().items()}
    check_tensors(expected, {key: tuple(value.shape) for key, value in held.items()}, str(file))
    return drafter


def _fit(drafter: Drafter, target: Target) -> Drafter:
    drafter.bind(target)  # first: until then the embedding and the head may hold no memory that could be moved
    return drafter.to(device=target.device, dtype=target.dtype).eval()
