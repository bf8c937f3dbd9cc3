"""Decoding equals plain decoding token for token, whatever the drafter, the policy and the stop rules."""

from __future__ import annotations

import math
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.fakes import knowing_drafter, random_drafter
from tests.tiny import tiny_drafter, tiny_target
from treespark.decoding import Decoding, Round, decode, decode_plain
from treespark.policies import BestFirst, Budgeted, Chain, TreePolicy
from treespark.target import Target

POLICIES: list[TreePolicy] = [
    Chain(),
    Budgeted(k=1, num_draft_nodes=2),
    Budgeted(k=2, num_draft_nodes=5),
    Budgeted(k=4, num_draft_nodes=32),
    Budgeted(k=3, num_draft_nodes=20, frontier_width=5),
]

# Real drafters, one of each kind of head and of attention inside a block.
MODELS: dict[str, dict[str, Any]] = {
    "model": {},
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "dflash": {"markov_rank": 0, "confidence": False},
    "causal": {"block_attention": "causal"},
}
# Every policy of ours with its defaults, whatever is added: the registry knows them.
REGISTERED: list[TreePolicy] = [
    cls() for cls in TreePolicy.available().values() if cls.__module__.startswith("treespark.")
]


@cache
def target_of(family: str, seed: int = 0) -> Target:
    """16 tokens, so that random drafters agree now and then; wide weights, so that texts do not repeat one token."""
    return tiny_target(family, torch.float64, seed, vocab=16, initializer_range=0.5)


def greedy_by_recomputation(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy text without any cache: a full forward for every token."""
    text = list(prompt)
    for _ in range(count):
        final = target.features(torch.tensor([text]), ()).final
        text.append(int(target.logits(final[0, -1]).argmax()))
    return text[len(prompt) :]


def drafter_of(kind: str, target: Target, text: list[int], seed: int) -> Any:
    if kind == "table":
        return random_drafter(target, seed)
    if kind in MODELS:
        return tiny_drafter(target, seed, target_layer_ids=[0, 2], **MODELS[kind])
    return knowing_drafter(target, text, kind, seed)


prompts = st.lists(st.integers(0, 15), min_size=1, max_size=9)
families = st.sampled_from(["llama", "qwen3"])
kinds = st.sampled_from(["table", *MODELS, "always", "never", "sometimes"])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_plain_decoding_is_greedy_decoding(family: str) -> None:
    """The oracle itself is checked against recomputing the whole text for every token."""
    target = target_of(family)
    result = decode_plain(target, [1, 7, 3], max_new_tokens=20, end_token_ids=[])
    assert result.tokens == greedy_by_recomputation(target, [1, 7, 3], 20)
    assert result.finish_reason == "length"
    assert result.rounds == [Round(0, 1, True)] * 19
    assert result.gaps is not None and len(result.gaps) == 20 and min(result.gaps) > 0
    assert result.tau == 1.0 and result.mean_accepted == 0.0


@settings(max_examples=90, deadline=None)
@given(
    family=families,
    kind=kinds,
    policy=st.sampled_from([*POLICIES, BestFirst(k=3, num_draft_nodes=10, a=1.3, b=-0.2, theta=0.05)]),
    prompt=prompts,
    seed=st.integers(0, 3),
    limit=st.sampled_from([0, 1, 2, 3, 7, 24]),
    ends=st.lists(st.integers(0, 23), max_size=3),
)
def test_output_equals_plain_decoding(
    family: str, kind: str, policy: TreePolicy, prompt: list[int], seed: int, limit: int, ends: list[int]
) -> None:
    """End tokens are drawn from the text itself: answers end at the first token, inside a path or at a bonus."""
    check_output(family, kind, policy, prompt, seed, limit, ends)


@pytest.mark.parametrize("policy", REGISTERED, ids=lambda policy: type(policy).__name__)
@settings(max_examples=15, deadline=None)
@given(
    family=families,
    kind=kinds,
    prompt=prompts,
    seed=st.integers(0, 3),
    limit=st.sampled_from([1, 3, 24]),
    ends=st.lists(st.integers(0, 23), max_size=2),
)
def test_every_registered_policy_decodes_the_plain_text(
    policy: TreePolicy, family: str, kind: str, prompt: list[int], seed: int, limit: int, ends: list[int]
) -> None:
    """The same for each policy that the registry knows, with its defaults."""
    check_output(family, kind, policy, prompt, seed, limit, ends)


def check_output(
    family: str, kind: str, policy: TreePolicy, prompt: list[int], seed: int, limit: int, ends: list[int]
) -> None:
    target = target_of(family)
    text = decode_plain(target, prompt, max_new_tokens=24, end_token_ids=[]).tokens
    end_token_ids = [text[place] for place in ends]
    plain = decode_plain(target, prompt, max_new_tokens=limit, end_token_ids=end_token_ids)
    drafter = drafter_of(kind, target, prompt + text, seed)
    result = decode(target, drafter, prompt, policy=policy, max_new_tokens=limit, end_token_ids=end_token_ids)

    assert result.tokens == plain.tokens
    assert result.finish_reason == plain.finish_reason
    # The same answer read off the unlimited text: cut at the limit and after the first end token.
    expected = text[:limit]
    first = next((i for i, token in enumerate(expected) if token in end_token_ids), None)
    assert result.tokens == (expected if first is None else expected[: first + 1])
    assert result.finish_reason == ("length" if first is None else "stop")
    # Every token but the prefill's is committed by exactly one round.
    assert sum(r.committed for r in result.rounds) == max(0, len(result.tokens) - 1)
    for record in result.rounds:
        assert record.committed == record.num_accepted + record.has_bonus >= 1
    if kind == "never":
        assert all(r == Round(0, 1, True) for r in result.rounds)


def test_always_agreeing_chain_commits_whole_blocks() -> None:
    """24 tokens, 4 depths: the prefill gives 1, four rounds give 4 + bonus = 5, and the last is cut to 3 of 5."""
    target = target_of("llama")
    prompt = [1, 5]
    text = decode_plain(target, prompt, max_new_tokens=24, end_token_ids=[]).tokens
    drafter = knowing_drafter(target, prompt + text, "always")
    result = decode(target, drafter, prompt, policy=Chain(), max_new_tokens=24, end_token_ids=[])
    assert result.rounds == [Round(4, 5, True)] * 4 + [Round(3, 3, False)]
    assert result.tau == pytest.approx(23 / 5) and result.mean_accepted == pytest.approx(19 / 5)
    # Anchors: the prefill's token after a prompt of 2, then 5 further each time.
    assert drafter.anchors == [2, 7, 12, 17, 22]


def test_end_token_inside_the_accepted_path() -> None:
    """One agreeing chain over the whole answer: the end token in it is committed, the rest and the bonus are not."""
    target = target_of("llama")
    prompt = [1, 5]
    text = decode_plain(target, prompt, max_new_tokens=24, end_token_ids=[]).tokens
    end = next(i for i in range(2, 24) if text[i] not in text[:i])  # a token that is new at its place
    drafter = knowing_drafter(target, prompt + text, "always", depths=30)
    result = decode(target, drafter, prompt, policy=Chain(), max_new_tokens=24, end_token_ids=[text[end]])
    assert result.tokens == text[: end + 1]
    assert result.rounds == [Round(end, end, False)]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("kind", ["table", "model", "rnn", "causal", "sometimes"])
@pytest.mark.parametrize("policy", POLICIES[1:4], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_cache_equals_a_fresh_prefill_after_every_round(family: str, policy: TreePolicy, kind: str) -> None:
    """The cache holds the committed text without its last token, as a prefill of that text would fill it."""
    target = target_of(family)
    prompt = [3, 9, 7, 11]
    text = decode_plain(target, prompt, max_new_tokens=20, end_token_ids=[]).tokens
    drafter = drafter_of(kind, target, prompt + text, 1)
    request = Decoding(target, prompt, drafter=drafter, policy=policy, max_new_tokens=20, end_token_ids=[])
    request.prefill()
    while request.finish_reason is None:
        request.step()
        assert request.cache is not None
        committed = prompt + request.tokens
        assert request.cache.length == len(committed) - 1
        fresh = target.new_cache(64)
        target(torch.tensor([committed[:-1]]), fresh)
        for kept, expected in zip(request.cache.hf.layers, fresh.hf.layers, strict=True):
            torch.testing.assert_close(kept.keys, expected.keys, rtol=0, atol=1e-10)
            torch.testing.assert_close(kept.values, expected.values, rtol=0, atol=1e-10)


@settings(max_examples=15, deadline=None)
@given(family=families, kind=kinds, prompt=prompts, seed=st.integers(0, 5))
def test_budgeted_with_one_child_is_the_chain(family: str, kind: str, prompt: list[int], seed: int) -> None:
    """With k = F = 1 and N = K: the same records and the same text."""
    target = target_of(family)
    text = decode_plain(target, prompt, max_new_tokens=16, end_token_ids=[]).tokens
    drafter = drafter_of(kind, target, prompt + text, seed)
    options: dict[str, Any] = {"max_new_tokens": 16, "end_token_ids": []}
    chain = decode(target, drafter, prompt, policy=Chain(), **options)
    tree = decode(target, drafter, prompt, policy=Budgeted(k=1, num_draft_nodes=4), **options)
    assert chain.rounds == tree.rounds and chain.tokens == tree.tokens


@settings(max_examples=12, deadline=None)
@given(kind=st.sampled_from(["table", "model", "sometimes"]), prompt=prompts, seed=st.integers(0, 5))
def test_a_tree_that_holds_the_greedy_chain_accepts_at_least_as_much(kind: str, prompt: list[int], seed: int) -> None:
    """Where the whole pool is packed, the greedy chain is in it: from one anchor the tree's walk is never shorter.

    Both start at the same place: after the prefill and one round each.
    """
    target = target_of("llama")
    text = decode_plain(target, prompt, max_new_tokens=24, end_token_ids=[]).tokens
    drafter = drafter_of(kind, target, prompt + text, seed)
    for start in range(0, 20, 4):
        first: dict[str, Round] = {}
        for name, policy in (("chain", Chain()), ("tree", Budgeted(k=2, num_draft_nodes=14))):
            request = Decoding(
                target,
                prompt + text[:start],
                drafter=drafter,
                policy=policy,
                max_new_tokens=24 - start,
                end_token_ids=[],
            )
            request.prefill()
            first[name] = request.step()
        assert first["tree"].num_accepted >= first["chain"].num_accepted


def test_the_mask_token_is_a_token_like_any_other() -> None:
    """A target whose argmax is the drafter's mask token commits it: nothing is filtered."""
    target = target_of("llama", 3)
    drafter = tiny_drafter(target, target_layer_ids=[0, 2])
    text = decode_plain(target, [4, 8], max_new_tokens=10, end_token_ids=[]).tokens
    drafter.mask_token_id = text[3]
    for policy in (Chain(), Budgeted(k=4, num_draft_nodes=16)):
        assert decode(target, drafter, [4, 8], policy=policy, max_new_tokens=10, end_token_ids=[]).tokens == text


def test_end_tokens_default_to_the_targets_own() -> None:
    target = target_of("llama")
    text = decode_plain(target, [1, 7, 3], max_new_tokens=12, end_token_ids=[]).tokens
    ended = Target(target.model, name="tiny")
    object.__setattr__(ended.spec, "eos_token_ids", (text[4],))
    assert decode_plain(ended, [1, 7, 3], max_new_tokens=12).tokens == text[: text.index(text[4]) + 1]


def test_policy_and_its_record() -> None:
    """No policy: the recorded one. Another is allowed when asked for, and the result says so."""
    target = target_of("llama")
    options: dict[str, Any] = {"max_new_tokens": 4, "end_token_ids": []}
    recorded = random_drafter(target, 0, recorded=Chain().config())
    own = decode(target, recorded, [1], **options)
    assert own.policy == Chain().config() and own.recorded
    policy = Budgeted(k=2, num_draft_nodes=4)
    with pytest.raises(ValueError, match=r"was trained under .*, but Budgeted\(k=2.*set allow_other_policy"):
        decode(target, recorded, [1], policy=policy, **options)
    other = decode(target, recorded, [1], policy=policy, allow_other_policy=True, **options)
    assert other.policy == Budgeted(k=2, num_draft_nodes=4).config() and not other.recorded
    same = decode(target, recorded, [1], policy=Chain(), **options)
    assert same.recorded
    # Nothing recorded: the reference tree, as far as the drafter's depths fill it (one depth: 4 candidates).
    deep = decode(target, random_drafter(target, 0, depths=7), [1], **options)
    assert deep.policy == Budgeted(k=4, num_draft_nodes=32).config() and not deep.recorded
    shallow = decode(target, random_drafter(target, 0, depths=1), [1], **options)
    assert shallow.policy == Budgeted(k=4, num_draft_nodes=4).config()
    assert decode_plain(target, [1], **options).policy is None


def test_tree_without_any_node_decodes_plainly() -> None:
    """A drafter that gives nothing but NaN packs no node: every round is one row and one token."""
    target = target_of("llama")
    drafter = random_drafter(target, 0)
    drafter.places = torch.full_like(drafter.places, torch.nan)
    plain = decode_plain(target, [1, 2], max_new_tokens=6, end_token_ids=[])
    policy = Budgeted(k=2, num_draft_nodes=4)
    result = decode(target, drafter, [1, 2], policy=policy, max_new_tokens=6, end_token_ids=[])
    assert result.tokens == plain.tokens and result.tau == 1.0


def test_streaming_hands_out_every_token_once() -> None:
    target = target_of("llama")
    text = decode_plain(target, [1, 5], max_new_tokens=12, end_token_ids=[]).tokens
    parts: list[list[int]] = []
    drafter = knowing_drafter(target, [1, 5, *text], "sometimes")
    result = decode(target, drafter, [1, 5], max_new_tokens=12, end_token_ids=[], on_commit=parts.append)
    assert [token for part in parts for token in part] == result.tokens == text
    assert [len(part) for part in parts] == [1] + [r.committed for r in result.rounds]


def test_zero_new_tokens() -> None:
    """Nothing is computed: no token, no round, and tau is undefined rather than 0."""
    result = decode(target_of("llama"), random_drafter(target_of("llama"), 0), [1], max_new_tokens=0)
    assert result.tokens == [] and result.rounds == [] and result.finish_reason == "length"
    assert math.isnan(result.tau) and math.isnan(result.mean_accepted)
    assert result.timing["decode"] == result.timing["prefill"] == 0.0


def test_timing_adds_up_and_the_result_pickles() -> None:
    target = target_of("llama")
    result = decode(target, random_drafter(target, 0), [1, 2], max_new_tokens=12, end_token_ids=[])
    parts = sum(result.timing[name] for name in ("draft", "head", "build", "verify", "commit"))
    assert 0 < parts <= result.timing["decode"]
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([16], {}, "token 16, but 'tiny' has the tokens 0 to 15"),
        ([-1], {}, "token -1"),
        ([1] * 500, {"max_new_tokens": 13}, "exceed the 512 positions of 'tiny'"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ([1], {"policy": Budgeted(k=17, num_draft_nodes=4)}, "k = 17 exceeds"),
        ([1], {"policy": Budgeted(k=2, num_draft_nodes=15)}, "propose 14 candidates"),
    ],
)
def test_impossible_requests_are_refused(prompt: list[int], options: dict[str, Any], message: str) -> None:
    target = target_of("llama")
    with pytest.raises(ValueError, match=message):
        decode(target, random_drafter(target, 0), prompt, **options)


def test_a_drafter_of_another_target_is_refused() -> None:
    with pytest.raises(ValueError, match="was made for the target"):
        decode(target_of("llama"), random_drafter(tiny_target("llama", seed=5), 0), [1])


def test_an_unbound_drafter_is_refused() -> None:
    target = target_of("llama")
    with pytest.raises(ValueError, match=r"call drafter\.bind\(target\) first"):
        decode(target, tiny_drafter(target, bind=False, target_layer_ids=[0, 2]), [1])


@pytest.mark.parametrize("policy", [Chain(), Budgeted(k=4, num_draft_nodes=32)], ids=str)
def test_float32_differs_at_near_ties_only(policy: TreePolicy) -> None:
    from treespark.decoding import compare_outputs

    target = tiny_target("qwen3", torch.float32, initializer_range=0.5)
    drafter = tiny_drafter(target, target_layer_ids=[0, 2])
    for prompt in ([1, 2, 3], [9, 33, 60], [50]):
        options: dict[str, Any] = {"max_new_tokens": 40, "end_token_ids": []}
        plain = decode_plain(target, prompt, **options)
        comparison = compare_outputs(plain, decode(target, drafter, prompt, policy=policy, **options))
        assert comparison.identical or comparison.near_tie
