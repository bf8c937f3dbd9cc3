"""`treespark generate`: its arguments are the function's.

Each finished unit of answers is appended to ``OUTPUT.partial``; a restart after any interruption redoes what was cut
off and nothing else, and the result is the same to the byte. ``OUTPUT.meta.json`` records which target and which
arguments wrote the file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treespark.data.answers import AnswerStore
from treespark.data.mixture import check_output, open_source
from treespark.data.prompts import DataError, OnError, Problems, PromptRecord
from treespark.generation.backend import Answer, Backend, Prompt
from treespark.generation.summary import GenerationSummary, progress_bar

if TYPE_CHECKING:
    from treespark.generation.local import LocalBackend

_FORMAT = 2  # of the answers: raised when the same arguments would give other bytes
_COUNTS = ("num_answers", "num_tokens", "num_stopped", "num_skipped", "num_rounds")


def generate(
    target: str | None,
    prompts: str | list[Any] | dict[str, Any],
    output: str,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    dtype: str = "float32",
    device: str | None = None,
    drafter: str | None = None,
    policy: str | None = None,
    server: str | None = None,
    model: str | None = None,
    endpoint: Literal["chat", "completions"] | None = None,
    concurrency: int = 32,
    timeout: float = 600.0,
    num_retries: int = 8,
    api_key_env: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    limit: int | None = None,
    on_error: OnError = "stop",
    overwrite: bool = False,
) -> GenerationSummary:
    """Write the target's greedy answer to each prompt of a source.

    Output lines keep the input's fields and order and add ``response``, ``response_ids`` (the end token included
    if it was reached) and ``finish_reason`` (``stop`` or ``length``). A trailing assistant message of the input is
    replaced. Sampling and penalties of the target's generation configuration are not applied.

    Args:
        target: name, folder or hub id of the target. With a server: of the tokenizer by which it is checked that the
            server reads the prompts as training will; the exact tokens of the answers are then kept. Without it,
            their text alone.
        prompts: JSONL file with ``prompt`` or ``messages`` a line, or any other source: a hub id (``owner/name``), a
            local data set, a mapping such as ``{dataset: owner/name, split: train, columns: {prompt: question}}``, a
            mixture by weight, or a YAML file that holds one.
        output: JSONL file to write.
        max_new_tokens: the most tokens of an answer.
        batch_size: prompts that are decoded side by side in this process.
        dtype: of the target in this process: float32, bfloat16, float16 or float64.
        device: where it runs, such as ``cuda``; an accelerator if there is one, unless given.
        drafter: folder, hub id or checkpoint file of a drafter, which speeds the target up in this process.
        policy: tree policy to draft under, such as ``Budgeted(k=4,num_draft_nodes=16)``; by default the one recorded
            with the drafter.
        server: address of an OpenAI-compatible server that answers in the place of this process, such as
            ``http://localhost:8000/v1``.
        model: the target's name there; by default ``target``.
        endpoint: ``chat``: the server renders the messages. ``completions``: it gets the tokens of the prompt, or the
            plain prompt if no target is given. By default ``chat``, and ``completions`` for a target without a chat
            template.
        concurrency: requests that the server works on at a time.
        timeout: seconds to wait for an answer of the server.
        num_retries: times to repeat a request that failed for the moment, with growing pauses.
        api_key_env: environment variable with the server's API key.
        chat_template_kwargs: options that the chat template reads, such as ``enable_thinking``.
        limit: use the first so many prompts only.
        on_error: ``stop`` at the first unusable line, or ``skip`` such lines with a report.
        overwrite: replace an output that other arguments wrote.

    Raises:
        FileNotFoundError: there is no such prompt file, target or drafter.
        DataError: a line cannot be used, or a prompt leaves no room for an answer in the target's context.
        ValueError: an argument is out of range, the output was written with other arguments, or the server refuses.
    """
    numbers = {
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "limit": limit,
        "concurrency": concurrency,
        "timeout": timeout,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if num_retries < 0:
        raise ValueError(f"num_retries must be at least 0, got {num_retries}.")
    local = {"drafter": drafter, "policy": policy, "device": device}
    remote = {"model": model, "endpoint": endpoint, "api_key_env": api_key_env}
    _refuse(remote, "needs --server", unless=server is not None)
    _refuse(local, "is for answers in this process; the server decides for itself", unless=server is None)
    _refuse({"policy": policy}, "needs --drafter", unless=drafter is not None)

    problems = Problems(on_error)
    opened = open_source(prompts, limit)
    records = list(opened.records(problems))  # before the target is loaded: bad files fail in no time
    check_output(output, opened)
    if not records:
        problems.report(opened.label, 0)

    backend: Backend
    if server is not None:
        from treespark.generation.server import ServerBackend

        backend = ServerBackend(
            server,
            model=model,
            target=target,
            endpoint=endpoint,
            max_new_tokens=max_new_tokens,
            concurrency=concurrency,
            timeout=timeout,
            num_retries=num_retries,
            api_key_env=api_key_env,
            chat_template_kwargs=chat_template_kwargs,
        )
    elif target is None:
        raise ValueError("No target: give --target, or --server and --model.")
    else:
        backend = _load(target, dtype, device, drafter, policy, chat_template_kwargs, max_new_tokens, batch_size)
    identity = {
        "format": _FORMAT,
        "chat_template_kwargs": dict(chat_template_kwargs or {}),
        "prompts_sha256": opened.sha256,
        "max_new_tokens": max_new_tokens,
        "limit": limit,
        **backend.identity,
    }
    store = AnswerStore(Path(output), identity, overwrite)
    source = {"target": target, "drafter": drafter, "server": server, "prompts": opened.describe()}
    source = {key: value for key, value in source.items() if value}
    summary = answer(backend, records, store, problems, source, opened.label)
    summary.show()
    return summary


def answer(
    backend: Backend,
    records: Iterable[PromptRecord],
    store: AnswerStore,
    problems: Problems,
    source: dict[str, Any],
    label: str,
) -> GenerationSummary:
    """Lets a backend answer what is not answered yet, and puts the output in place.

    Args:
        backend: where answers come from.
        records: the lines of a prompt file.
        store: the files of the answers.
        problems: what to do with lines that cannot be used.
        source: fields of the record beside the output.
        label: what reports call the prompts.

    Raises:
        DataError: a line cannot be used and ``problems`` stops at it, or none can.
        ValueError: the output belongs to other arguments, or the backend fails.
    """
    if (done := store.finished()) is not None:
        counts = {key: int(done[key]) for key in _COUNTS}
        reused = counts["num_answers"]
        return GenerationSummary(str(store.output), **counts, num_reused=reused, num_new_tokens=0, seconds=0.0)
    usable: list[Prompt] = []
    for record in records:
        try:
            usable.append(Prompt(len(usable), record, backend.prompt_ids(record)))
        except ValueError as error:
            problems.add(error if isinstance(error, DataError) else record.error(str(error)))
    problems.report(label, len(usable))
    refused = Problems(problems.on_error)  # by the backend, prompt by prompt
    units = backend.units(usable)
    started = time.monotonic()
    with store.open([[prompt.index for prompt in unit] for unit in units]) as rows:
        for row in rows.values():
            if "error" in row:
                refused.add(DataError(row["error"]))
        reused, old_tokens = len(rows) - len(refused.errors), _total(rows, "num_tokens")
        waiting = [unit for unit in units if unit[0].index not in rows]
        with (
            progress_bar(len(usable), len(rows)) as progress,
            closing(backend.answers(waiting, progress)) as answers,
        ):
            for unit_answers in answers:
                for found in unit_answers.values():
                    if isinstance(found, DataError):
                        refused.add(found)
                store.append({index: _row(found) for index, found in unit_answers.items()})
        kept = [
            (usable[index].record, Answer.from_row(row)) for index, row in sorted(rows.items()) if "error" not in row
        ]
        refused.report(label, len(kept))
        counts = {
            "num_answers": len(kept),
            "num_tokens": _total(rows, "num_tokens"),
            "num_stopped": sum(found.finish_reason == "stop" for _, found in kept),
            "num_skipped": len(problems.errors) + len(refused.errors),
            "num_rounds": _total(rows, "num_rounds"),
        }
        seconds = time.monotonic() - started
        lines = [_output_line(record, found) for record, found in kept]
        store.finish(lines, {**counts, **source, "seconds": round(seconds, 3)})
    new_tokens = counts["num_tokens"] - old_tokens
    return GenerationSummary(str(store.output), **counts, num_reused=reused, num_new_tokens=new_tokens, seconds=seconds)


def _refuse(options: Mapping[str, Any], why: str, unless: bool) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given and not unless:
        raise ValueError(f"{', '.join(given)} {why}.")


def _load(
    target: str,
    dtype: str,
    device: str | None,
    drafter: str | None,
    policy: str | None,
    chat_template_kwargs: dict[str, Any] | None,
    max_new_tokens: int,
    batch_size: int,
) -> LocalBackend:
    import logging

    import torch

    from treespark.data.template import ChatEncoder
    from treespark.drafters.source import check_template, open_drafter
    from treespark.generation.local import LocalBackend
    from treespark.policies import parse
    from treespark.target import Target

    chosen = None if policy is None else parse(policy)
    source = None if drafter is None else open_drafter(drafter)  # before the target, which takes longer
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = Target.load(target, dtype=dtype, device_map=None if device == "cpu" else device)
    bound = None if source is None else source.load(loaded)
    if bound is not None and check_template(bound, loaded, chat_template_kwargs or {}, allow_other=True)[1]:
        logging.getLogger(__name__).warning(
            "%s was trained with another chat template or other options (%s); its drafts may be accepted less often",
            drafter,
            bound.extra.get("chat_template_kwargs", {}),
        )
    return LocalBackend(
        loaded,
        ChatEncoder(loaded.tokenizer, chat_template_kwargs),
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        drafter=bound,
        policy=chosen,
    )


def _row(found: Answer | DataError) -> dict[str, Any]:
    return {"error": str(found)} if isinstance(found, DataError) else found.row()


def _total(rows: Mapping[int, Mapping[str, Any]], key: str) -> int:
    return sum(row.get(key, 0) for row in rows.values())


def _output_line(record: PromptRecord, found: Answer) -> str:
    fields = dict(record.fields)
    if found.ids is None:
        fields.pop("response_ids", None)  # of the answer that is replaced
    if fields.get("messages") is not None:
        fields["messages"] = list(record.messages)  # without the assistant message that the answer replaces
    return json.dumps({**fields, **found.fields}, ensure_ascii=False)
