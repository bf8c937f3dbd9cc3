"""The registry of checkpoint formats, and finding the one that a folder or a hub id is in."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from treespark.drafters.files import CONFIG, INDEX, read_json
from treespark.registry import Registered, load_formats

if TYPE_CHECKING:
    from treespark.drafters.base import Drafter
    from treespark.target import Target


class CheckpointFormat(Registered, ABC, kind="format"):
    """A layout of drafter checkpoints on disk; subclasses register themselves.

    Attributes:
        name: What command lines call it; empty for a format that is only read.
        architectures: Values of `architectures` in config.json that this format reads.
    """

    name: ClassVar[str] = ""
    architectures: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
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
        """Writes the drafter into a folder.

        Args:
            drafter: The drafter.
            directory: The folder.
            tree_policy: Config of the policy to decode with.
            extra: Further fields of `config.json`.
            embeddings: Whether the file holds the target's embedding and output head.
            files: Further text files, by name.

        Raises:
            ValueError: For a drafter that the format cannot express.
        """

    @abstractmethod
    def load(
        self, directory: Path, config: dict[str, Any], *, target: Target | None, dtype: torch.dtype | None
    ) -> Drafter:
        """Reads a drafter from a folder whose config.json is `config`."""


def load_drafter(name: str | Path, revision: str | None, target: Target | None, dtype: torch.dtype | None) -> Drafter:
    """Loads a checkpoint in whichever registered format it is; see `Drafter.from_pretrained`."""
    folder = _locate(name, revision)
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG}; expected the folder of a drafter checkpoint.")
    config = read_json(path)
    names = config.get("architectures")
    found = names[0] if isinstance(names, list) and names else None
    load_formats()
    formats = {name: item for item in CheckpointFormat.available().values() for name in item.architectures}
    if not isinstance(found, str) or found not in formats:
        raise ValueError(
            f"{path} names the architecture {found!r}, which is no drafter that can be read. "
            f"Known: {', '.join(sorted(formats))}."
        )
    return formats[found]().load(folder, config, target=target, dtype=dtype)


def writable_formats() -> dict[str, type[CheckpointFormat]]:
    """Returns the formats that can be written, by the name that command lines use."""
    load_formats()
    return {item.name: item for item in CheckpointFormat.available().values() if item.name}


def _locate(name: str | Path, revision: str | None) -> Path:
    """The folder: a local one, or the download of a hub id (configuration and safetensors, nothing else)."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{folder} is a local folder, which has no revision '{revision}'.")
        return folder
    if folder.exists():
        raise ValueError(f"{folder} is a file; expected the folder of a drafter checkpoint.")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
        raise FileNotFoundError(
            f"{name}: no such folder, and no hub id (owner/name). "
            "A training leaves `drafter` and `checkpoints` in its folder (trainer.default_root_dir)."
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = [CONFIG, "model*.safetensors", INDEX]
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(
            f"{name}: no such folder, and the hub gives no such checkpoint"
            f"{f' at revision {revision}' if revision else ''} ({reason})."
        ) from error


def check_tensors(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], where: str) -> None:
    """Compares the shapes of tensors with the expected ones.

    Raises:
        ValueError: For missing, unexpected or mis-shaped tensors.
    """
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ValueError(f"Tensors are missing in {where}: {listed(missing)}.")
    unexpected = sorted(found.keys() - expected.keys())
    if unexpected:
        raise ValueError(f"Unexpected tensors in {where}: {listed(unexpected)}. Do the settings fit the file?")
    wrong = [
        f"{key} has {list(found[key])}, expected {list(shape)}"
        for key, shape in expected.items()
        if found[key] != shape
    ]
    if wrong:
        raise ValueError(f"Tensors of another shape in {where}: {listed(wrong)}. Do the settings fit the file?")


def listed(items: list[str], shown: int = 4) -> str:
    """Joins the first items and counts the rest."""
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return "; ".join(items[:shown]) + more
