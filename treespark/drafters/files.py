"""Checkpoint folders on disk: headers are checked before anything is allocated, and writing is all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = WEIGHTS + ".index.json"
_LARGEST_JSON = 2**24  # bytes; a config has thousands
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ValueError: When the file is something else, or far larger than any configuration.
    """
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, which no configuration needs.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}.")
    return content


class Weights:
    """The tensors of a checkpoint folder, in one safetensors file or in several with an index.

    Only headers are read at first. The library compares every shape with the bytes that the file really has, so a
    header cannot claim more memory than the file takes on disk.

    Args:
        directory: The folder.

    Attributes:
        shapes: Shape of each tensor.

    Raises:
        FileNotFoundError: When a file is missing.
        ValueError: For a damaged file, or an index that names files elsewhere.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.place = str(directory / WEIGHTS)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        for path in _files(directory):
            try:
                with safe_open(path, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118  # the handle is no dictionary
                        self.shapes[key] = tuple(file.get_slice(key).get_shape())
                        self._file_of[key] = path
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Reads tensors.

        Raises:
            ValueError: When the file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        tensors: dict[str, Tensor] = {}
        by_file: dict[Path, list[str]] = {}
        for key in keys:
            by_file.setdefault(self._file_of[key], []).append(key)
        for path, wanted in by_file.items():
            try:
                with safe_open(path, framework="pt") as file:
                    tensors |= {key: file.get_tensor(key) for key in wanted}
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
        return tensors


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged or not a safetensors file ({error}); copy it again.")


def _files(directory: Path) -> list[Path]:
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
            for name in names.values()
        ):
            raise ValueError(f"{index}: expected a `weight_map` of tensors to .safetensors files of the same folder.")
        files = [directory / name for name in sorted(set(names.values()))]
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(f"{directory} holds no {file.name}, which {INDEX} names.")
        return files
    others = sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", *_PICKLED))
    found = f"; found {', '.join(others[:3])}" if others else ""
    pickled = ". Pickled weights can run code and are not read" if any(n.endswith(_PICKLED) for n in others) else ""
    raise FileNotFoundError(f"{directory} holds no {WEIGHTS}{found}{pickled}.")


def write_folder(
    directory: Path, config: Mapping[str, Any], state: dict[str, Tensor], files: Mapping[str, str] | None = None
) -> None:
    """Writes a checkpoint folder beside its place and renames it, so that a reader sees the old one or the new one.

    The configuration is written last: a folder that an interruption left unfinished does not load.

    Args:
        directory: The folder; other files of an earlier one stay.
        config: Content of `config.json`.
        state: The tensors; none may share memory with another.
        files: Further text files, by name.
    """
    from safetensors.torch import save_file

    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
        written = Path(temporary) / "new"
        written.mkdir()
        save_file(state, written / WEIGHTS, metadata={"format": "pt"})
        for name, content in {**(files or {}), CONFIG: text}.items():
            (written / name).write_text(content, encoding="utf-8")
        for path in [*written.iterdir(), written]:
            _flush(path)
        _replace(written, directory, Path(temporary) / "old")
        _flush(directory.parent)


def _flush(path: Path) -> None:
    """Has the system write a file or a folder to the disk, where it can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # folders cannot be opened everywhere
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _replace(written: Path, directory: Path, aside: Path) -> None:
    if directory.exists():
        directory.rename(aside)
    written.rename(directory)
    if aside.exists():
        for item in aside.iterdir():
            # Weights of an earlier folder in several files would contradict the new single file.
            stale = item.name == INDEX or item.name.startswith("model-")
            if not stale and not (directory / item.name).exists():
                shutil.move(str(item), directory / item.name)
