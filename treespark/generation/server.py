"""Answers from an OpenAI-compatible server: vLLM, SGLang, `transformers serve` and others.

With the target's tokenizer, the server is asked for token ids (``return_token_ids``, as vLLM and SGLang know it). Its
prompt tokens must then be those that training will see, and the exact tokens of its answers are kept. Without the
tokenizer only the text is kept, and training tokenises it anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from typing import Any, Literal

from anyio.from_thread import start_blocking_portal

from treespark.data.prompts import DataError, PromptRecord
from treespark.data.template import ChatEncoder
from treespark.generation.backend import Answer, Answers, Backend, Progress, Prompt
from treespark.generation.client import Client, Refused, base_url
from treespark.target.loading import load_end_tokens, load_tokenizer, template_sha256

Endpoint = Literal["chat", "completions"]

_log = logging.getLogger(__name__)
_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
# vLLM and SGLang apply the penalty of the target's generation configuration unless a request says otherwise.
_EXTENSIONS: Mapping[str, Any] = {"repetition_penalty": 1.0}
_TEXT_ALONE = "vLLM and SGLang give them; leave --target out, and name --model, to keep the text of the answers alone."
_MOST_REFUSED = 20  # refusals before the first answer: then it is not the prompts


class ServerBackend(Backend):
    """A server that answers one prompt a request.

    Args:
        url: address of the server.
        model: the target's name there; None takes ``target``.
        target: name, folder or hub id of the target's tokenizer; None keeps the text of the answers only.
        endpoint: ``chat`` or ``completions``; None takes ``chat`` unless the tokenizer has no chat template.
        max_new_tokens: the most tokens of an answer.
        concurrency: requests at a time.
        timeout: seconds to wait for an answer.
        num_retries: times that a request is repeated.
        api_key_env: environment variable with the API key; None sends none.
        chat_template_kwargs: options that the chat template reads.

    Raises:
        FileNotFoundError: there is no such target.
        ValueError: the arguments do not fit together, or the environment variable is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        target: str | None = None,
        endpoint: Endpoint | None = None,
        max_new_tokens: int = 256,
        concurrency: int = 32,
        timeout: float = 600.0,
        num_retries: int = 8,
        api_key_env: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if model is None and target is None:
            raise ValueError("--server needs --model, the name under which it serves the target.")
        self.url, self.model = base_url(url), model or str(target)
        self.max_new_tokens, self.concurrency = max_new_tokens, concurrency
        self.timeout, self.num_retries = timeout, num_retries
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self._api_key = None if api_key_env is None else os.environ.get(api_key_env)
        if api_key_env is not None and not self._api_key:
            raise ValueError(f"--api_key_env: the environment variable {api_key_env} is not set.")
        self.encoder: ChatEncoder | None = None
        self.end_token_ids: tuple[int, ...] = ()
        if target is not None:
            tokenizer = load_tokenizer(target)
            self.encoder = ChatEncoder(tokenizer, self.chat_template_kwargs)
            self.end_token_ids = load_end_tokens(target, tokenizer)
        plain = self.encoder is not None and not self.encoder.tokenizer.chat_template
        self.endpoint: Endpoint = endpoint or ("completions" if plain else "chat")
        if self.endpoint == "chat" and plain:
            raise ValueError(f"The tokenizer of {target} has no chat template: leave --endpoint out.")
        if self.endpoint == "completions" and self.encoder is None and self.chat_template_kwargs:
            raise ValueError(
                "chat_template_kwargs are set, but the completions endpoint renders no template: give --target, whose "
                "tokenizer renders it here, or use the chat endpoint."
            )
        self._extensions = dict(_EXTENSIONS)

    @property
    def identity(self) -> dict[str, Any]:
        """What is asked for; not the address, under which another machine may go on."""
        exact = {}
        if self.encoder is not None:
            exact = {
                "chat_template": template_sha256(self.encoder.tokenizer),
                "vocabulary": len(self.encoder.tokenizer),
            }
        return {"model": self.model, "endpoint": self.endpoint, **exact}

    def prompt_ids(self, record: PromptRecord) -> list[int] | None:
        """Tokens of a line's prompt where the tokenizer is here.

        Raises:
            ValueError: the template refuses it, or it is no plain prompt and there is no template.
        """
        if self.encoder is not None:
            return self.encoder.prompt_ids(record.messages)
        if self.endpoint == "completions" and [message["role"] for message in record.messages] != ["user"]:
            raise ValueError(
                f"the completions endpoint takes one 'prompt' (or one user message), got {len(record.messages)} "
                "messages. Give --target, whose tokenizer renders them, or use the chat endpoint."
            )
        return None

    def units(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Each prompt alone: an answer is kept as soon as it comes."""
        return [[prompt] for prompt in prompts]

    def answers(self, units: Sequence[Sequence[Prompt]], progress: Progress) -> Answers:
        """Asks for many answers at a time, the first one alone: what fails always then fails once."""
        waiting, running = iter(units), dict[Future[Answer | DataError], Prompt]()
        num_answered = num_refused = 0
        if not units:
            return
        client = Client(
            self.url,
            api_key=self._api_key,
            concurrency=self.concurrency,
            timeout=self.timeout,
            num_retries=self.num_retries,
        )
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(client):
            size = 1
            while True:
                for unit in islice(waiting, size - len(running)):
                    running[portal.start_task_soon(self._answer, client, unit[0])] = unit[0]
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda task: task.exception() is not None):  # failures last
                    prompt, found = running.pop(future), future.result()
                    if isinstance(found, Answer):
                        num_answered, size = num_answered + 1, self.concurrency
                        progress(1, found.num_tokens)
                    else:
                        num_refused += 1
                        progress(1, 0)
                    if not num_answered and num_refused >= _MOST_REFUSED:
                        raise ValueError(f"The server has refused each of {num_refused} prompts, the last one: {found}")
                    yield {prompt.index: found}

    async def _answer(self, client: Client, prompt: Prompt) -> Answer | DataError:
        while True:
            body = self._body(prompt) | self._extensions
            try:
                reply = await client.post(_PATHS[self.endpoint], body)
            except Refused as error:
                if "return_token_ids" in body and "return_token_ids" in str(error):
                    raise ValueError(f"{self.url} gives no token ids: {error} {_TEXT_ALONE}") from error
                unknown = next((name for name in _EXTENSIONS if name in body and name in str(error)), None)
                if unknown is None:
                    return prompt.record.error(str(error))
                _log.warning(
                    "%s does not know %s: a penalty in the target's generation configuration would change the answers",
                    self.url,
                    unknown,
                )
                self._extensions.pop(unknown, None)
                continue
            return self._read(prompt, reply)

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.max_new_tokens, "temperature": 0}
        if self.encoder is not None:
            body["return_token_ids"] = True
        if self.endpoint == "chat":
            body["messages"] = list(prompt.record.messages)
            if self.chat_template_kwargs:
                body["chat_template_kwargs"] = self.chat_template_kwargs
        else:
            body["prompt"] = prompt.record.messages[0]["content"] if prompt.ids is None else prompt.ids
        return body

    def _read(self, prompt: Prompt, reply: Mapping[str, Any]) -> Answer | DataError:
        choices = reply.get("choices")
        if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
            raise ValueError(
                f"{self.url} answers without 'choices': {str(dict(reply))[:200]}. Is it OpenAI-compatible?"
            )
        choice = choices[0]
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            return prompt.record.error(f"the server ended the answer with {reason!r}; expected 'stop' or 'length'.")
        if self.encoder is not None:
            ids = self._exact(prompt, reply, choice)
            return Answer(self.encoder.answer_text(ids), ids, reason, len(ids))
        count = (reply.get("usage") or {}).get("completion_tokens")
        return Answer(self._text(choice), None, reason, count if isinstance(count, int) else 0)

    def _text(self, choice: Mapping[str, Any]) -> str:
        if self.endpoint == "completions":
            return str(choice.get("text") or "")
        message = choice.get("message") or {}
        if message.get("reasoning_content") or message.get("reasoning"):
            raise ValueError(
                f"{self.url} hands the reasoning apart from the answer, so that what the target wrote cannot be put "
                "together again. Serve it without a reasoning parser, or give --target to keep the tokens instead."
            )
        return str(message.get("content") or "")

    def _exact(self, prompt: Prompt, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> list[int]:
        """The answer's tokens, once the prompt's are known to be ours."""
        ids = choice.get("token_ids")
        theirs = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        if not ids or not theirs:
            raise ValueError(f"{self.url} gives no token ids, though 'return_token_ids' asked for them. {_TEXT_ALONE}")
        ours = prompt.ids or []
        if list(theirs) != ours:
            pairs = zip([*ours, None], [*theirs, None], strict=False)
            at, (mine, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            raise ValueError(
                f"{prompt.record.where}: the server reads this prompt otherwise than training would: token {at} is "
                f"{other} there and {mine} here ({len(theirs)} and {len(ours)} tokens). Serve the target with the chat "
                "template of its tokenizer, or use --endpoint completions, which sends the tokens."
            )
        if choice["finish_reason"] == "stop" and ids[-1] not in self.end_token_ids:
            raise ValueError(
                f"{prompt.record.where}: the server stops after token {ids[-1]}, which is no end token of the target "
                f"({', '.join(map(str, self.end_token_ids))}). Serve it without stop strings of its own."
            )
        return list(ids)
