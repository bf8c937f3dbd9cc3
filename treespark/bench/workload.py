"""Workloads: prompts decoded under one arm, so many side by side, on a clock.

What a serving system is asked: when did each request's first token come, when its last, and how long did all take?
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from treespark.decoding import BatchDecoding, DecodeResult, Request, Round

if TYPE_CHECKING:
    from treespark.bench.arms import Arm
    from treespark.drafters import Drafter
    from treespark.target import Target

Clock = Callable[[], float]


class Decoder(Protocol):
    """What `serve` drives: `BatchDecoding`, or a fake."""

    max_batch_size: int

    @property
    def active(self) -> list[Request]:
        """The requests that still decode."""

    def add(self, request: Request) -> None:
        """Reads a prompt."""

    def step(self) -> Iterable[tuple[Request, Round]]:
        """Decodes a round of all active requests."""


@dataclass
class Times:
    """A request in its workload, in seconds.

    A workload keeps its rows busy: the first requests arrive at its start, and another arrives whenever a row gets
    free. So waiting for a row counts nowhere.

    Attributes:
        first_token: From the request's arrival to its first token; it may wait for the prompts of others.
        rest: From its first token to its last.
        share: Its part of the workload's elapsed time: its own prefill, and its part of each round that it took part
            in. The shares of a workload add up to its elapsed time.
    """

    first_token: float = 0.0
    rest: float = 0.0
    share: float = 0.0


@dataclass
class Served:
    """One request's answer and times."""

    result: DecodeResult
    times: Times = field(default_factory=Times)


def serve(decoder: Decoder, requests: Sequence[Request], clock: Clock = perf_counter) -> list[Times]:
    """Decodes requests to their ends, in their order as rows become free, and returns their times.

    Args:
        decoder: A batch that is empty so far.
        requests: New requests.
        clock: Source of times in seconds.
    """
    begin = clock()
    waiting = deque(enumerate(requests))
    places = {id(request): index for index, request in enumerate(requests)}
    free = deque([begin] * decoder.max_batch_size)
    times = [Times() for _ in requests]
    came = [begin] * len(requests)  # first tokens
    while waiting or decoder.active:
        while waiting and len(decoder.active) < decoder.max_batch_size:
            index, request = waiting.popleft()
            arrival, start = free.popleft(), clock()
            decoder.add(request)
            came[index] = clock()
            times[index].first_token = came[index] - arrival
            times[index].share += came[index] - start
            if request.finish_reason is not None:  # its first token was its last
                free.append(came[index])
        if not decoder.active:
            continue
        start, num_active = clock(), len(decoder.active)
        taking_part = [request for request, _ in decoder.step()]
        end = clock()
        for request in taking_part:
            index = places[id(request)]
            times[index].share += (end - start) / num_active
            times[index].rest = end - came[index]
            if request.finish_reason is not None:
                free.append(end)
    elapsed, given = clock() - begin, sum(item.share for item in times)
    for item in times:  # what lies between prefills and rounds belongs to all
        item.share *= elapsed / given if given else 1.0
    return times


def decode_workload(
    target: Target,
    drafter: Drafter | None,
    arm: Arm,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int = 1,
    max_new_tokens: int = 128,
    end_token_ids: Sequence[int] | None = None,
    clock: Clock = perf_counter,
) -> list[Served]:
    """Decodes prompts under an arm, at most `batch_size` side by side.

    Args:
        target: The target.
        drafter: A drafter bound to it, for an arm with a policy.
        arm: The arm. What `transformers` does decodes one prompt at a time.
        prompts: Tokens of each prompt.
        batch_size: Requests that decode side by side.
        max_new_tokens: Most new tokens of an answer.
        end_token_ids: Tokens that end an answer; None takes the target's own.
        clock: Source of times in seconds.
    """
    if arm.kind in ("generate", "lookup"):
        assert batch_size == 1
        return [_generate(target, arm, ids, max_new_tokens, end_token_ids, clock) for ids in prompts]
    batch = BatchDecoding(
        target,
        drafter=None if arm.policy is None else drafter,
        policy=arm.policy,
        allow_other_policy=True,  # an arm is asked for by name, and `marked` says what it is
        max_batch_size=batch_size,
    )
    requests = [Request(target, ids, max_new_tokens=max_new_tokens, end_token_ids=end_token_ids) for ids in prompts]
    times = serve(batch, requests, clock)
    return [Served(batch.result(request), item) for request, item in zip(requests, times, strict=True)]


def _generate(
    target: Target,
    arm: Arm,
    ids: Sequence[int],
    max_new_tokens: int,
    end_token_ids: Sequence[int] | None,
    clock: Clock,
) -> Served:
    """Decodes a prompt with `transformers`. Every forward's last token is taken for the target's own."""
    from treespark.target.generate import generate_greedily

    written = generate_greedily(
        target,
        ids,
        max_new_tokens=max_new_tokens,
        end_token_ids=end_token_ids,
        lookup_tokens=arm.lookup_tokens if arm.kind == "lookup" else None,
        clock=clock,
    )
    # Without a second token nothing was decoded behind the first: what is left is the call's own end.
    rest = written.finished - written.first_token if len(written.tokens) > 1 else 0.0
    ends = target.spec.eos_token_ids if end_token_ids is None else tuple(end_token_ids)
    result = DecodeResult(
        tokens=written.tokens,
        rounds=[Round.of(count - 1, count) for count in written.committed[1:]],
        finish_reason="stop" if written.tokens[-1] in ends else "length",
        timing={"prefill": written.first_token, "decode": rest},
    )
    return Served(result, Times(written.first_token, rest, written.finished))
