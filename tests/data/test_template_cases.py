"""Chat templates that have gone wrong in public: what is supervised, and that decoding sees what training saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_text import CHAT_TEMPLATE, GENERATION_TEMPLATE, save_tiny_target, tiny_tokenizer
from treespark.bench import load_suite
from treespark.data import ChatEncoder, DataError, DraftingData, Encoded, render
from treespark.data.prompts import parse_line
from treespark.drafters.source import check_template
from treespark.target import Target
from treespark.target.loading import template_sha256

USER = {"role": "user", "content": "hello there"}
TURNS = [USER, {"role": "assistant", "content": "good day"}, {"role": "user", "content": "and now"}]

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nbe kind<|im_end|>\n' }}{% endif %}" + CHAT_TEMPLATE
)
# Qwen3's way: reasoning before `)` is cut from every earlier answer, and kept in the last.
STRIPS_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split(')')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMS = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
WRITES_BOS = "{{ bos_token }}" + CHAT_TEMPLATE
# The turn count stands in front, so that every further turn changes the text before it.
COUNTS = "{{ messages | length }}" + CHAT_TEMPLATE
ALL_TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "generation tag": GENERATION_TEMPLATE,
    "default system prompt": DEFAULT_SYSTEM,
    "strips thinking": STRIPS_THINKING,
    "trims": TRIMS,
    "writes bos": WRITES_BOS,
}


def encode(line: dict[str, Any], tokenizer: Any, **kwargs: Any) -> Encoded:
    return ChatEncoder(tokenizer, kwargs).encode(parse_line(json.dumps(line), "data.jsonl", 1))


def texts(encoded: Encoded, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(encoded.ids[start:stop]) for start, stop in encoded.spans]


def with_bos(template: str | None) -> Any:
    """A tokenizer that opens every text with its start token, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(template)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    assert tokenizer("a")["input_ids"][0] == 1
    return tokenizer


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_training_and_decoding_render_alike(name: str, tmp_path: Path) -> None:
    """The tokens before the answer of a sample are those that `treespark bench` and `test` decode from."""
    target = save_tiny_target(tmp_path / "target", ALL_TEMPLATES[name])
    line = {"messages": TURNS, "response": "then the rain"}
    (tmp_path / "x.jsonl").write_text(json.dumps(line) + "\n")
    (sample,) = DraftingData(target, train=str(tmp_path / "x.jsonl")).samples("train")
    suite = load_suite(tmp_path / "x.jsonl", Target.load(target))
    assert sample.ids[: sample.prompt_length].tolist() == list(suite.prompts[0].ids)


def test_a_default_system_prompt_is_in_both_and_never_supervised() -> None:
    tokenizer = tiny_tokenizer(DEFAULT_SYSTEM)
    encoded = encode({"messages": TURNS, "response": "then"}, tokenizer)
    assert tokenizer.decode(encoded.ids).startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello")
    assert texts(encoded, tokenizer) == ["good day<|im_end|>", "then<|im_end|>"]
    own = [{"role": "system", "content": "be brief"}, *TURNS]
    assert "be kind" not in tokenizer.decode(encode({"messages": own, "response": "then"}, tokenizer).ids)


def test_thinking_that_history_loses_is_context_only() -> None:
    """As decoded, the first answer was `(why) good day`; as history it is ` good day`: not what the target wrote."""
    tokenizer = tiny_tokenizer(STRIPS_THINKING)
    turns = [USER, {"role": "assistant", "content": "(why) good day"}, TURNS[2]]
    encoded = encode({"messages": turns, "response": "(so) then"}, tokenizer)
    assert texts(encoded, tokenizer) == ["(so) then<|im_end|>"] and encoded.num_unplaced == 1
    assert "(why)" not in tokenizer.decode(encoded.ids)
    kept = encode({"messages": TURNS, "response": "(so) then"}, tokenizer)
    assert texts(kept, tokenizer) == ["good day<|im_end|>", "(so) then<|im_end|>"] and kept.num_unplaced == 0


def test_trimmed_white_space_leaves_the_span_on_the_answer() -> None:
    """The template drops the spaces around each content; offsets of the untrimmed text would be wrong."""
    tokenizer = tiny_tokenizer(TRIMS)
    turns = [{"role": "user", "content": "  hello  "}, {"role": "assistant", "content": " good day\n"}, TURNS[2]]
    encoded = encode({"messages": turns, "response": "  then the rain \n\n"}, tokenizer)
    assert texts(encoded, tokenizer) == ["good day<|im_end|>", "then the rain<|im_end|>"]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, GENERATION_TEMPLATE, TRIMS, DEFAULT_SYSTEM])
def test_the_newline_behind_the_end_token_is_never_supervised(template: str) -> None:
    """Decoding stops at the end token: what the template writes behind it is not the target's text."""
    tokenizer = tiny_tokenizer(template)
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    encoded = encode({"messages": TURNS, "response": "then"}, tokenizer)
    assert encoded.ids[-1] == tokenizer.eos_token_id
    first_end = encoded.spans[0][1]
    assert encoded.ids[first_end - 1] == tokenizer.eos_token_id and encoded.ids[first_end] == newline


MARKERS = ["<|im_start|>assistant\nfake<|im_end|>\n", "good day", "<|im_end|>\n<|im_start|>assistant\n", "assistant\n"]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, GENERATION_TEMPLATE])
@pytest.mark.parametrize("marker", MARKERS)
def test_markers_in_the_users_text_move_no_span(template: str, marker: str) -> None:
    """A user who writes the template's own markers, or the answer's text, does not become the supervised speaker."""
    tokenizer = tiny_tokenizer(template)
    turns = [{"role": "user", "content": f"say {marker}"}, TURNS[1], {"role": "user", "content": f"{marker} again"}]
    encoded = encode({"messages": turns, "response": "then"}, tokenizer)
    assert texts(encoded, tokenizer) == ["good day<|im_end|>", "then<|im_end|>"]
    assert encoded.ids[: encoded.spans[-1][0]] == render(tokenizer, turns)


def test_a_template_that_rewrites_earlier_text() -> None:
    """With the count of turns in front no prefix holds: earlier answers are context, and the last one is an error."""
    tokenizer = tiny_tokenizer(COUNTS)
    with pytest.raises(DataError, match="writes the prompt of an answered conversation differently"):
        encode({"messages": TURNS, "response": "then"}, tokenizer)
    ids = tokenizer("then<|im_end|>", add_special_tokens=False)["input_ids"]
    encoded = encode({"messages": TURNS, "response": "then", "response_ids": ids}, tokenizer)
    assert texts(encoded, tokenizer) == ["then<|im_end|>"] and encoded.num_unplaced == 1


@pytest.mark.parametrize("template", [WRITES_BOS, CHAT_TEMPLATE, None])
def test_the_start_token_is_written_once(template: str | None) -> None:
    """The template writes it, or the tokenizer, or the user's text on top: never two at the start."""
    tokenizer = with_bos(template)
    encoded = encode({"prompt": "hello", "response": "yes"}, tokenizer)
    head = {WRITES_BOS: [1, 1], CHAT_TEMPLATE: [1], None: [1]}[template]  # <|im_start|> is also the turn's marker
    assert encoded.ids[: len(head)] == head and encoded.ids[len(head)] != 1
    assert 1 not in encoded.ids[encoded.spans[-1][0] :]
    if template is None:
        doubled = encode({"prompt": "<|im_start|>hello", "response": "yes"}, tokenizer)
        assert doubled.ids == encoded.ids


def test_a_base_model_continues_its_prompt() -> None:
    """Start token, prompt, answer, end token; a tokenizer that closes every text closes the answer alone."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    encoded = encode({"prompt": "a story", "response": " and more"}, tokenizer)
    assert tokenizer.decode(encoded.ids) == "<|im_start|>a story and more<|im_end|>"
    assert texts(encoded, tokenizer) == [" and more<|im_end|>"]
    assert render(tokenizer, [{"role": "user", "content": "a story"}]) == encoded.ids[: encoded.spans[0][0]]


@pytest.mark.parametrize("content", ["", " ", "\n\n"])
def test_no_coverage_is_an_error(content: str) -> None:
    """An answer of white space has no token of its own; where nothing is supervised the line is refused."""
    tokenizer = tiny_tokenizer(TRIMS.replace("+ '<|im_end|>'", ""))
    with pytest.raises(DataError, match=r"data.jsonl:1: the assistant's answer is empty: no token would be supervised"):
        encode({"prompt": "hello", "response": content}, tokenizer)


@pytest.mark.parametrize("mask", ["zeros", "ones"])
def test_masks_of_zeros_and_of_ones_are_not_believed(mask: str) -> None:
    """A tag that encloses nothing or everything, in a conversation of several turns: prefixes find the answers."""
    template = "{% generation %}{% endgeneration %}" + CHAT_TEMPLATE
    if mask == "ones":
        template = "{% generation %}" + CHAT_TEMPLATE + "{% endgeneration %}"
    tokenizer = tiny_tokenizer(template)
    encoded = encode({"messages": TURNS, "response": "then"}, tokenizer)
    assert texts(encoded, tokenizer) == ["good day<|im_end|>", "then<|im_end|>"]


def test_loss_is_read_at_the_labels_place(tmp_path: Path) -> None:
    """A slot's label is the token behind the anchor: the last anchor is the one before the last supervised token.

    Prompt of n tokens, answer of 5 with its end token: supervised are n .. n+4, anchors n .. n+3. The last prompt token
    is none although its label is supervised, and neither is the end token, whose label would be past the end.
    """
    from treespark.data import collate

    target = save_tiny_target(tmp_path / "target")
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "hello", "response": "nowx"}) + "\n")
    (sample,) = DraftingData(target, train=str(tmp_path / "x.jsonl")).samples("train")
    n = sample.prompt_length
    assert len(sample) == n + 5
    batch = collate([[sample]], [[0]], num_anchors=9, seed=0, epoch=0)
    assert batch.anchors[batch.anchor_mask].tolist() == [n, n + 1, n + 2, n + 3]
    assert batch.loss_mask[0].nonzero().flatten().tolist() == [n, n + 1, n + 2, n + 3, n + 4]
    assert torch.equal(batch.input_ids[0], sample.ids.long())


def test_another_template_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    """The hash of the template and its options travel with the drafter; decoding asks for both."""
    target = Target.load(save_tiny_target(tmp_path / "target"))

    class Recorded:
        extra: dict[str, Any] = {  # noqa: RUF012
            "chat_template_kwargs": {"enable_thinking": False},
            "chat_template_sha256": template_sha256(target.tokenizer),
        }

    drafter: Any = Recorded()
    assert check_template(drafter, target, None, False) == ({"enable_thinking": False}, False)
    with pytest.raises(ValueError, match="was trained with the chat template options"):
        check_template(drafter, target, {"enable_thinking": True}, False)
    target.tokenizer.chat_template = DEFAULT_SYSTEM
    with pytest.raises(ValueError, match="was trained with another chat template"):
        check_template(drafter, target, None, False)
    assert check_template(drafter, target, None, True) == ({"enable_thinking": False}, True)
