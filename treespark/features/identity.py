"""What stored features depend on: the target's weights, the tapped layers, the dtypes, and a document's own tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from treespark.target import Target

STORED_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# float64 targets exist in tests and studies of precision; they are kept as they are.
_ALSO_READ = {"float64": torch.float64}
_SAMPLED = 64  # values per weight: any fine-tuning moves nearly all values of the weights that it touches

_WORDS = {
    "fingerprint": "the target's sizes or output embedding",
    "weights": "the target's weights",
    "target_dtype": "the target's dtype",
    "layer_ids": "the tapped layers",
    "hidden_size": "the hidden size",
    "dtype": "the stored dtype",
}


@dataclass(frozen=True)
class FeatureIdentity:
    """Everything but the tokens that a stored feature depends on; two stores of one identity are interchangeable.

    Attributes:
        fingerprint: `TargetSpec.fingerprint`.
        weights: SHA-256 over samples of every weight, which tells a fine-tuned target from its base.
        target_dtype: In which the target computed.
        layer_ids: Tapped layers, 0-based, in the order of the context features.
        hidden_size: Width H of a hidden state.
        dtype: Of the stored numbers.
    """

    fingerprint: str
    weights: str
    target_dtype: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str

    @classmethod
    def of(cls, target: Target, layer_ids: Sequence[int], dtype: str | None = None) -> Self:
        """Returns the identity of features that `target` gives.

        Args:
            target: The target.
            layer_ids: Its tapped layers.
            dtype: Of the stored numbers; None takes the target's own.

        Raises:
            ValueError: For a dtype that features are not stored in.
        """
        own = str(target.dtype).removeprefix("torch.")
        return cls(
            target.spec.fingerprint,
            weights_digest(target),
            own,
            tuple(layer_ids),
            target.spec.hidden_size,
            check_dtype(dtype or own),
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Reads what `to_dict` gave.

        Raises:
            TypeError: For other fields.
        """
        return cls(**fields | {"layer_ids": tuple(fields.get("layer_ids", ()))})

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self) | {"layer_ids": list(self.layer_ids)}

    @property
    def width(self) -> int:
        """Numbers per token: (m + 1) * H for m tapped layers and the final hidden state."""
        return (len(self.layer_ids) + 1) * self.hidden_size

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the stored numbers."""
        return (STORED_DTYPES | _ALSO_READ)[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk: (m + 1) * H * bytes per number."""
        return self.width * self.torch_dtype.itemsize

    @property
    def digest(self) -> str:
        """A hash of the identity, short enough for the name of a folder."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, here: FeatureIdentity) -> str:
        """Says in words how the identity of a store differs from the one that is needed here; empty if it does not."""
        theirs, ours = self.to_dict(), here.to_dict()
        return describe_differences({key: (theirs[key], ours[key]) for key in theirs}, _WORDS)


def describe_differences(pairs: dict[str, tuple[Any, Any]], words: dict[str, str]) -> str:
    """Says which values differ.

    Args:
        pairs: What is there and what is here, by key; equal pairs are left out.
        words: What each key is called.

    >>> describe_differences({"a": (1, 2), "b": (3, 3)}, {"a": "the layers"})
    'the layers (1 there, 2 here)'
    """
    differing = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    return ", ".join(f"{words.get(k, k)} ({_short(a)} there, {_short(b)} here)" for k, (a, b) in differing.items())


def _short(value: Any) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 32 else str(value)


def check_dtype(dtype: str) -> str:
    """Returns the name of a dtype that features can be stored in.

    Raises:
        ValueError: For another one.
    """
    name = dtype.removeprefix("torch.")
    if name not in STORED_DTYPES | _ALSO_READ:
        raise ValueError(f"Features are stored as {', '.join(STORED_DTYPES)}, not as {dtype!r}.")
    return name


def document_key(ids: Tensor) -> bytes:
    """Returns the SHA-256 of a document's token ids [S], 32 bytes: the address of its features in any store."""
    return hashlib.sha256(ids.detach().to("cpu", torch.int32).contiguous().numpy().tobytes()).digest()


@torch.no_grad()
def weights_digest(target: Target) -> str:
    """Returns the SHA-256 over the name, shape and evenly spaced values of every weight of the target.

    The target's own fingerprint hashes sizes and output embedding, which a fine-tuned target often shares with its
    base; their features differ.
    """
    digest = hashlib.sha256()
    for name, parameter in target.model.named_parameters():
        # A sharded weight is gathered first: every process comes by here.
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(f"{name} {list(whole.shape)}".encode())
        if whole.is_meta or whole.numel() == 0:
            continue
        places = torch.linspace(0, whole.numel() - 1, min(_SAMPLED, whole.numel()), dtype=torch.float64).long()
        values = whole.detach().reshape(-1)[places.to(whole.device)]
        digest.update(values.cpu().double().numpy().tobytes())
    return digest.hexdigest()
