"""The validation split: answers drawn from the training prompts, category by category."""

from __future__ import annotations

import json
import random
from pathlib import Path

from treespark.data.prompts import parse_line
from treespark.data.template import ChatEncoder


def split(
    answers: Path,
    train: Path,
    validation: Path,
    *,
    num_validation: int,
    seed: int,
    longest: int,
    encoder: ChatEncoder,
) -> int:
    """Divides a file of answers into a training and a validation file, in the order of the lines.

    Each category gives its share of the validation prompts, rounded; the seed decides which. Prompts above a length
    are left out: one of thousands of tokens costs as much as dozens of others.

    Args:
        answers: JSONL file of `treespark generate` with a `category` in each line.
        train: File for the lines that are left.
        validation: File for the validation lines.
        num_validation: How many, all categories together.
        seed: Of the draw.
        longest: Most tokens of a prompt.
        encoder: The target's tokenizer and template, which count them.

    Returns:
        How many lines were too long.

    Raises:
        ValueError: When fewer lines than that are there.
    """
    found = answers.read_text(encoding="utf-8").splitlines()
    records = [parse_line(line, str(answers), number) for number, line in enumerate(found, start=1)]
    lines = [
        line for line, record in zip(found, records, strict=True) if len(encoder.prompt_ids(record.messages)) <= longest
    ]
    if not 0 < num_validation < len(lines):
        raise ValueError(
            f"{answers} has {len(lines)} lines of at most {longest} tokens: {num_validation} cannot be set apart for "
            "validation."
        )
    categories: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        categories.setdefault(json.loads(line)["category"], []).append(index)
    chosen: set[int] = set()
    generator = random.Random(seed)
    for _, indices in sorted(categories.items()):
        chosen |= set(generator.sample(indices, round(num_validation * len(indices) / len(lines))))
    for file, kept in ((train, False), (validation, True)):
        part = file.with_name(f".{file.name}.part")
        part.write_text("".join(f"{line}\n" for i, line in enumerate(lines) if (i in chosen) == kept), encoding="utf-8")
        part.replace(file)
    return len(found) - len(lines)
