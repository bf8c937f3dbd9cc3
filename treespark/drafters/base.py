"""The base of all drafters, and the registry of checkpoint formats that `from_pretrained` asks.

Shapes: R rows, S context positions, A anchors per row, M anchors or requests, K depths, H hidden, m tapped layers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from treespark.drafters.attention import DraftContext
from treespark.drafters.proposer import DraftProposer
from treespark.registry import Registered
from treespark.target.head import apply_head
from treespark.target.spec import TargetSpec, check_mask_token

if TYPE_CHECKING:
    from treespark.target import Target

# The target's two tensors, shared with it and left out of training state.
FROZEN_PREFIXES = ("embed_tokens.", "lm_head.")


class Drafter(nn.Module, Registered, ABC, kind="drafter"):
    """A model that drafts the K tokens after an anchor from the target's hidden states before it.

    The target's embedding and output head are shared, not copied: until `bind` (or `from_pretrained`) they hold no
    memory.

    Args:
        spec: The target.
        block_size: K, the number of drafted depths, anchor excluded.
        layer_ids: Target layers whose outputs are the drafter's features.
        mask_token_id: Token of the slots after the anchor's.

    Attributes:
        sample_from_anchor: True: slot j predicts the token at anchor + j + 1.
        recorded_policy: Config of the tree policy that the drafter was trained with, or None.
        extra: Further fields of the checkpoint that it was loaded from.
    """

    format_name: ClassVar[str] = "DeepSpecFormat"
    sample_from_anchor: bool = True
    has_confidence: bool = False
    markov_rank: int = 0

    def __init__(self, spec: TargetSpec, block_size: int, layer_ids: tuple[int, ...], mask_token_id: int) -> None:
        super().__init__()
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 depth, got {block_size}.")
        check_mask_token(None, mask_token_id, spec)
        self.spec, self.block_size = spec, block_size
        self.layer_ids, self.mask_token_id = layer_ids, mask_token_id
        self.recorded_policy: dict[str, Any] | None = None
        self.extra: dict[str, Any] = {}
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size, device="meta").requires_grad_(False)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False, device="meta").requires_grad_(False)

    @abstractmethod
    def encode(self, features: Tensor, positions: Tensor, context: DraftContext | None = None) -> DraftContext:
        """Turns the target's hidden states into the context that slots attend to.

        Args:
            features: [R, S, m*H] tapped hidden states.
            positions: [R, S] positions of the tokens.
            context: An earlier context of the same rows, to which the new positions are appended in place.
        """

    @abstractmethod
    def draft(
        self,
        context: DraftContext,
        anchor_tokens: Tensor,
        anchor_positions: Tensor,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the slots' states [R, A, K, H] after the final norm, for A anchors in each row.

        Args:
            context: From `encode`.
            anchor_tokens: [R, A] token ids.
            anchor_positions: [R, A] positions of the anchors.
            context_mask: [R, A, S] True where an anchor may see a context position (before it, same document); None:
                everything. Anchors never see each other's blocks.
        """

    @abstractmethod
    def propose(self, hidden: Tensor, root_tokens: Tensor) -> DraftProposer:
        """Returns the distributions that slots' states [M, K, H] give after anchors root_tokens [M]."""

    @property
    def is_bound(self) -> bool:
        """Whether the embedding and the output head hold values."""
        return not self.lm_head.weight.is_meta

    def bind(self, target: Target) -> None:
        """Shares the target's embedding and output head, without a copy.

        Raises:
            ValueError: When the drafter was made for another target, or the mask token can occur in a text.
        """
        spec, mine = target.spec, self.spec
        same_sizes = (spec.vocab_size, spec.hidden_size, spec.num_layers) == (
            mine.vocab_size,
            mine.hidden_size,
            mine.num_layers,
        )
        if mine.fingerprint:
            same = same_sizes and mine.fingerprint == spec.fingerprint
        else:
            # A checkpoint from elsewhere knows no fingerprint; its own copy of the head tells.
            same = same_sizes and (not self.is_bound or _close(self.lm_head.weight, target.output_head().weight))
        if not same:
            raise ValueError(
                f"The drafter was made for the target '{mine.name}' ({_sizes(mine)}), not for '{spec.name}' "
                f"({_sizes(spec)}). Load the target that it was trained with."
            )
        check_mask_token(target.tokenizer if target.has_tokenizer else None, self.mask_token_id, spec)
        self.embed_tokens.weight = target.input_embedding().weight
        self.lm_head.weight = target.output_head().weight

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Returns the target's head on slots' states: [..., H] -> [..., V]."""
        weight = self.lm_head.weight
        return apply_head(hidden.to(weight.dtype), weight)

    def trainable_state_dict(self) -> dict[str, Tensor]:
        """Returns every tensor but the target's embedding and head."""
        return {key: value for key, value in self.state_dict().items() if not key.startswith(FROZEN_PREFIXES)}

    def load_trainable_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads what `trainable_state_dict` gave.

        Raises:
            ValueError: For missing, unexpected or mis-shaped tensors.
        """
        check_tensors(
            {key: tuple(value.shape) for key, value in self.trainable_state_dict().items()},
            {key: tuple(value.shape) for key, value in state.items()},
            "the drafter's training state",
        )
        self.load_state_dict(state, strict=False)

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        tree_policy: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Writes the drafter as a checkpoint folder, replacing an earlier one only when all is written.

        Args:
            directory: Folder of `config.json` and `model.safetensors`.
            tree_policy: Config of the policy to decode with; None keeps the recorded one.
            extra: Further fields of `config.json` (provenance, chat template settings); None keeps the loaded ones.

        Raises:
            ValueError: Before `bind`, or for an extra field that the format itself uses.
        """
        policy = self.recorded_policy if tree_policy is None else tree_policy
        fields = self.extra if extra is None else extra
        CheckpointFormat.get(self.format_name)().save(self, Path(directory), policy, fields)

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, target: Target | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Loads a checkpoint folder in any registered format.

        Args:
            directory: Folder with a `config.json`.
            target: If given, the drafter is bound to it, and the file's copy of its tensors is not read.
            dtype: Of the drafter's own tensors; None for the file's.

        Raises:
            FileNotFoundError: When a file is missing.
            ValueError: For an unknown architecture, a damaged file, tensors that do not fit the config, or another
                target.
        """
        folder = Path(directory)
        path = folder / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no config.json; expected the folder of a drafter checkpoint.")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}.") from error
        found = (config.get("architectures") or [None])[0] if isinstance(config, dict) else None
        formats = {name: item for item in CheckpointFormat.available().values() for name in item.architectures}
        if found not in formats:
            raise ValueError(
                f"{path} names the architecture {found!r}, which is no drafter that can be read. "
                f"Known: {', '.join(sorted(formats))}."
            )
        drafter = formats[found]().load(folder, config, target=target, dtype=dtype)
        if not isinstance(drafter, cls):
            raise ValueError(f"{folder} holds a {type(drafter).__name__}; expected a {cls.__name__}.")
        return drafter


class CheckpointFormat(Registered, ABC, kind="format"):
    """A layout of drafter checkpoints on disk; subclasses register themselves.

    Attributes:
        architectures: Values of `architectures` in config.json that this format reads.
    """

    architectures: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def save(
        self, drafter: Drafter, directory: Path, tree_policy: dict[str, Any] | None, extra: dict[str, Any]
    ) -> None:
        """Writes the drafter into a folder."""

    @abstractmethod
    def load(
        self, directory: Path, config: dict[str, Any], *, target: Target | None, dtype: torch.dtype | None
    ) -> Drafter:
        """Reads a drafter from a folder whose config.json is `config`."""


def check_tensors(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], where: str) -> None:
    """Compares the shapes of tensors with the expected ones.

    Raises:
        ValueError: For missing, unexpected or mis-shaped tensors.
    """
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ValueError(f"Tensors are missing in {where}: {_listed(missing)}.")
    unexpected = sorted(found.keys() - expected.keys())
    if unexpected:
        raise ValueError(f"Unexpected tensors in {where}: {_listed(unexpected)}. Do the settings fit the file?")
    wrong = [
        f"{key} has {list(found[key])}, expected {list(shape)}"
        for key, shape in expected.items()
        if found[key] != shape
    ]
    if wrong:
        raise ValueError(f"Tensors of another shape in {where}: {_listed(wrong)}. Do the settings fit the file?")


def _listed(items: list[str], shown: int = 4) -> str:
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return "; ".join(items[:shown]) + more


def _sizes(spec: TargetSpec) -> str:
    identity = f", fingerprint {spec.fingerprint[:12]}" if spec.fingerprint else ""
    return f"{spec.num_layers} layers, hidden {spec.hidden_size}, vocabulary {spec.vocab_size}{identity}"


def _close(mine: Tensor, theirs: Tensor) -> bool:
    theirs = theirs.to(device=mine.device)
    return torch.equal(mine.to(torch.bfloat16), theirs.to(torch.bfloat16))
