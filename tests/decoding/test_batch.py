"""Requests side by side: each answer is plain decoding's, each row its own text, and rows are used again."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.fakes import random_drafter
from tests.decoding.test_loop import REGISTERED, drafter_of, target_of
from tests.tiny import tiny_drafter, tiny_model, tiny_target
from treespark.decoding import BatchDecoding, Request, decode, decode_batch, decode_plain
from treespark.policies import BestFirst, Budgeted, TreePolicy
from treespark.target import Target

PROMPTS = [[1, 2, 3], [5], [9, 8, 7, 6, 5, 4, 3, 2], [4, 4], [7, 1, 0]]


@cache
def text_of(family: str, prompt: tuple[int, ...]) -> list[int]:
    """Plain decoding's unlimited text: 16 tokens, computed once for each prompt."""
    return decode_plain(target_of(family), list(prompt), max_new_tokens=16, end_token_ids=[]).tokens


def expected(text: list[int], limit: int, ends: list[int]) -> list[int]:
    """The text cut at the limit and after the first end token."""
    stop = next((i + 1 for i, token in enumerate(text) if token in ends), len(text))
    return text[: min(limit, stop)]


@pytest.mark.parametrize("policy", [None, *REGISTERED], ids=lambda policy: type(policy).__name__)
@settings(max_examples=10)
@given(
    family=st.sampled_from(["llama", "qwen3"]),
    kind=st.sampled_from(["table", "model"]),
    chosen=st.lists(st.tuples(st.sampled_from(PROMPTS), st.sampled_from([0, 1, 2, 5, 16])), min_size=1, max_size=8),
    size=st.integers(1, 4),
    seed=st.integers(0, 3),
    ends=st.lists(st.integers(0, 15), max_size=2),
)
def test_batch_equals_one_by_one_equals_plain(
    policy: TreePolicy | None,
    family: str,
    kind: str,
    chosen: list[tuple[list[int], int]],
    size: int,
    seed: int,
    ends: list[int],
) -> None:
    """Unequal prompts and limits, at most `size` at once: the tokens of plain decoding and the rounds of each alone."""
    target = target_of(family)
    drafter = None if policy is None else drafter_of(kind, target, [], seed)
    prompts, limits = [prompt for prompt, _ in chosen], [limit for _, limit in chosen]
    options: dict[str, Any] = {"policy": policy, "end_token_ids": ends}
    results = decode_batch(target, drafter, prompts, max_batch_size=size, max_new_tokens=limits, **options)
    for prompt, limit, result in zip(prompts, limits, results, strict=True):
        assert result.tokens == expected(text_of(family, tuple(prompt)), limit, ends)
        assert result.finish_reason == ("stop" if result.tokens and result.tokens[-1] in ends else "length")
        if drafter is None:
            assert result.gaps is not None and len(result.gaps) == len(result.tokens)
        else:
            alone = decode(target, drafter, prompt, max_new_tokens=limit, **options)
            assert (result.rounds, result.policy) == (alone.rounds, alone.policy)


@pytest.mark.parametrize("name", [type(policy).__name__ for policy in REGISTERED])
@settings(max_examples=4)
@given(data=st.data(), family=st.sampled_from(["llama", "qwen3"]), seed=st.integers(0, 99))
def test_eight_unequal_prompts(name: str, data: st.DataObject, family: str, seed: int) -> None:
    """A batch of 8 prompts of 8 lengths = one by one = plain decoding, whatever the policy's budget and the limits."""
    cls = TreePolicy.available()[name]
    budget = {"num_draft_nodes": data.draw(st.integers(1, 40))}
    policy: TreePolicy = cls(**budget if "num_draft_nodes" in inspect.signature(cls).parameters else {})
    target = target_of(family)
    drafter = drafter_of("model", target, [], seed)
    lengths = data.draw(st.permutations(range(1, 9)))
    prompts = [data.draw(st.lists(st.integers(0, 15), min_size=n, max_size=n)) for n in lengths]
    limits = data.draw(st.lists(st.integers(1, 9), min_size=8, max_size=8))
    ends = data.draw(st.lists(st.integers(0, 15), max_size=2))
    options: dict[str, Any] = {"policy": policy, "end_token_ids": ends}
    together = decode_batch(target, drafter, prompts, max_batch_size=8, max_new_tokens=limits, **options)
    for prompt, limit, found in zip(prompts, limits, together, strict=True):
        alone = decode(target, drafter, prompt, max_new_tokens=limit, **options)
        plain = decode_plain(target, prompt, max_new_tokens=limit, end_token_ids=ends)
        assert found.tokens == alone.tokens == plain.tokens
        assert found.rounds == alone.rounds and found.finish_reason == alone.finish_reason == plain.finish_reason


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_caches_equal_a_fresh_prefill_after_every_round(family: str, implementation: str) -> None:
    """Every row of both caches holds the committed text without its last token, as reading that text would fill it.

    Three rows for five prompts: rows are left, moved and taken again on the way. Eager attention takes its softmax in
    float32, whatever the model's dtype.
    """
    close: dict[str, float] = {"rtol": 0.0, "atol": 1e-10 if implementation == "sdpa" else 1e-5}
    model = tiny_model(family, vocab=16, initializer_range=0.5, attn_implementation=implementation)
    target = Target(model, name="tiny")
    drafter = tiny_drafter(target, 1)
    batch = BatchDecoding(
        target, drafter=drafter, policy=BestFirst(k=3, num_draft_nodes=12, theta=0.05), max_batch_size=3
    )
    limits = [5, 12, 3, 9, 7]
    requests = [
        Request(target, prompt, max_new_tokens=limit, end_token_ids=[])
        for prompt, limit in zip(PROMPTS, limits, strict=True)
    ]
    waiting = list(requests)
    while waiting or batch.active:
        while waiting and len(batch.active) < 3:
            batch.add(waiting.pop(0))
        batch.step()
        assert batch.cache is not None and batch.context is not None
        for row, request in enumerate(batch.places):
            if request is None:
                continue
            text = torch.cat([request.prompt, torch.tensor([request.tokens[:-1]], dtype=torch.long)], 1)
            assert text.shape[1] == request.length
            fresh = target.new_cache(64)
            output = target(text, fresh, drafter.layer_ids)
            for kept, other in zip(batch.cache.hf.layers, fresh.hf.layers, strict=True):
                torch.testing.assert_close(kept.keys[row, :, : request.length], other.keys[0], **close)
                torch.testing.assert_close(kept.values[row, :, : request.length], other.values[0], **close)
            context = drafter.encode(output.features.context, torch.arange(request.length).unsqueeze(0))
            for layer in range(2):
                for kept, other in zip(batch.context._tensors(), context.layer(layer), strict=True):
                    found = kept[layer][row, :, : request.length]
                    torch.testing.assert_close(found, other[0], **close)
    for request, limit in zip(requests, limits, strict=True):
        plain = decode_plain(target, request.prompt, max_new_tokens=limit, end_token_ids=[])
        assert batch.result(request).tokens == plain.tokens


def test_one_target_forward_serves_all_rows() -> None:
    """Four requests of 6 tokens, two at once, plainly: 4 prefills and 2 · 5 rounds of two rows."""
    target = target_of("llama")
    widths: list[int] = []
    handle = target.register_forward_hook(lambda module, args, output: widths.append(len(args[0])))
    try:
        decode_batch(target, None, [[1], [2], [3], [4]], max_batch_size=2, max_new_tokens=6, end_token_ids=[])
    finally:
        handle.remove()
    assert sorted(widths) == [1] * 4 + [2] * 10


def test_requests_in_and_out_leave_memory_where_it_was() -> None:
    """60 requests through 3 rows: the buffers are those of the first ones, longer by nothing."""
    target = target_of("llama")
    drafter = tiny_drafter(target)
    batch = BatchDecoding(target, drafter=drafter, policy=Budgeted(k=2, num_draft_nodes=6), max_batch_size=3)

    def requests(count: int) -> list[Request]:
        return [Request(target, PROMPTS[i % 5], max_new_tokens=3 + i % 3, end_token_ids=[]) for i in range(count)]

    def storage() -> list[int]:
        assert batch.cache is not None and batch.context is not None
        tensors = [layer.key_buffer for layer in batch.cache.hf.layers] + batch.context._keys
        return [tensor.data_ptr() for tensor in tensors]

    batch.run(requests(10))
    before = storage()
    batch.run(requests(50))
    assert storage() == before and not batch.active


def test_what_a_former_request_left_does_not_leak() -> None:
    """NaN all over a row that is taken again (a broken text would leave it): the next text is plain decoding's."""
    target = target_of("qwen3")
    drafter = tiny_drafter(target)
    batch = BatchDecoding(target, drafter=drafter, policy=Budgeted(k=2, num_draft_nodes=6), max_batch_size=2)
    long, short, late = (
        Request(target, prompt, max_new_tokens=limit, end_token_ids=[])
        for prompt, limit in (([1, 2, 3, 4, 5, 6, 7], 14), ([5], 2), ([9, 3], 8))
    )
    batch.add(long)
    batch.add(short)
    batch.step()
    assert batch.places == [long, None] and batch.cache is not None and batch.context is not None
    for layer in batch.cache.hf.layers:
        layer.key_buffer[1], layer.value_buffer[1] = torch.nan, torch.nan
    for tensors in batch.context._tensors():
        for tensor in tensors:
            tensor[1] = torch.nan
    batch.add(late)
    while batch.active:
        batch.step()
    for request, limit in ((long, 14), (late, 8)):
        assert request.tokens == decode_plain(target, request.prompt, max_new_tokens=limit, end_token_ids=[]).tokens


def test_streaming_hands_every_request_its_own_tokens() -> None:
    target = target_of("llama")
    parts: dict[int, list[list[int]]] = {}
    results = decode_batch(
        target,
        random_drafter(target, 2),
        PROMPTS,
        max_batch_size=2,
        max_new_tokens=7,
        end_token_ids=[],
        on_commit=lambda index, tokens: parts.setdefault(index, []).append(tokens),
    )
    for index, result in enumerate(results):
        assert [token for part in parts[index] for token in part] == result.tokens
        assert [len(part) for part in parts[index]] == [1] + [r.committed for r in result.rounds]
        assert 0 < result.timing["first_token"] < result.timing["finished"]


def test_a_window_that_is_never_reached_decodes_like_full_attention() -> None:
    """Half of the layers slide over 512 tokens, all that the model has positions for: trees and rows as without.

    A window of 511 could be reached and is refused (`tests/target/test_features.py` has more of these).
    """
    window: dict[str, Any] = {"vocab": 16, "initializer_range": 0.5, "use_sliding_window": True, "max_window_layers": 2}
    target = tiny_target("qwen3", sliding_window=512, **window)
    assert "sliding_attention" in target.model.config.layer_types
    full = tiny_target("qwen3", vocab=16, initializer_range=0.5)
    prompts = [list(range(1, n)) for n in (12, 3, 7)]
    options: dict[str, Any] = {"max_new_tokens": 8, "end_token_ids": [], "policy": Budgeted(2, 8)}
    results = decode_batch(target, tiny_drafter(target, target_layer_ids=[0, 2]), prompts, **options)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == decode_plain(full, prompt, max_new_tokens=8, end_token_ids=[]).tokens
    with pytest.raises(ValueError, match="slides over 511 tokens, fewer than its 512 positions"):
        tiny_target("qwen3", sliding_window=511, **window)


def test_impossible_batches_are_refused() -> None:
    target = target_of("llama")
    with pytest.raises(ValueError, match="max_batch_size must be at least 1, got 0"):
        decode_batch(target, None, [[1]], max_batch_size=0)
    with pytest.raises(ValueError, match="holds 1 limits for 2 prompts"):
        decode_batch(target, None, [[1], [2]], max_new_tokens=[4])
    batch = BatchDecoding(target, max_batch_size=1)
    batch.add(Request(target, [1], max_new_tokens=4, end_token_ids=[]))
    with pytest.raises(ValueError, match="all 1 rows are taken"):
        batch.add(Request(target, [1], max_new_tokens=4))
    assert decode_batch(target, None, []) == []
