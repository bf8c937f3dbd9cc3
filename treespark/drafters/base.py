"""The base of all drafters.

Shapes: R rows, S context positions, A anchors per row, M anchors or requests, K depths, H hidden, m tapped layers.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from treespark.drafters.attention import DraftContext
from treespark.drafters.formats import CheckpointFormat, check_tensors, load_drafter
from treespark.drafters.proposer import DraftProposer
from treespark.drafters.reduced import ReducedProposer
from treespark.registry import Registered, load_formats
from treespark.target.linear import apply_head
from treespark.target.spec import TargetSpec, check_mask_token

if TYPE_CHECKING:
    from treespark.target import Target

# The target's two tensors, shared with it and left out of training state.
FROZEN_PREFIXES = ("embed_tokens.", "lm_head.")

# Fields of a checkpoint that are ours in every format: how prompts were rendered, and where the weights come from.
EXTRA_FIELDS = ("chat_template_kwargs", "chat_template_sha256", "provenance")


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
        sample_from_anchor: True: slot j predicts the token at anchor + j + 1. False: it predicts the one at
            anchor + j, so that the anchor's own slot is unread and a block has K + 1 slots.
        recorded_policy: Config of the tree policy that the drafter was trained with, or None.
        extra: Further fields of the checkpoint that it was loaded from.
    """

    format_name: str = "DeepSpecFormat"
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
        self.draft_ids: Tensor | None = None
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

    def propose_reduced(self, hidden: Tensor, root_tokens: Tensor) -> ReducedProposer:
        """Returns the same over the draft vocabulary's own numbers, for training.

        Raises:
            ValueError: For a drafter without a reduced vocabulary.
        """
        raise ValueError(f"{type(self).__name__} has no reduced vocabulary.")

    def select_tokens(self, draft_ids: Tensor, target: Target | None = None) -> None:
        """Sets the tokens that can be drafted, with the target's head of them where one is given.

        Raises:
            ValueError: For a drafter without a reduced vocabulary.
        """
        raise ValueError(f"{type(self).__name__} has no reduced vocabulary.")

    @property
    def is_bound(self) -> bool:
        """Whether the embedding and the output head hold values."""
        return not (self.lm_head.weight.is_meta or self.embed_tokens.weight.is_meta)

    def bind(self, target: Target) -> None:
        """Shares the target's embedding and output head, without a copy.

        Raises:
            ValueError: When the drafter was made for another target, or the mask token can occur in a text.
        """
        spec, mine = target.spec, self.spec
        same = (spec.vocab_size, spec.hidden_size) == (mine.vocab_size, mine.hidden_size)
        same &= mine.num_layers in (0, spec.num_layers)
        if mine.fingerprint:
            same &= mine.fingerprint == spec.fingerprint
        else:
            # A checkpoint from elsewhere knows no fingerprint; its own copies of the target's tensors tell.
            same &= _close(self.embed_tokens.weight, target.input_embedding().weight)
            same &= _close(self.lm_head.weight, self._head_of(target))
        if not same:
            raise ValueError(
                f"The drafter was made for the target '{mine.name or 'unknown'}' ({_sizes(mine)}), not for "
                f"'{spec.name}' ({_sizes(spec)}). Load the target that it was trained with."
            )
        if max(self.layer_ids) > spec.num_layers - 2:
            raise ValueError(
                f"The drafter taps the layers {list(self.layer_ids)}, but the target '{spec.name}' offers 0 to "
                f"{spec.num_layers - 2}. Load the target that it was trained with."
            )
        check_mask_token(target.tokenizer if target.has_tokenizer else None, self.mask_token_id, spec)
        if not mine.fingerprint:  # from now on its identity is known, and is kept when it is saved again
            self.spec = dataclasses.replace(
                mine, name=spec.name, num_layers=spec.num_layers, fingerprint=spec.fingerprint
            )
        self.embed_tokens.weight = target.input_embedding().weight
        self.lm_head.weight = self._head_of(target)

    def _head_of(self, target: Target) -> Tensor:
        """The rows of the target's output head that this drafter uses: all of them, shared."""
        return target.output_head().weight

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Returns the target's head on slots' states: [..., H] -> [..., V]."""
        weight = self.lm_head.weight
        return apply_head(hidden.to(weight.dtype), weight)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that training moves."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

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
        load_formats()
        CheckpointFormat.get(self.format_name)().save(self, Path(directory), policy, fields)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        revision: str | None = None,
        target: Target | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Loads a checkpoint in any registered format: a folder or a hub id.

        Args:
            directory: Folder with a `config.json`, or a hub id such as "owner/name".
            revision: Of a hub id.
            target: If given, the drafter is bound to it, and the file's copy of its tensors is not read.
            dtype: Of the drafter's own tensors; None for the file's.

        Raises:
            FileNotFoundError: When the folder, the hub id or a file is missing.
            ValueError: For an unknown architecture, a slot layout that cannot be told, a damaged file, tensors that do
                not fit the config, or another target.
        """
        drafter = load_drafter(directory, revision, target, dtype)
        if not isinstance(drafter, cls):
            raise ValueError(f"{directory} holds a {type(drafter).__name__}; expected a {cls.__name__}.")
        return drafter


def _sizes(spec: TargetSpec) -> str:
    identity = f", fingerprint {spec.fingerprint[:12]}" if spec.fingerprint else ""
    layers = f"{spec.num_layers} layers" if spec.num_layers else "unknown number of layers"
    return f"{layers}, hidden {spec.hidden_size}, vocabulary {spec.vocab_size}{identity}"


def _close(mine: Tensor, theirs: Tensor) -> bool:
    """Whether a file's copy of a tensor is the target's; a copy that the file does not hold says nothing."""
    if mine.is_meta:
        return True
    return torch.equal(mine.to(torch.bfloat16), theirs.to(device=mine.device, dtype=torch.bfloat16))
