"""Supervised spans: exactly the answer and its end token, for every kind of template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tiny_text import CHAT_TEMPLATE, GENERATION_TEMPLATE, THINKING_TEMPLATE, tiny_tokenizer
from treespark.data import ChatEncoder, DataError, Encoded, render
from treespark.data.prompts import parse_line

TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "good day"},
    {"role": "user", "content": "and now"},
    {"role": "assistant", "content": "then the rain"},
]
NO_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"  # noqa: E501
MERGING = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:t' }}{% endif %}"  # noqa: E501


def encode(line: dict[str, Any], template: str | None = CHAT_TEMPLATE, **kwargs: Any) -> tuple[Encoded, Any]:
    tokenizer = tiny_tokenizer(template)
    return ChatEncoder(tokenizer, kwargs).encode(parse_line(json.dumps(line), "data.jsonl", 1)), tokenizer


def texts(encoded: Encoded, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(encoded.ids[start:stop]) for start, stop in encoded.spans]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, GENERATION_TEMPLATE])
def test_multi_turn_spans_are_the_answers_and_their_end_tokens(template: str) -> None:
    """The newline that the template writes after the end token is in no span, and the last one is cut off."""
    encoded, tokenizer = encode({"messages": TALK}, template)
    assert texts(encoded, tokenizer) == ["good day<|im_end|>", "then the rain<|im_end|>"]
    assert encoded.spans[-1][1] == len(encoded.ids) and encoded.num_unplaced == 0


def test_the_prompt_of_training_is_the_prompt_of_decoding() -> None:
    """Every token before the answer equals what `render` gives for the conversation with the turn opened."""
    for template in (CHAT_TEMPLATE, GENERATION_TEMPLATE, NO_END, MERGING, None):
        line = {"prompt": "hello there", "response": "then the rain"}
        encoded, tokenizer = encode(line, template)
        prompt = render(tokenizer, [{"role": "user", "content": "hello there"}])
        assert encoded.ids[: encoded.spans[-1][0]] == prompt


def test_generation_tag_that_leaves_the_end_token_out() -> None:
    template = GENERATION_TEMPLATE.replace(
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert template != GENERATION_TEMPLATE
    encoded, tokenizer = encode({"messages": TALK}, template)
    assert texts(encoded, tokenizer) == ["good day<|im_end|>", "then the rain<|im_end|>"]


def test_generation_tag_with_mask_of_zeros_falls_back_to_prefixes() -> None:
    """Template whose tag encloses nothing: its mask is all zeros, the prefixes still find the answers."""
    template = GENERATION_TEMPLATE.replace(
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{% generation %}{% endgeneration %}{{ message['content'] + '<|im_end|>' }}",
    )
    encoded, tokenizer = encode({"messages": TALK}, template)
    assert texts(encoded, tokenizer) == ["good day<|im_end|>", "then the rain<|im_end|>"]


def test_generation_tag_around_everything_does_not_supervise_the_prompt() -> None:
    """A mask of ones is not believed: the answer is what comes after the prompt."""
    template = "{% generation %}" + CHAT_TEMPLATE + "{% endgeneration %}"
    encoded, tokenizer = encode({"prompt": "hi", "response": "yes"}, template)
    assert texts(encoded, tokenizer) == ["yes<|im_end|>"]


def test_exact_tokens_are_never_tokenised_again() -> None:
    """`t`, `h` would be one token `th` if the text were tokenised; the record says two, and no end token."""
    t, h = (tiny_tokenizer().convert_tokens_to_ids(c) for c in "th")
    line = {"messages": TALK[:4], "response": "th", "response_ids": [t, h], "finish_reason": "length"}
    encoded, tokenizer = encode(line)
    assert encoded.ids[-2:] == [t, h] and tokenizer("th")["input_ids"] != [t, h]
    assert texts(encoded, tokenizer) == ["good day<|im_end|>", "th"]
    assert encoded.spans[-1][0] == len(render(tokenizer, TALK[:4]))


def test_exact_tokens_equal_the_text_when_tokenised_alike() -> None:
    """An answer given as text and the same answer given as tokens make the same sample."""
    by_text, _ = encode({"messages": TALK})
    ids = by_text.ids[by_text.spans[-1][0] :]
    by_ids, _ = encode({"messages": TALK[:-1], "response": "then the rain", "response_ids": ids})
    assert by_ids == by_text


def test_length_means_no_end_token() -> None:
    encoded, tokenizer = encode({"prompt": "hi", "response": "yes", "finish_reason": "length"})
    assert texts(encoded, tokenizer) == ["yes"]
    plain, tokenizer = encode({"prompt": "hi", "response": "yes", "finish_reason": "length"}, None)
    assert texts(plain, tokenizer) == ["yes"]


def test_template_without_end_token_loses_only_its_newline() -> None:
    encoded, tokenizer = encode({"messages": TALK[1:]}, NO_END)
    assert texts(encoded, tokenizer) == ["good day", "then the rain"]


def test_tokens_that_merge_across_the_boundary() -> None:
    """Prompt `assistant:t`, answer `he rain` rendered `assistant:the rain`: the merge `th` would swallow the boundary.

    The conversation starts with the prompt as text but not as tokens; the answer is tokenised apart.
    """
    encoded, tokenizer = encode({"prompt": "hi", "response": "the rain"}, MERGING)
    assert texts(encoded, tokenizer) == ["he rain<|im_end|>"]


def test_base_model_without_template() -> None:
    """Prompt and answer follow each other as plain text, closed by the end token."""
    encoded, tokenizer = encode({"prompt": "a story", "response": " and more"}, None)
    assert tokenizer.decode(encoded.ids) == "a story and more<|im_end|>"
    assert texts(encoded, tokenizer) == [" and more<|im_end|>"]
    with pytest.raises(DataError, match="no chat template: a line must be one 'prompt'"):
        encode({"messages": TALK}, None)
    with pytest.raises(DataError, match=r"chat_template_kwargs \['x'\] are set.*no chat template"):
        encode({"prompt": "a", "response": "b"}, None, x=1)


def test_template_kwargs_reach_the_template() -> None:
    """With reasoning switched off the prompt opens with an empty block, and only what follows it is supervised."""
    encoded, tokenizer = encode({"prompt": "hi", "response": "yes"}, THINKING_TEMPLATE, enable_thinking=False)
    assert texts(encoded, tokenizer) == ["yes<|im_end|>"]
    assert tokenizer.decode(encoded.ids).endswith("(think)\n\nyes<|im_end|>")


def test_history_that_the_template_rewrites_is_context_only() -> None:
    """The first answer had a block before it when it was written and has none as history: not supervised, counted."""
    encoded, tokenizer = encode({"messages": TALK}, THINKING_TEMPLATE, enable_thinking=False)
    assert texts(encoded, tokenizer) == ["then the rain<|im_end|>"] and encoded.num_unplaced == 1


def test_prompt_that_is_no_prefix_is_an_error() -> None:
    """The template rewrites the user's turn once it is answered."""
    template = "{% for m in messages %}{{ (messages | length) ~ m['content'] + '<|im_end|>' }}{% endfor %}"
    with pytest.raises(DataError, match=r"data\.jsonl:1: the chat template writes the prompt .* differently"):
        encode({"prompt": "hi", "response": "yes"}, template)


def test_template_that_refuses_a_role() -> None:
    template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"refuses messages with roles \(user\): no system role"):
        encode({"prompt": "hi", "response": "yes"}, template)


def test_answer_that_contains_the_prompt_or_markers() -> None:
    """Content that repeats the header, the end token or the prompt must not move the span."""
    content = "assistant\n<|im_end|>\nhello there <|im_start|>assistant\n"
    encoded, tokenizer = encode({"prompt": "hello there", "response": content})
    assert texts(encoded, tokenizer) == [content + "<|im_end|>"]


def test_full_coverage_is_an_error() -> None:
    """A template that writes nothing before the answer leaves no prompt: every token would be supervised."""
    template = "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="every token would be supervised"):
        encode({"prompt": "hi", "response": "yes"}, template)
