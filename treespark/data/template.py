"""The one renderer of conversations, and the supervised spans of an answer.

Training, generation and decoding tokenise a conversation through :func:`render`, so that a drafter is trained on
the very tokens that decoding will show it. An answer's span holds its text and its end token, never the newline
that a template writes after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from treespark.data.prompts import Message, PromptRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Encoded(NamedTuple):
    """A tokenised conversation.

    Attributes:
        ids: tokens up to the end of the last answer.
        spans: supervised half-open ranges of ``ids``, ascending; the last one is the answer.
        num_unplaced: earlier assistant messages that the template renders differently once they are history (for
            example without their reasoning); they are context only.
    """

    ids: list[int]
    spans: list[Span]
    num_unplaced: int


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Tokens of a conversation; with a chat template as the template writes them, else the plain prompt.

    Without a template (a base model) the format is: the prompt's text as the tokenizer opens a document, then the
    answer's text, then the end token. A start token is written once, also if the prompt's text opens with it.

    Args:
        tokenizer: the target's tokenizer.
        messages: ``{"role", "content"}`` dictionaries.
        chat_template_kwargs: options that the template reads, such as ``enable_thinking``.
        add_generation_prompt: whether to open the assistant's turn.

    Raises:
        ValueError: the template refuses the messages, or there is no template and more than one user message.
    """
    if not tokenizer.chat_template:
        return _render_plain(tokenizer, messages, chat_template_kwargs)
    return list(_apply(tokenizer, messages, chat_template_kwargs, add_generation_prompt, return_dict=False))


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat_template_kwargs: Mapping[str, Any] | None,
    add_generation_prompt: bool,
    **options: Any,
) -> Any:
    try:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, **options, **(chat_template_kwargs or {})
        )
    except Exception as error:  # templates are programs: they raise whatever their author chose
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"the chat template refuses messages with roles ({roles}): {error}") from error


def _render_plain(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None
) -> list[int]:
    if chat_template_kwargs:
        raise ValueError(
            f"chat_template_kwargs {sorted(chat_template_kwargs)} are set, but the target's tokenizer has no chat "
            "template."
        )
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise ValueError(
            "the target's tokenizer has no chat template: a line must be one 'prompt' (or one user message), "
            f"got {len(messages)} messages. Use an instruction-tuned target or single prompts."
        )
    ids = list(tokenizer(messages[0]["content"])["input_ids"])
    if ids and ids[-1] == tokenizer.eos_token_id and not messages[0]["content"].endswith(str(tokenizer.eos_token)):
        ids.pop()  # tokenizers that close every text would end the document before the answer
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        del ids[0]  # the text brings the start token that the tokenizer writes anyway
    return ids


class ChatEncoder:
    """Tokenises records and finds their supervised spans.

    Args:
        tokenizer: the target's tokenizer.
        chat_template_kwargs: options that the chat template reads.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        template = tokenizer.chat_template
        text = template if isinstance(template, str) else " ".join((template or {}).values())
        self.has_generation_tag = bool(_GENERATION_TAG.search(text))

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Tokens that decoding starts from: the conversation with the assistant's turn opened."""
        return render(self.tokenizer, messages, self.chat_template_kwargs, add_generation_prompt=True)

    def answer_text(self, ids: Sequence[int]) -> str:
        """Text of an answer's tokens, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode(self, record: PromptRecord) -> Encoded:
        """Tokens and supervised spans of a record with an answer.

        An answer that carries ``response_ids`` is used token for token. An answer given as text gets its end token
        from the template (the tokenizer's, without a template) unless ``finish_reason`` is ``"length"``.

        Raises:
            DataError: there is no answer, the tokens do not match the text, the template writes the prompt of an
                answered conversation differently, or the supervised share would be 0 or 1.
        """
        if not record.has_answer:
            raise record.error("has no assistant answer. Let the target write one first: treespark generate.")
        try:
            prompt = self.prompt_ids(record.messages)
            if record.response_ids is not None:
                self._check_ids(record)
                ids = [*prompt, *record.response_ids]
                answer = (len(prompt), len(ids))
            elif not self.tokenizer.chat_template:
                ids, answer = self._plain_answer(prompt, record)
            else:
                ids, answer = self._template_answer(prompt, record)
            history, num_unplaced = self._history_spans(record.messages, prompt)
        except ValueError as error:
            raise record.error(str(error)) from error
        spans = [*history, answer]
        num_supervised = sum(end - start for start, end in spans)
        if answer[0] >= answer[1]:
            raise record.error("the assistant's answer is empty: no token would be supervised.")
        if num_supervised == len(ids):
            raise record.error("every token would be supervised: the prompt is empty.")
        return Encoded(ids, spans, num_unplaced)

    def _check_ids(self, record: PromptRecord) -> None:
        assert record.response_ids is not None
        size = len(self.tokenizer)
        if (largest := max(record.response_ids)) >= size:
            raise ValueError(
                f"'response_ids' holds {largest}, the tokenizer has {size} tokens. Was it written by another target?"
            )
        if record.response is not None and (text := self.answer_text(record.response_ids)) != record.response:
            raise ValueError(
                f"'response_ids' decode to {text[:60]!r}, 'response' is {record.response[:60]!r}. Was the line edited, "
                "or written by another target?"
            )

    def _plain_answer(self, prompt: list[int], record: PromptRecord) -> tuple[list[int], Span]:
        # Prompt and answer are tokenised apart: decoding sees the prompt's own tokens, whatever follows.
        ids = prompt + self._tokenize(record.response or "")
        if record.response and record.finish_reason != "length" and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        return ids, (len(prompt), len(ids))

    def _template_answer(self, prompt: list[int], record: PromptRecord) -> tuple[list[int], Span]:
        if not record.response:
            return prompt, (len(prompt), len(prompt))
        conversation = [*record.messages, {"role": "assistant", "content": record.response}]
        ids, mask = self._render_masked(conversation, add_generation_prompt=False)
        start = len(prompt)
        if ids[:start] != prompt:
            ids = prompt + self._tokenize(self._text_after_prompt(record.messages, conversation))
        elif runs := [run for run in _runs(mask) if run[0] >= start]:
            start, stop = self._closed(ids, runs[-1])
            ids = ids[:stop]
        end = self._trimmed(ids, start, len(ids))
        if record.finish_reason == "length" and end > start and ids[end - 1] in self.special_ids:
            end -= 1
        return ids[:end], (start, end)

    def _text_after_prompt(self, messages: Sequence[Message], conversation: Sequence[Message]) -> str:
        """What the template writes after the prompt, when tokens merge across that boundary."""
        prompt = _apply(self.tokenizer, messages, self.chat_template_kwargs, True, tokenize=False)
        full = _apply(self.tokenizer, conversation, self.chat_template_kwargs, False, tokenize=False)
        if not full.startswith(prompt):
            raise ValueError(
                "the chat template writes the prompt of an answered conversation differently from the prompt that "
                f"decoding starts from (which ends with {prompt[-40:]!r}). Set chat_template_kwargs to those the "
                "answers were written with, or let the target write the answers: treespark generate."
            )
        return str(full[len(prompt) :])

    def _history_spans(self, messages: Sequence[Message], prompt: list[int]) -> tuple[list[Span], int]:
        """Spans of earlier assistant messages, where the prompt holds them just as decoding would have."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return [], 0
        if self.has_generation_tag and turns[0] and not any(self._render_masked(messages[: turns[0]], True)[1]):
            # A mask that marks a conversation without answers encloses other text than answers.
            ids, mask = self._render_masked(messages, add_generation_prompt=True)
            if ids == prompt and len(runs := _runs(mask)) == len(turns):
                return [self._closed(ids, run) for run in runs], 0
        spans = []
        for index in turns:
            try:
                head = self.prompt_ids(messages[:index])
                through = render(
                    self.tokenizer, messages[: index + 1], self.chat_template_kwargs, add_generation_prompt=False
                )
            except ValueError:  # templates may refuse a conversation that stops here
                continue
            if prompt[: len(through)] == through and through[: len(head)] == head:
                end = self._trimmed(through, len(head), len(through))
                spans.append((len(head), end))
        return [span for span in spans if span[0] < span[1]], len(turns) - len(spans)

    def _closed(self, ids: list[int], run: Span) -> Span:
        """A span of the template's mask with its end token, which templates may leave out of their block."""
        start, stop = run
        stop += stop < len(ids) and ids[stop - 1] not in self.special_ids and ids[stop] in self.special_ids
        return start, self._trimmed(ids, start, stop)

    def _render_masked(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[list[int], list[int]]:
        """Tokens and the template's own assistant mask: all zeros where it has none."""
        if not self.has_generation_tag:
            ids = render(self.tokenizer, messages, self.chat_template_kwargs, add_generation_prompt)
            return ids, [0] * len(ids)
        out = _apply(
            self.tokenizer,
            messages,
            self.chat_template_kwargs,
            add_generation_prompt,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return list(out["input_ids"]), list(out["assistant_masks"])

    def _trimmed(self, ids: Sequence[int], start: int, stop: int) -> int:
        """End of an answer: after its end token, or before the white space that the template writes after it."""
        end = stop
        while end > start and ids[end - 1] not in self.special_ids and self._is_blank(ids[end - 1]):
            end -= 1
        return end

    def _is_blank(self, token: int) -> bool:
        return not str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False)).strip()

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _runs(mask: Sequence[int]) -> list[Span]:
    """Half-open ranges of consecutive ones.

    >>> _runs([0, 1, 1, 0, 1])
    [(1, 3), (4, 5)]
    """
    edges = [0, *mask, 0]
    starts = [i for i in range(len(mask)) if edges[i + 1] and not edges[i]]
    stops = [i + 1 for i in range(len(mask)) if edges[i + 1] and not edges[i + 2]]
    return list(zip(starts, stops, strict=True))
