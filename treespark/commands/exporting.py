"""`treespark export`: a trained drafter as a folder that engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treespark.drafters import Drafter

_ENGINES = {
    "deepspec": "vLLM, SGLang, llama.cpp and TensorRT-LLM",
    "speculators": "vLLM and llama.cpp",
    "specforge": "SGLang",
}


def export(
    ckpt_path: str,
    format: str,
    output: str,
    target: str | None = None,
    without_embeddings: bool = False,
    dtype: str | None = None,
    results: str | None = None,
) -> None:
    """Writes a drafter as a checkpoint folder for other engines, with a model card.

    Args:
        ckpt_path: A checkpoint file (.ckpt) of `treespark fit`, or a folder or hub id of a drafter in any format.
        format: deepspec, speculators or specforge.
        output: Folder to write.
        target: The target model; by default the one that is recorded with the drafter.
        without_embeddings: Leave out the target's embedding and output head, for engines that share the target's.
            specforge never holds them.
        dtype: Of the written tensors, such as bfloat16; by default the checkpoint's.
        results: A results file of `treespark bench` for this drafter; the model card quotes it.

    Raises:
        FileNotFoundError: For a drafter, target or file that does not exist.
        ValueError: For a drafter that the format cannot express, and all that loading refuses.
    """
    from treespark.drafters import DSparkDrafter, writable_formats
    from treespark.drafters.base import EXTRA_FIELDS
    from treespark.export import model_card
    from treespark.registry import unknown

    formats = writable_formats()
    if format not in formats:
        raise unknown("format", format, formats)
    folder = Path(output).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output: {output} is a file; give the name of a folder.")
    figures = _results(results)
    drafter = _load(ckpt_path, target, dtype, needs_target=not without_embeddings and format != "specforge")
    if not isinstance(drafter, DSparkDrafter):
        raise ValueError(f"{ckpt_path} holds a {type(drafter).__name__}; only a DSparkDrafter can be exported.")
    extra: dict[str, Any] = {key: drafter.extra[key] for key in EXTRA_FIELDS if key in drafter.extra}
    card = model_card(drafter, drafter.recorded_policy, extra, recipe=_recipe(ckpt_path), results=figures)
    formats[format]().save(
        drafter,
        folder,
        drafter.recorded_policy,
        extra,
        embeddings=not without_embeddings,
        files={"README.md": card},
    )
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    print(f"{folder}: {format}, {size / 1e6:.1f} MB, read by {_ENGINES[format]}")
    if format != "specforge" and drafter.markov_rank and drafter.markov_head != "vanilla":
        print(
            f"Note: vLLM and SGLang read Markov heads of the kind 'vanilla' only; this one is '{drafter.markov_head}'."
        )


def _load(ckpt_path: str, target: str | None, dtype: str | None, needs_target: bool) -> Drafter:
    import torch

    from treespark.drafters import Drafter
    from treespark.drafters.source import open_drafter
    from treespark.target import Target
    from treespark.target.loading import parse_dtype

    wanted = None if dtype is None else parse_dtype(dtype)
    if Path(ckpt_path).expanduser().is_file():
        source = open_drafter(ckpt_path)
        stored = torch.load(ckpt_path, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
        wanted = wanted or next(iter(stored.values())).dtype
        return source.load(Target.load(target or source.target_name, dtype=wanted))
    drafter: Drafter = Drafter.from_pretrained(ckpt_path, dtype=wanted)
    if target or (needs_target and not drafter.is_bound):
        name = target or drafter.spec.name
        if not name:
            raise ValueError(f"{ckpt_path} does not say which target it was made for: give --target.")
        drafter.bind(Target.load(name, dtype=wanted or next(iter(drafter.trainable_state_dict().values())).dtype))
    return drafter


def _recipe(ckpt_path: str) -> str | None:
    """The resolved configuration in the run's folder, which holds `checkpoints/` or `drafter/`."""
    place = Path(ckpt_path).expanduser().resolve()
    for folder in list(place.parents)[:2]:
        if (folder / "config.yaml").is_file():
            return (folder / "config.yaml").read_text(encoding="utf-8")
    return None


def _results(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(found, dict) or "summaries" not in found:
        raise ValueError(f"{path}: expected a results file of `treespark bench`.")
    return found
