"""A drafter's distributions for M anchors: base logits once, a Markov correction for each parent.

Shapes: M anchors or requests, K depths, P parents, T tokens of a parent, k children, H hidden, c carry, V vocabulary.
Only the base logits [M, K, V] are kept; selected log-probabilities are `gather - logsumexp`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from treespark.distributions import PlainRows, RowRecorder, shared
from treespark.drafters.confidence import ConfidenceHead
from treespark.drafters.corrections import CorrectedRows, Corrections, SlotRows, at_depth
from treespark.drafters.markov import MarkovHead
from treespark.selection import at_least_float32, selected_log_probs, top_children
from treespark.tree import Expansion


class DraftProposer:
    """What one backbone pass proposes; implements `treespark.tree.Proposer`.

    Args:
        hidden: [M, K, H] states of the slots after the drafter's final norm.
        root_tokens: [M] anchor tokens.
        head: Maps hidden states to the base logits (the target's own output head).
        markov: The Markov head, or None.
        confidence: The confidence head, or None.
        draft_ids: [V_draft] the tokens that `head` and `markov` have logits for, ascending, where these are not all of
            the vocabulary; the others can never be drafted (logit -inf).
        vocab_size: V, needed with `draft_ids`.

    Attributes:
        differentiable: Whether gradients were enabled when it was made; its logits then have one, whoever asks first.
        num_requests: Requests that decode side by side, which a policy may mind; 1 where the rows are anchors.
    """

    def __init__(
        self,
        hidden: Tensor,
        root_tokens: Tensor,
        head: Callable[[Tensor], Tensor],
        markov: MarkovHead | None = None,
        confidence: ConfidenceHead | None = None,
        draft_ids: Tensor | None = None,
        vocab_size: int = 0,
    ) -> None:
        self.hidden, self.root_tokens, self.num_requests = hidden, root_tokens, 1
        self._draft_ids, self._vocab_size = draft_ids, vocab_size
        self._head, self._markov, self._confidence = head, markov, confidence
        self.differentiable = torch.is_grad_enabled()

    @property
    def depths(self) -> int:
        """Number of depths K."""
        return self.hidden.shape[1]

    @property
    def vocab_size(self) -> int:
        """Number of tokens V."""
        return self.base_logits.shape[-1] if self._draft_ids is None else self._vocab_size

    @property
    def has_confidence(self) -> bool:
        """Whether there is a confidence head."""
        return self._confidence is not None

    @shared
    def base_logits(self) -> Tensor:
        """Logits U_d [M, K, V], shared by every parent of a depth (arXiv 2610.20175 §3.1)."""
        return self._head(self.hidden) if self._draft_ids is None else self._widen(self._own_logits)

    def prepare(self) -> None:
        """Computes the base logits now, which else happens when they are first used."""
        self._own_logits  # noqa: B018  # cached

    @property
    def _own_logits(self) -> Tensor:
        """U_d of the tokens that can be drafted: [M, K, V_draft]."""
        return self.base_logits if self._draft_ids is None else self._reduced_logits

    @shared
    def _reduced_logits(self) -> Tensor:
        return self._head(self.hidden)

    def _widen(self, logits: Tensor) -> Tensor:
        """Puts logits [..., V_draft] at their tokens' places in [..., V]."""
        if self._draft_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self._vocab_size), -torch.inf)
        return full.index_copy(-1, self._draft_ids, logits)

    @cached_property
    def _hidden_confidence(self) -> Tensor:
        assert self._confidence is not None
        return self._confidence.from_hidden(self.hidden)

    def root_carry(self) -> Tensor:
        """Returns the state that the root inherits: zeros [M, 1, c], c = 0 unless the head carries a state."""
        if self._markov is None:
            return self.hidden.new_zeros(len(self.root_tokens), 1, 0)
        return self._markov.root_carry(self.hidden)

    def _at(self, values: Tensor, depth: int | Tensor) -> Tensor:
        """Picks `values[:, depth - 1]` of [M, K, X]: [M, 1, X], or [M, P, X] for depths [M, P]."""
        return at_depth(values, depth)

    def logits(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the conditional logits U_d + b(parent) [M, P, V], and the states [M, P, c] of their children.

        Args:
            depth: Of the children, 1..K; a tensor [M, P] when parents differ.
            parents: [M, P] token ids.
            carry: [M, P, c] states that the parents inherited.
        """
        logits, inherited = self._conditional(depth, parents, carry)
        return self._widen(logits), inherited

    def _conditional(self, depth: int | Tensor, parents: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """Same as `logits`, over the tokens that can be drafted: [M, P, V_draft]."""
        base = self._at(self._own_logits, depth)
        if self._markov is None:
            return base.expand(-1, parents.shape[1], -1), carry
        latents, inherited = self._markov.step(parents, carry, self._at(self.hidden, depth))
        return base + self._markov.bias(latents), inherited

    def _top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest of the tokens that can be drafted, as tokens of the target, and their log-probabilities."""
        tokens, log_probs = top_children(logits, k)
        return tokens if self._draft_ids is None else self._draft_ids[tokens], log_probs

    def expand(self, depth: int | Tensor, parents: Tensor, carry: Tensor, k: int) -> Expansion:
        """Proposes the k best children of each parent, with their log-probabilities given the path.

        Args:
            depth: Of the children, 1..K; a tensor [M, P] when parents differ.
            parents: [M, P] token ids.
            carry: [M, P, c] states that the parents inherited.
            k: Children of each parent, 1..V.
        """
        logits, inherited = self._conditional(depth, parents, carry)
        return Expansion(*self._top(logits, k), inherited, self._log_confidence(depth, parents))

    def score(self, depth: int | Tensor, parents: Tensor, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities [M, P, T] of children tokens [M, P, T], differentiable, and their states."""
        logits, inherited = self.logits(depth, parents, carry)
        return selected_log_probs(logits, tokens), inherited

    def marginals(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns the k best tokens of each depth and their log-probabilities [M, K, k], without any correction."""
        return self._top(self._own_logits, k)

    def path_logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits [M, K, V] along one path: row d-1 predicts depth d after parent tokens[:, d-1].

        Args:
            tokens: [M, K]; column 0 is the anchor itself, column d the path's token at depth d.
        """
        if self._markov is None:
            return self.base_logits
        if self._draft_ids is None:
            return self._corrections.path(tokens, self.hidden)
        return self._widen(self._own_logits + self._markov.bias(self._markov.path(tokens, self.hidden)))

    @shared
    def _corrections(self) -> Corrections:
        assert self._markov is not None
        return Corrections(self._markov, self.base_logits)

    def record(self, count: int | None) -> RowRecorder:
        """Returns a recorder of conditional logits whose gradients are computed together; see `RecordingProposer`.

        Args:
            count: Parents to make room for at once, of all anchors together; None where nobody knows.
        """
        if self._draft_ids is not None:
            return PlainRows(self)
        if self._markov is None:
            return SlotRows(self.base_logits)
        return CorrectedRows(self.hidden, self._corrections, self.hidden.shape[:2].numel() if count is None else count)

    def confidence_logits(self, parents: Tensor, detach: bool = False) -> Tensor:
        """Returns the logits [M, K] of the one-step acceptance probability along a path.

        Args:
            parents: [M, K]; column d-1 is the parent of depth d (column 0 the anchor).
            detach: Whether the head's inputs are detached, so that only the head itself learns from it.

        Raises:
            ValueError: When the drafter has no confidence head.
        """
        if self._confidence is None:
            raise ValueError("The drafter has no confidence head; build it with confidence=True.")
        logits = self._confidence.from_hidden(self.hidden.detach() if detach else self.hidden)
        if self._markov is not None and self._confidence.with_markov:
            embedded = self._markov.embed(parents)
            logits = logits + self._confidence.from_parent(embedded.detach() if detach else embedded)
        return logits

    def _log_confidence(self, depth: int | Tensor, parents: Tensor) -> Tensor | None:
        if self._confidence is None:
            return None
        logits = self._at(self._hidden_confidence.unsqueeze(-1), depth).squeeze(-1)
        if self._markov is not None and self._confidence.with_markov:
            logits = logits + self._confidence.from_parent(self._markov.embed(parents))
        logits = logits.expand_as(parents)
        return F.logsigmoid(at_least_float32(logits))
