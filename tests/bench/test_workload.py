"""Throughputs on a fake clock, derived by hand; the baselines of `transformers` against plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny import tiny_drafter, tiny_target
from treespark.bench.arms import Arm
from treespark.bench.measures import MEASURES, columns, rate
from treespark.bench.records import PromptTrials
from treespark.bench.runner import _live_trial
from treespark.bench.summary import mean_over_suites, summarise
from treespark.bench.workload import Served, Times, decode_workload, serve
from treespark.decoding import DecodeResult, Round, decode_plain
from treespark.drafters import Drafter
from treespark.policies import Budgeted
from treespark.target import Target


class FakeClock:
    """Seconds that pass when something is done."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeRequest:
    """Ends after so many rounds of 2 tokens."""

    def __init__(self, prefill: float, rounds: int) -> None:
        self.prefill, self.left = prefill, rounds
        self.finish_reason: str | None = None


class FakeDecoder:
    """Takes a request's `prefill` seconds to add it, and 2 seconds plus 1 per request for a round."""

    def __init__(self, clock: FakeClock, max_batch_size: int) -> None:
        self.clock, self.max_batch_size = clock, max_batch_size
        self.active: list[Any] = []

    def add(self, request: Any) -> None:
        assert len(self.active) < self.max_batch_size
        self.clock.now += request.prefill
        if request.left == 0:
            request.finish_reason = "stop"
        else:
            self.active.append(request)

    def step(self) -> list[tuple[Any, Round]]:
        self.clock.now += 2.0 + len(self.active)
        stepped = list(self.active)
        for request in stepped:
            request.left -= 1
            if request.left == 0:
                request.finish_reason = "length"
                self.active.remove(request)
        return [(request, Round(1, 2, True)) for request in stepped]


def times(requests: list[FakeRequest], size: int) -> tuple[list[Times], float]:
    clock = FakeClock()
    found = serve(FakeDecoder(clock, size), requests, clock)  # type: ignore[arg-type]
    return found, clock.now - 100.0


def test_times_of_a_workload() -> None:
    """Two rows, three requests A (1 s, 1 round), B (1 s, 3 rounds), C (0.5 s, 1 round).

    A is there at 1 s and B at 2 s. Round 1 (A, B; 4 s) ends at 6: A is done, C arrives and is read until 6.5. Round 2
    (B, C; 4 s) ends at 10.5: C is done. Round 3 (B alone; 3 s) ends at 13.5.
    Shares: A 1 + 2 = 3, B 1 + 2 + 2 + 3 = 8, C 0.5 + 2 = 2.5; together 13.5.
    """
    found, elapsed = times([FakeRequest(1.0, 1), FakeRequest(1.0, 3), FakeRequest(0.5, 1)], 2)
    assert elapsed == 13.5
    assert found == [Times(1.0, 5.0, 3.0), Times(2.0, 11.5, 8.0), Times(0.5, 4.0, 2.5)]


def test_first_token_may_be_the_last() -> None:
    """One row, A ends with its prefill (2 s): B arrives then, and waiting for the row counts nowhere."""
    found, elapsed = times([FakeRequest(2.0, 0), FakeRequest(1.0, 1)], 1)
    assert elapsed == 6.0 and found == [Times(2.0, 0.0, 2.0), Times(1.0, 3.0, 4.0)]


def test_shares_add_up_to_the_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second that passes between rounds, here whenever the clock is read, is nobody's own: shares are scaled."""
    clock = FakeClock()

    def reading() -> float:
        clock.now += 1.0
        return clock.now

    decoder = FakeDecoder(clock, 2)
    found = serve(decoder, [FakeRequest(1.0, 2), FakeRequest(1.0, 1)], reading)  # type: ignore[arg-type]
    assert sum(item.share for item in found) == pytest.approx(clock.now - 101.0)


def record(index: int, served: Served, repeat: int = 0, suite: str = "s") -> PromptTrials:
    return PromptTrials(suite, index, str(index), 3, {"tree": _live_trial(served)}, 2, repeat)


def served(tokens: int, rounds: int, first: float, rest: float, share: float) -> Served:
    """An answer of `tokens` tokens: one from the prefill, the others over `rounds` rounds in `rest` - 1 s of rounds."""
    committed = [(tokens - 1) // rounds] * rounds
    timing = {"prefill": first, "decode": rest - 1.0, "verify": (rest - 1.0) / 2, "head": (rest - 1.0) / 8}
    result = DecodeResult([5] * tokens, [Round(n - 1, n, True) for n in committed], "length", timing)
    return Served(result, Times(first, rest, share))


def test_throughputs_by_hand() -> None:
    """Answers of 9 and 5 tokens, rounds of 4 and 2 tokens (2 and 2 rounds).

    Single: 8 + 4 tokens in rounds of 3 + 1 s = 3/s. System: 9 + 5 generated tokens in 4 + 3 s of the workload = 2/s.
    Per request: 8 + 4 tokens after the first in 4 + 2 s = 2/s. First token: (1 + 3) / 2 = 2 s. tau = 12 / 4.
    """
    records = [record(0, served(9, 2, 1.0, 4.0, 4.0)), record(1, served(5, 2, 3.0, 2.0, 3.0))]
    found = {name: rate(records, "tree", measure) for name, measure in MEASURES.items()}
    assert found == {"tau": 3.0, "speed": 3.0, "system": 2.0, "per request": 2.0, "first token": 2.0}
    summary = summarise(records, "tree", depths=3, suite="s", batch_size=2)
    assert (summary.system_throughput, summary.per_request_throughput, summary.time_to_first_token) == (2.0, 2.0, 2.0)
    assert summary.single_throughput != summary.single_throughput  # of several requests side by side: not a number
    assert summarise(records, "tree", depths=3, suite="s").single_throughput == 3.0
    assert summary.time_shares == {
        "draft": 0.0, "head": 0.125, "build": 0.0, "verify": 0.5, "commit": 0.0, "other": 0.375,
    }  # fmt: skip


def test_repeats_are_columns_and_prompts_rows() -> None:
    """Two prompts decoded three times give [2, 2, 3]; a prompt that lacks a repeat makes all sums over repeats."""
    records = [record(i, served(9, 2, 1.0, 4.0, 1.0 + r), r) for r in range(3) for i in range(2)]
    table = columns(records, "tree", MEASURES["system"])
    assert table.tolist() == [[[9, 9, 9], [9, 9, 9]], [[1, 2, 3], [1, 2, 3]]]
    table = columns(records[:-1], "tree", MEASURES["system"])
    assert table.tolist() == [[[27], [18]], [[6], [3]]]
    summary = summarise(records, "tree", depths=3)
    assert (summary.num_prompts, summary.num_repeats) == (2, 3)


def test_means_over_suites_are_unweighted() -> None:
    """Suite a: one prompt at 2 tokens/s. Suite b: three prompts at 4 tokens/s. Mean 3, not 3.5; counts add up."""
    a = summarise([record(0, served(9, 2, 1.0, 4.0, 4.5), suite="a")], "tree", 3, suite="a")
    b = summarise([record(i, served(9, 4, 1.0, 4.0, 2.25), suite="b") for i in range(3)], "tree", 3, suite="b")
    mean = mean_over_suites([a, b], "general")
    assert (a.system_throughput, b.system_throughput, mean.system_throughput) == (2.0, 4.0, 3.0)
    assert (a.tau, b.tau, mean.tau) == (4.0, 2.0, 3.0)
    assert (mean.suite, mean.category, mean.num_prompts, mean.num_rounds) == (None, "general", 4, 14)
    assert mean.acceptance_by_position == [1.0, 0.5, 0.5] and sum(mean.time_shares.values()) == pytest.approx(1)


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Drafter]:
    target = tiny_target()
    return target, tiny_drafter(target)


PROMPTS = [(5, 6, 7, 8, 9, 10, 5, 6), tuple(range(20, 31)), (7,)]


@pytest.mark.parametrize("kind", ["generate", "lookup"])
@pytest.mark.parametrize("ends", [[], [17, 33]])
def test_transformers_writes_the_same_text(pair: tuple[Target, Drafter], kind: str, ends: list[int]) -> None:
    """In float64 greedy `generate` and its prompt lookup give plain decoding's tokens; their times make sense.

    The tokens of the forwards add up, and what the model's own file says about penalties does not leak in.
    """
    target, drafter = pair
    target.model.generation_config.repetition_penalty = 5.0
    try:
        found = decode_workload(
            target, drafter, Arm(kind, baseline=kind), PROMPTS, max_new_tokens=14, end_token_ids=ends
        )
    finally:
        target.model.generation_config.repetition_penalty = 1.0
    for ids, item in zip(PROMPTS, found, strict=True):
        plain = decode_plain(target, ids, max_new_tokens=14, end_token_ids=ends)
        assert item.result.tokens == plain.tokens and item.result.finish_reason == plain.finish_reason
        assert sum(one.committed for one in item.result.rounds) <= len(plain.tokens) - 1
        assert 0 < item.times.first_token <= item.times.first_token + item.times.rest == pytest.approx(item.times.share)
    if kind == "generate":
        assert all(len(item.result.rounds) == len(item.result.tokens) - 1 for item in found)
    else:
        assert any(one.committed > 1 for item in found for one in item.result.rounds)


@pytest.mark.parametrize("size", [1, 2])
def test_a_workload_decodes_like_single_requests(pair: tuple[Target, Drafter], size: int) -> None:
    """Side by side or one by one, with a drafter or plainly: the text is plain decoding's, in the prompts' order."""
    target, drafter = pair
    for arm in (Arm("plain"), Arm("tree", Budgeted(k=2, num_draft_nodes=6))):
        found = decode_workload(target, drafter, arm, PROMPTS, batch_size=size, max_new_tokens=10)
        for ids, item in zip(PROMPTS, found, strict=True):
            assert item.result.tokens == decode_plain(target, ids, max_new_tokens=10).tokens
            assert item.times.first_token > 0 and item.times.share > 0
