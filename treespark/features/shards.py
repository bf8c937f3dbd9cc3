"""One file of stored features: a safetensors file that is read by slices and checks itself.

A shard holds `features` [T, (m + 1) * H] (tapped layers, then the final hidden state, of all documents one after
another), `keys` [D, 32] (the documents' addresses) and `lengths` [D] (their tokens). Its header names the identity
and the SHA-256 of all this. Shapes: T tokens, D documents, S tokens of a document, m tapped layers, H hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespark.features.identity import FeatureIdentity, document_key
from treespark.target import Target, TargetFeatures

FORMAT = 1
KEY_BYTES = 40  # per document: its address and its length
HEADER_BYTES = 680  # of a shard, about
_HASHED_ROWS = 4096  # at a time, so that verifying a shard takes little memory


def compute(target: Target, identity: FeatureIdentity, ids: Tensor) -> Tensor:
    """Runs the target over one document by itself, without padding or neighbours, so that nothing else matters.

    Args:
        target: The target.
        identity: Layers and stored dtype.
        ids: [S] token ids.

    Returns:
        [S, (m + 1) * H] on the target's device, in the stored dtype.

    Raises:
        ValueError: When the stored dtype cannot hold the numbers.
    """
    found = target.features(ids.long().unsqueeze(0).to(target.device), identity.layer_ids)
    exact = torch.cat([found.context[0], found.final[0]], dim=-1)
    stored = exact.to(identity.torch_dtype)
    if not bool(torch.isfinite(stored).all()):
        largest = float(exact.abs().max())
        raise ValueError(
            f"The target's features reach {largest:.3g}, which {identity.dtype} cannot hold: store them as bfloat16 or "
            "float32."
        )
    return stored


def split(stored: Tensor, hidden_size: int) -> TargetFeatures:
    """Returns the context [..., m*H] and final [..., H] features of stored rows [..., (m + 1) * H]."""
    return TargetFeatures(stored[..., :-hidden_size], stored[..., -hidden_size:])


def write_shard(
    path: Path, identity: FeatureIdentity, documents: Sequence[Tensor], rows: Sequence[Tensor], scratch: Path
) -> None:
    """Writes a shard beside its place and renames it: it is there whole or not at all.

    Equal arguments give equal bytes. A failed write leaves nothing behind.

    Args:
        path: Its place.
        identity: Of the features.
        documents: Token ids [S] of each document.
        rows: Features [S, (m + 1) * H] of each document.
        scratch: Folder on the same disk for unfinished files (the library leaves some of its own after a kill).

    Raises:
        OSError: When the disk is full or refuses.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    keys = torch.frombuffer(bytearray(b"".join(map(document_key, documents))), dtype=torch.uint8).view(-1, 32)
    tensors = {
        "features": torch.cat([row.cpu() for row in rows]),
        "keys": keys,
        "lengths": torch.tensor([len(ids) for ids in documents]),
    }
    header = {
        "format": FORMAT,
        "identity": identity.to_dict(),
        "num_documents": len(documents),
        "num_tokens": len(tensors["features"]),
        "sha256": _checksum(keys, tensors["lengths"], tensors["features"]),
    }
    try:
        # One metadata entry: the library writes several in any order, and equal content must be equal bytes.
        write_whole(
            path,
            scratch / f"new-{path.name}",
            lambda place: save_file(tensors, place, {"treespark": json.dumps(header)}),
        )
    except SafetensorError as error:  # the library's own class, also for a disk that is full
        raise OSError(f"{path} cannot be written ({error}).") from error


def write_whole(path: Path, temporary: Path, write: Callable[[Path], Any]) -> None:
    """Has `write` fill a temporary file, makes the system keep it, and renames it to its place."""
    try:
        write(temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Shard:
    """A shard that is read by slices: opening it maps the file and reads addresses and lengths only.

    Args:
        path: The file.

    Attributes:
        identity: Of the features.
        keys: Address of each document.
        starts: First row of each document, and the number of rows.
        num_bytes: Of the file.
        sha256: Of the content, as the header says it.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: When it is damaged, cut short or something else.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self.num_bytes = path.stat().st_size
            opened: Any = safe_open  # the library's methods are untyped
            self._file: Any = opened(path, framework="pt")
            header = json.loads((self._file.metadata() or {})["treespark"])
            self.identity = FeatureIdentity.from_dict(header["identity"])
            self.sha256, self.format = str(header["sha256"]), header["format"]
            self._keys, self._lengths = self._file.get_tensor("keys"), self._file.get_tensor("lengths")
            shape = tuple(self._file.get_slice("features").get_shape())
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged or no shard of features ({error}).") from error
        if self.format != FORMAT:
            raise ValueError(f"{path} has format {self.format}, this version reads {FORMAT}. Build the cache anew.")
        self.starts: list[int] = [0, *self._lengths.cumsum(0).tolist()]
        if shape != (self.starts[-1], self.identity.width) or len(self._keys) != len(self._lengths):
            raise ValueError(f"{path} is damaged: features of shape {list(shape)} for {self.starts[-1]} tokens.")
        packed = self._keys.numpy().tobytes()
        self.keys = [packed[start : start + 32] for start in range(0, len(packed), 32)]

    def read(self, index: int) -> Tensor:
        """Returns the stored rows [S, (m + 1) * H] of a document of the shard."""
        rows: Tensor = self._file.get_slice("features")[self.starts[index] : self.starts[index + 1]]
        return rows

    def is_intact(self) -> bool:
        """Whether the content has the checksum that was written with it; reads the whole file."""
        rows = self._file.get_slice("features")
        steps = range(0, self.starts[-1], _HASHED_ROWS)
        return _checksum(self._keys, self._lengths, *(rows[at : at + _HASHED_ROWS] for at in steps)) == self.sha256


def _checksum(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
