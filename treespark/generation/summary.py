"""Progress while answers come, and what is said at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from treespark.generation.backend import Progress


@dataclass(frozen=True)
class GenerationSummary:
    """What a call of :func:`~treespark.generation.generate` did.

    Attributes:
        output: the file with the answers.
        num_answers: its lines.
        num_tokens: generated tokens, end tokens included; of a server's answers those that it counted.
        num_stopped: answers that reached an end token.
        num_skipped: unusable input lines that were left out.
        num_rounds: decoding rounds with a drafter; 0 without one.
        num_reused: answers that an earlier call had written.
        num_new_tokens: tokens that this call generated.
        seconds: time spent in this call, loading excluded.
    """

    output: str
    num_answers: int
    num_tokens: int
    num_stopped: int
    num_skipped: int
    num_rounds: int
    num_reused: int
    num_new_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of this call; 0 if it generated none."""
        return self.num_new_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tau(self) -> float:
        """Acceptance length over all answers: tokens per round, the prefills' tokens left out; nan without a drafter.

        Source: arXiv 2610.20175 §3.1, A.3.
        """
        return (self.num_tokens - self.num_answers) / self.num_rounds if self.num_rounds else math.nan

    def show(self) -> None:
        """Prints it in one line."""
        from rich.console import Console

        reused = f", {self.num_reused} of them from before" if self.num_reused else ""
        speed = f"; {self.tokens_per_second:.1f} tokens/s" if self.num_new_tokens else ""
        tau = f", acceptance length {self.tau:.2f}" if self.num_rounds else ""
        skipped = f"; {self.num_skipped} lines skipped" if self.num_skipped else ""
        Console(soft_wrap=True, highlight=False).print(
            f"{self.output}: {self.num_answers} answers{reused}, {self.num_tokens} tokens, "
            f"{self.num_stopped} reached their end{speed}{tau}{skipped}",
            markup=False,
        )


@contextmanager
def progress_bar(total: int, done: int) -> Iterator[Progress]:
    """A bar over ``total`` answers of which ``done`` stand, and the speed of this call in tokens per second."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

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
    with Bar(*columns) as bar:
        task = bar.add_task("", total=total, completed=done, rate=0.0)

        def advance(num_answers: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bar.update(task, advance=num_answers, rate=tokens / max(time.monotonic() - started, 1e-9))

        yield advance
