"""Simulated rounds have the records of real greedy decoding."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.decoding.fakes import knowing_drafter, random_drafter
from tests.tiny import tiny_drafter, tiny_target
from treespark.decoding import check_text, decode, decode_plain, simulate
from treespark.decoding.record import round_tensors
from treespark.policies import Budgeted, Chain, TreePolicy
from treespark.target import Target

POLICIES: list[TreePolicy] = [Chain(), Budgeted(k=2, num_draft_nodes=5), Budgeted(k=4, num_draft_nodes=32)]


@cache
def target_of(family: str) -> Target:
    """16 tokens, so that random drafters agree now and then; wide weights, so that texts do not repeat one token."""
    return tiny_target(family, torch.float64, vocab=16, initializer_range=0.5)


def collate(texts: list[list[int]]) -> Tensor:
    width = max(map(len, texts))
    return torch.tensor([text + [0] * (width - len(text)) for text in texts])


def simulated(target: Target, drafter: Any, policy: TreePolicy | None, texts: list[list[int]], **options: Any) -> Any:
    input_ids = collate(texts)
    return simulate(target, drafter, policy, target.features(input_ids, drafter.layer_ids), input_ids, **options)


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(["llama", "qwen3"]),
    kind=st.sampled_from(["table", "vanilla", "gated", "rnn"]),
    block_attention=st.sampled_from(["bidirectional", "causal"]),
    policy=st.sampled_from(POLICIES),
    prompts=st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=9), min_size=1, max_size=4),
    limits=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    ends=st.lists(st.integers(0, 15), max_size=2),
    shorter=st.sampled_from([None, 0, 1, 5]),
    seed=st.integers(0, 3),
)
def test_records_equal_live_decoding(
    family: str,
    kind: str,
    block_attention: str,
    policy: TreePolicy,
    prompts: list[list[int]],
    limits: list[int],
    ends: list[int],
    shorter: int | None,
    seed: int,
) -> None:
    """Answers ended by end tokens or by limits, in rows side by side; a lower limit cuts them again."""
    target = target_of(family)
    drafter: Any = random_drafter(target, seed)
    if kind != "table":
        drafter = tiny_drafter(target, seed, target_layer_ids=[0, 2], markov_head=kind, block_attention=block_attention)
    answers, live = [], []
    for prompt, limit in zip(prompts, limits, strict=False):
        answers.append(decode_plain(target, prompt, max_new_tokens=limit, end_token_ids=ends).tokens)
        limit = limit if shorter is None else min(limit, shorter)
        result = decode(target, drafter, prompt, policy=policy, max_new_tokens=limit, end_token_ids=ends)
        live.append(result.rounds)
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    rounds = simulated(
        target,
        drafter,
        policy,
        texts,
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        lengths=torch.tensor([len(text) for text in texts]),
        end_token_ids=ends,
        max_new_tokens=shorter,
    )
    assert rounds == live


@pytest.mark.parametrize("kind", ["always", "never", "sometimes"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_drafters_that_know_the_text(policy: TreePolicy, kind: str) -> None:
    target = target_of("qwen3")
    prompt = [1, 4, 8]
    text = prompt + decode_plain(target, prompt, max_new_tokens=30, end_token_ids=[]).tokens
    drafter = knowing_drafter(target, text, kind)
    lengths: dict[str, Any] = {"prompt_lengths": torch.tensor([3]), "lengths": torch.tensor([33])}
    (rounds,) = simulated(target, drafter, policy, [text], end_token_ids=[], **lengths)
    assert rounds == decode(target, drafter, prompt, policy=policy, max_new_tokens=30, end_token_ids=[]).rounds
    num_accepted, committed = round_tensors(rounds)
    assert int(committed.sum()) == 29
    if kind == "never":
        assert int(num_accepted.sum()) == 0


def test_waves_report_their_trees() -> None:
    """Each wave names its rows, their anchors and their trees; anchors are where the rounds before have led."""
    target = target_of("llama")
    drafter = random_drafter(target, 1)
    prompts = [[1, 2], [3, 4, 5]]
    limits = (3, 9)
    texts = [
        p + decode_plain(target, p, max_new_tokens=n, end_token_ids=[]).tokens
        for p, n in zip(prompts, limits, strict=True)
    ]
    seen: list[tuple[int, int]] = []

    def note(rows: Tensor, positions: Tensor, packed: Any) -> None:
        assert packed.tokens.shape[0] == len(rows)
        seen.extend(zip(rows.tolist(), positions.tolist(), strict=True))

    lengths: dict[str, Any] = {"prompt_lengths": torch.tensor([2, 3]), "lengths": torch.tensor([5, 12])}
    rounds = simulated(target, drafter, Chain(), texts, end_token_ids=[], on_wave=note, **lengths)
    for row, start in enumerate((2, 3)):
        places = [position for r, position in seen if r == row]
        expected = [start + sum(r.committed for r in rounds[row][:i]) for i in range(len(rounds[row]))]
        assert places == expected


def test_text_of_another_origin_is_an_error() -> None:
    """The third answer token is replaced: the error names the row, the position and the command to use."""
    target = target_of("llama")
    text = [1, 2, *decode_plain(target, [1, 2], max_new_tokens=6, end_token_ids=[]).tokens]
    lengths: dict[str, Any] = {"prompt_lengths": torch.tensor([2]), "lengths": torch.tensor([8]), "end_token_ids": []}
    drafter = random_drafter(target, 0)
    simulated(target, drafter, Chain(), [text], **lengths)
    text[4] = (text[4] + 1) % 16
    with pytest.raises(ValueError, match=r"Row 0 .* position 4 .* `treespark generate`"):
        simulated(target, drafter, Chain(), [text], **lengths)
    assert simulated(target, drafter, Chain(), [text], check=False, **lengths)


def test_near_ties_pass_the_check_and_are_counted() -> None:
    """The head's rows of the text's token and of another are made equal but for 1e-5: the other wins, as a near-tie."""
    target = tiny_target("llama", torch.float64, seed=2, initializer_range=0.5)
    text = [1, 2, *decode_plain(target, [1, 2], max_new_tokens=3, end_token_ids=[]).tokens]
    input_ids, starts, ends = torch.tensor([text]), torch.tensor([2]), torch.tensor([5])
    final = target.features(input_ids, ()).final
    assert check_text(target, final, input_ids, starts, ends) == 0
    head = target.output_head().weight
    other = next(token for token in range(64) if token not in text)
    with torch.no_grad():
        state = final[0, 3]
        head[other] = head[text[4]] + 1e-5 * state / state.square().sum()
    last = torch.tensor([4])  # the answer token at position 4 alone
    assert check_text(target, final, input_ids, last, ends) == 1


def test_lengths_outside_the_row_are_refused() -> None:
    target = target_of("llama")
    lengths: dict[str, Any] = {"prompt_lengths": torch.tensor([0]), "lengths": torch.tensor([3])}
    with pytest.raises(ValueError, match="Row 0 has prompt length 0"):
        simulated(target, random_drafter(target, 0), Chain(), [[1, 2, 3]], **lengths)


def test_answers_without_a_round() -> None:
    """One token is the prefill's alone; no answer token at all is no answer: neither has rounds."""
    target = target_of("llama")
    text = [1, 2, *decode_plain(target, [1, 2], max_new_tokens=1, end_token_ids=[]).tokens]
    lengths: dict[str, Any] = {"prompt_lengths": torch.tensor([2, 3]), "lengths": torch.tensor([3, 3])}
    assert simulated(target, random_drafter(target, 0), Chain(), [text, text], end_token_ids=[], **lengths) == [[], []]
