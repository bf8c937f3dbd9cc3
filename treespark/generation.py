"""The target's own greedy answers for a prompt file: what a drafter trains on and is validated with.

Batches depend on the order of the input alone. Each finished batch is appended to ``OUTPUT.partial``; a restart
after any interruption redoes the batch that was cut off and nothing else, and the result is the same to the byte.
``OUTPUT.meta.json`` records which target and which arguments wrote the file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from treespark.data.answers import AnswerStore
from treespark.data.mixture import open_source
from treespark.data.prompts import DataError, OnError, Problems, PromptRecord
from treespark.data.template import ChatEncoder, template_sha256

if TYPE_CHECKING:
    from treespark.target import Target

_WINDOW = 8  # batches among which prompts are sorted by length, which saves padding
_FORMAT = 1  # of the answers: raised when the same arguments would give other bytes


@dataclass(frozen=True)
class GenerationSummary:
    """What a call of :func:`generate` did.

    Attributes:
        output: the file with the answers.
        num_answers: its lines.
        num_tokens: generated tokens, end tokens included.
        num_stopped: answers that reached an end token.
        num_skipped: unusable input lines that were left out.
        num_reused: answers that an earlier call had written.
        seconds: time spent in this call, loading excluded.
    """

    output: str
    num_answers: int
    num_tokens: int
    num_stopped: int
    num_skipped: int
    num_reused: int
    seconds: float


@dataclass(frozen=True)
class _Prompt:
    index: int
    record: PromptRecord
    ids: list[int]


def generate(
    target: str,
    prompts: str | list[Any] | dict[str, Any],
    output: str,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    dtype: str = "float32",
    device: str | None = None,
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
        target: name, folder or hub id of the target.
        prompts: JSONL file with ``prompt`` or ``messages`` a line, or any other source: a hub id (``owner/name``), a
            local data set, a mapping such as ``{dataset: owner/name, split: train, columns: {prompt: question}}``, a
            mixture by weight, or a YAML file that holds one.
        output: JSONL file to write.
        max_new_tokens: the most tokens of an answer.
        batch_size: prompts that are answered together.
        dtype: of the target: float32, bfloat16, float16 or float64.
        device: where the target runs, such as ``cuda``; an accelerator if there is one, unless given.
        chat_template_kwargs: options that the chat template reads, such as ``enable_thinking``.
        limit: use the first so many prompts only.
        on_error: ``stop`` at the first unusable line, or ``skip`` such lines with a report.
        overwrite: replace an output that other arguments wrote.

    Raises:
        FileNotFoundError: there is no such prompt file.
        DataError: a line cannot be used, or a prompt leaves no room for an answer in the target's context.
        ValueError: an argument is out of range, or the output was written with other arguments.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    problems = Problems(on_error)
    source = open_source(prompts, limit)
    records = list(source.records(problems))  # before the target is loaded: bad files fail in no time
    if Path(output).resolve() in [Path(path).resolve() for path in source.files]:
        raise ValueError(f"output and prompts are the same file, {output}. Give the answers a file of their own.")
    if not records:
        problems.report(source.label, 0)

    from treespark.target import Target

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = Target.load(target, dtype=dtype, device_map=None if device == "cpu" else device)
    encoder = ChatEncoder(loaded.tokenizer, chat_template_kwargs)
    identity = {
        "format": _FORMAT,
        "fingerprint": loaded.spec.fingerprint,
        "chat_template": template_sha256(loaded.tokenizer),
        "chat_template_kwargs": dict(chat_template_kwargs or {}),
        "prompts_sha256": source.sha256,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "dtype": dtype,
        "limit": limit,
    }
    store = AnswerStore(Path(output), identity, overwrite)
    if (done := store.finished()) is not None:
        counts = {key: int(done[key]) for key in ("num_answers", "num_tokens", "num_stopped", "num_skipped")}
        return _shown(GenerationSummary(output, **counts, num_reused=counts["num_answers"], seconds=0.0))

    usable = _encode(records, encoder, loaded, max_new_tokens, problems)
    problems.report(source.label, len(usable))
    batches = _batches(usable, batch_size)
    started = time.monotonic()
    with store.open([[prompt.index for prompt in batch] for batch in batches]) as answers:
        num_reused = len(answers)
        with _progress(len(usable), num_reused) as advance:
            for batch in batches:
                if batch[0].index in answers:
                    continue
                ids = answer_batch(loaded, [prompt.ids for prompt in batch], max_new_tokens)
                store.append(
                    {
                        prompt.index: _answer(encoder, tokens, loaded.spec.eos_token_ids)
                        for prompt, tokens in zip(batch, ids, strict=True)
                    }
                )
                advance(len(batch), sum(map(len, ids)))
        lines = [_output_line(prompt.record, answers[prompt.index]) for prompt in usable]
        counts = {
            "num_answers": len(lines),
            "num_tokens": sum(len(answer["response_ids"]) for answer in answers.values()),
            "num_stopped": sum(answer["finish_reason"] == "stop" for answer in answers.values()),
            "num_skipped": len(problems.errors),
        }
        seconds = time.monotonic() - started
        store.finish(lines, {**counts, "target": target, "prompts": source.describe(), "seconds": round(seconds, 3)})
    return _shown(GenerationSummary(output, **counts, num_reused=num_reused, seconds=seconds))


def _shown(summary: GenerationSummary) -> GenerationSummary:
    from rich.console import Console

    reused = f", {summary.num_reused} of them from before" if summary.num_reused else ""
    skipped = f"; {summary.num_skipped} lines skipped" if summary.num_skipped else ""
    Console(soft_wrap=True, highlight=False).print(
        f"{summary.output}: {summary.num_answers} answers{reused}, {summary.num_tokens} tokens, "
        f"{summary.num_stopped} reached their end{skipped}",
        markup=False,
    )
    return summary


def _encode(
    records: Sequence[PromptRecord], encoder: ChatEncoder, target: Target, max_new_tokens: int, problems: Problems
) -> list[_Prompt]:
    room = target.spec.max_position_embeddings - max_new_tokens
    usable: list[_Prompt] = []
    for record in records:
        try:
            ids = encoder.prompt_ids(record.messages)
            if not ids:
                raise ValueError("the prompt has no tokens.")
            if len(ids) > room:
                raise ValueError(
                    f"the prompt has {len(ids)} tokens; with max_new_tokens={max_new_tokens} the target's context of "
                    f"{target.spec.max_position_embeddings} leaves room for {room}. Shorten it, lower max_new_tokens, "
                    "or set on_error to skip."
                )
        except ValueError as error:
            problems.add(error if isinstance(error, DataError) else record.error(str(error)))
            continue
        usable.append(_Prompt(len(usable), record, ids))
    return usable


def _batches(prompts: Sequence[_Prompt], batch_size: int) -> list[list[_Prompt]]:
    """Batches of prompts of like length: sorted inside windows of the input, so that restarts build the same ones."""
    window = _WINDOW * batch_size
    batches: list[list[_Prompt]] = []
    for first in range(0, len(prompts), window):
        by_length = sorted(prompts[first : first + window], key=lambda p: (-len(p.ids), p.index))
        batches += [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
    return batches


@torch.no_grad()
def answer_batch(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers to prompts of any lengths, padded on the left, each with its own positions.

    Args:
        target: the target.
        prompts: token ids of each prompt.
        max_new_tokens: the most tokens of an answer.

    Returns:
        The tokens of each answer, up to and including the first end token.
    """
    ends = target.spec.eos_token_ids
    pad = target.spec.pad_token_id if target.spec.pad_token_id is not None else (ends[0] if ends else 0)
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    model: Any = target.model
    saved = model.generation_config
    # A fresh configuration: a model's own may sample, penalise repetition or ban tokens, and generate() would fill
    # every field that we leave open from it.
    model.generation_config = type(saved)()
    plain = type(saved)(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=pad,
        use_cache=True,
    )
    try:
        out = model.generate(
            input_ids=ids.to(target.device), attention_mask=mask.to(target.device), generation_config=plain
        )
    finally:
        model.generation_config = saved
    return [_until_end(row, ends) for row in out[:, width:].tolist()]


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Tokens up to and including the first end token.

    >>> _until_end([5, 2, 0, 0], (2,))
    [5, 2]
    """
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: stop + 1]


def _answer(encoder: ChatEncoder, ids: list[int], ends: Sequence[int]) -> dict[str, Any]:
    reason = "stop" if ids[-1] in ends else "length"
    return {"response": encoder.answer_text(ids), "response_ids": ids, "finish_reason": reason}


def _output_line(record: PromptRecord, answer: dict[str, Any]) -> str:
    fields = dict(record.fields)
    if fields.get("messages") is not None:
        fields["messages"] = list(record.messages)  # without the assistant message that the answer replaces
    return json.dumps({**fields, **answer}, ensure_ascii=False)


@contextmanager
def _progress(total: int, done: int) -> Iterator[Any]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("Answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    started, tokens = time.monotonic(), 0
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total, completed=done, rate=0.0)

        def advance(num_answers: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bar.update(task, advance=num_answers, rate=tokens / max(time.monotonic() - started, 1e-9))

        yield advance
