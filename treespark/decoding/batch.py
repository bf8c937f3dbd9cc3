"""The decoding loop: requests side by side; plain decoding, chains and trees, one request or many are the same code.

Shapes: n requests that decode, P prompt tokens, W = most packed nodes of a row + root, K depths, L longest text,
H hidden, m taps, V vocabulary.

Between rounds a row of the target's cache and of the drafter's context holds a request's committed text without its
last token. That token is the anchor of the next round: its own hidden state is not known until the target has
verified the round. Texts have different lengths; a round appends all rows' trees behind the longest text, and the
accepted paths then move to the ends of their own texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespark.decoding.policy import resolve_policy
from treespark.decoding.record import DecodeResult, Round
from treespark.decoding.request import Request
from treespark.decoding.verify import root_tree, tree_attention_mask, trim, walk
from treespark.policies import TreePolicy
from treespark.selection import top_tokens
from treespark.target.transfer import send
from treespark.tree import PackedTree

if TYPE_CHECKING:
    from treespark.drafters import DraftContext, Drafter
    from treespark.target import Target
    from treespark.target.cache import TargetCache


class BatchDecoding:
    """Decodes requests side by side: finished ones leave, waiting ones enter.

    `run` does all of it; `add` and `step` are its parts, for callers whose requests come over time.

    Args:
        target: The target model.
        drafter: The drafter, bound to `target`; None decodes plainly, one token a round.
        policy: Tree policy; None takes the drafter's recorded one.
        max_batch_size: The most requests that decode side by side.
        generator: Source of randomness for policies that draw.
        on_verified: Receives a round's packed trees and [n, W] which of their nodes were accepted (`judged_edges`).

    Attributes:
        cache: The target's keys and values, or None before the first request.
        context: The drafter's keys and values of the committed texts, likewise.
        places: The request in each row; None where one has left.

    Raises:
        ValueError: For a batch size below 1, a drafter of another target, or a policy out of range for the drafter.
    """

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter | None = None,
        policy: TreePolicy | None = None,
        allow_other_policy: bool = False,
        max_batch_size: int = 8,
        generator: torch.Generator | None = None,
        on_verified: Callable[[PackedTree, Tensor], None] | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}.")
        self.target, self.drafter, self.generator = target, drafter, generator
        self.max_batch_size, self.on_verified = max_batch_size, on_verified
        self.policy: TreePolicy | None = None
        self.recorded = False
        self.layer_ids: tuple[int, ...] = ()
        if drafter is not None:
            _check_drafter(target, drafter)
            self.policy, self.recorded = resolve_policy(drafter, policy, allow_other_policy)
            self.layer_ids = tuple(drafter.layer_ids)
        self.cache: TargetCache | None = None
        self.context: DraftContext | None = None
        self.places: list[Request | None] = []
        self._mark = 0.0

    @property
    def active(self) -> list[Request]:
        """The requests that still decode, in order of their rows."""
        return [request for request in self.places if request is not None]

    def run(self, requests: Iterable[Request]) -> None:
        """Decodes requests to their ends, in their order as rows become free.

        `timing` of each also gets "first_token" and "finished": seconds from the call to its first and last token.
        """
        begin = perf_counter()
        waiting = deque(requests)
        while waiting or self.active:
            while waiting and len(self.active) < self.max_batch_size:
                request = waiting.popleft()
                if request.finish_reason is None:
                    self.add(request)
                    request.timing["first_token"] = request.timing["finished"] = perf_counter() - begin
            for request, _ in self.step() if self.active else ():
                request.timing["finished"] = perf_counter() - begin

    @torch.no_grad()
    def add(self, request: Request) -> None:
        """Reads the prompt of a request and commits the target's first token; the request then takes part in rounds.

        Raises:
            ValueError: When the batch is full, or the request is over already.
        """
        if request.finish_reason is not None or len(self.active) >= self.max_batch_size:
            raise ValueError(
                f"Cannot add a request: it is over already ({request.finish_reason}), or all {self.max_batch_size} "
                "rows are taken."
            )
        begin = perf_counter()
        row = next((row for row, held in enumerate(self.places) if held is None), len(self.places))
        length = request.prompt.shape[1]
        if self.cache is None:
            nodes = self.policy.num_nodes(self.drafter.block_size) if self.policy and self.drafter else 0
            # Room for a usual answer at once; the cache grows by itself past it.
            room = length + min(request.rules.max_new_tokens, 1024) + nodes + 1
            self.cache = self.target.new_cache(room, rows=self.max_batch_size)
        self.cache.select(row, row + 1, 0)
        output = self.target(request.prompt, self.cache, self.layer_ids, num_logits=1)
        if self.max_batch_size > 1:
            self.cache.clear(row, length)
        request.commit([self._choose(output.logits, [request])[0]])
        if request.finish_reason is None:
            if self.drafter is not None:
                positions = torch.arange(length, device=request.prompt.device).unsqueeze(0)
                encoded = self.drafter.encode(output.features.context, positions)
                if self.max_batch_size == 1:
                    self.context = encoded
                elif self.context is None:
                    self.context = encoded.spread(self.max_batch_size)
                else:
                    self.context.put(row, encoded)
            self.places[row : row + 1] = [request]
        request.timing["prefill"] += perf_counter() - begin
        request.hand_out()

    @torch.no_grad()
    def step(self) -> list[tuple[Request, Round]]:
        """Drafts, verifies and commits one round of every active request, and returns their records."""
        begin = self._mark = perf_counter()
        self._close_gaps()
        requests = self.active
        assert self.cache is not None and requests, "add a request first; no rounds after the end"
        lengths = [request.length for request in requests]
        start = max(lengths)
        device = requests[0].prompt.device
        state = send([[r.tokens[-1] for r in requests], lengths], device).unsqueeze(-1)
        anchors, positions = state.unbind()  # [n, 1] each
        seen = None
        if min(lengths) < start:
            seen = (torch.arange(start, device=device) < positions).unsqueeze(1)  # [n, 1, L]
        self.cache.select(0, len(requests), start)
        if self.context is not None and self.max_batch_size > 1:
            self.context.select(len(requests), start)
        packed = self._draft(requests, anchors, positions, seen)

        mask, ancestors = None, None
        if packed.tokens.shape[1] > 1 or seen is not None:
            ancestors = packed.ancestor_mask()
            mask = tree_attention_mask(ancestors, start, seen)
        output = self.target(packed.tokens, self.cache, self.layer_ids, positions + packed.depths, mask)
        if self.drafter is None:
            nodes: list[list[int]] = [[] for _ in requests]
            paths = [[token] for token in self._choose(output.logits, requests)]
        else:
            choices = top_tokens(output.logits, 1)[..., 0]  # [n, W]
            accepted = walk(packed, choices, ancestors).accepted
            if self.on_verified is not None:
                self.on_verified(packed, accepted)
            # The one transfer of the verification.
            table = torch.stack([accepted.long(), packed.tokens, choices], 1).tolist()
            nodes = [[index for index in range(1, len(row[0])) if row[0][index]] for row in table]
            paths = [
                [row[1][index] for index in found] + [row[2][found[-1] if found else 0]]
                for row, found in zip(table, nodes, strict=True)
            ]
        self._lap("verify", requests)

        records = []
        kept: list[list[int]] = []
        for request, found, path in zip(requests, nodes, paths, strict=True):
            committed = request.rules.cut(path, len(request.tokens))
            records.append(Round.of(len(found), len(committed)))
            request.rounds.append(records[-1])
            # The last committed token becomes the anchor: its key and value, if computed at all, do not stay.
            kept.append([0, *found[: len(committed) - 1]])
            request.commit(committed)
        self._keep(lengths, kept)
        self._lap("commit", requests)
        going = [row for row, request in enumerate(requests) if request.finish_reason is None]
        if self.drafter is not None and going:
            self._encode(output.features.context, going, lengths, kept)
            self._lap("draft", requests)
        seconds = perf_counter() - begin
        for row, request in enumerate(requests):
            request.timing["decode"] += seconds
            if request.finish_reason is not None:
                self.places[row] = None
        for request in requests:
            request.hand_out()
        return list(zip(requests, records, strict=True))

    def result(self, request: Request) -> DecodeResult:
        """Returns the answer to a request that is over."""
        assert request.finish_reason is not None
        return DecodeResult(
            tokens=request.tokens,
            rounds=request.rounds,
            finish_reason=request.finish_reason,
            timing=request.timing,
            policy=self.policy.config() if self.policy else None,
            recorded=self.recorded,
            gaps=request.gaps if self.drafter is None else None,
        )

    def _draft(self, requests: list[Request], anchors: Tensor, positions: Tensor, seen: Tensor | None) -> PackedTree:
        """Drafts and packs the round's trees below `anchors` [n, 1]; bare roots without a drafter."""
        if self.drafter is None:
            return root_tree(anchors)
        assert self.policy is not None and self.context is not None
        # All that a row's context holds lies before its anchor; without a mask where the rows are equally long.
        hidden = self.drafter.draft(self.context, anchors, positions, seen)  # [n, 1, K, H]
        self._lap("draft", requests)
        proposer = self.drafter.propose(hidden.flatten(0, 1), anchors[:, 0])
        proposer.num_requests = len(requests)
        proposer.prepare()
        self._lap("head", requests)
        packed = self.policy.build(proposer, generator=self.generator).pack()
        packed = trim(packed, int(packed.num_nodes.max()))
        self._lap("build", requests)
        return packed

    def _choose(self, logits: Tensor, requests: list[Request]) -> list[int]:
        """Returns the target's tokens at [n, 1, V]; plain decoding also notes how far the second best was behind."""
        last = logits[:, 0]
        if self.drafter is not None:
            tokens: list[int] = top_tokens(last, 1)[:, 0].tolist()
            return tokens
        two = top_tokens(last, 2)
        best = last.gather(1, two).double()
        found = torch.stack([two[:, 0].double(), best[:, 0] - best[:, 1]], 1).tolist()
        for request, (_, gap) in zip(requests, found, strict=True):
            request.gaps.append(gap)
        return [int(token) for token, _ in found]

    def _keep(self, lengths: list[int], kept: list[list[int]]) -> None:
        """Moves the kept nodes' keys and values to the ends of their own texts; the rest is forgotten."""
        assert self.cache is not None
        start = max(lengths)
        if len(lengths) == 1:
            self.cache.keep(start, kept[0])
            return
        moves = [
            (row, start + node, length + offset)
            for row, (length, nodes) in enumerate(zip(lengths, kept, strict=True))
            for offset, node in enumerate(nodes)
            if start + node != length + offset
        ]
        if moves:
            rows, sources, destinations = send(list(zip(*moves, strict=True)), self.target.device)
            self.cache.move(rows, sources, destinations)
        longest = max(length + len(nodes) for length, nodes in zip(lengths, kept, strict=True))
        self.cache.select(0, len(lengths), longest)

    def _encode(self, features: Tensor, going: list[int], lengths: list[int], kept: list[list[int]]) -> None:
        """Appends the kept nodes' features [n, W, m*H] to the drafter's context, in the rows that go on."""
        assert self.drafter is not None and self.context is not None
        entries = [(row, node, lengths[row] + offset) for row in going for offset, node in enumerate(kept[row])]
        rows, nodes, places = send(list(zip(*entries, strict=True)), features.device)
        new, positions = features[rows, nodes].unsqueeze(0), places.unsqueeze(0)  # all rows' positions in one row
        if self.max_batch_size == 1:
            self.context = self.drafter.encode(new, positions, self.context)
        else:
            end = max(place for *_, place in entries) + 1
            self.context.write(rows, places, end, self.drafter.encode(new, positions))

    def _close_gaps(self) -> None:
        """Moves the last rows to where requests have left, so that the active rows are the first ones."""
        for row in range(len(self.places)):
            while self.places and self.places[-1] is None:
                self.places.pop()
            if row < len(self.places) and self.places[row] is None:
                request = self.places.pop()
                assert request is not None and self.cache is not None
                self.cache.copy_row(len(self.places), row, request.length)
                if self.context is not None:
                    self.context.copy_row(len(self.places), row, request.length)
                self.places[row] = request

    def _lap(self, part: str, requests: list[Request]) -> None:
        now = perf_counter()
        for request in requests:
            request.timing[part] += now - self._mark
        self._mark = now


def _check_drafter(target: Target, drafter: Drafter) -> None:
    own, theirs = drafter.spec, target.spec
    # A checkpoint from elsewhere may know no fingerprint; `bind` has compared its tensors then.
    if own.fingerprint not in ("", theirs.fingerprint) or own.vocab_size != theirs.vocab_size:
        raise ValueError(
            f"This drafter was made for the target '{own.name}' (fingerprint {own.fingerprint[:12]}), but "
            f"'{theirs.name}' ({theirs.fingerprint[:12]}) decodes: load the drafter's own target."
        )
    if not drafter.is_bound:
        raise ValueError("The drafter has no embedding and output head yet: call drafter.bind(target) first.")
