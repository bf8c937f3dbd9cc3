"""The findings of an examination: a line each as they come, and a sentence for each that would ruin a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from treespark.data import Sample

Level = Literal["ok", "warning", "error"]
_STYLES: dict[Level, tuple[str, str]] = {"ok": ("ok", "green"), "warning": ("!", "yellow"), "error": ("x", "bold red")}
_SHOWN = 160  # tokens before the last answer, and of it


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        level: ``ok``, ``warning``, or ``error`` for what would ruin a run.
        topic: What was looked at.
        text: What was found.
    """

    level: Level
    topic: str
    text: str


class Report:
    """Prints findings as they come and keeps them.

    Args:
        console: Where to print; by default the standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        if console is None:
            from rich.console import Console

            console = Console(highlight=False)
        self.console = console
        self.findings: list[Finding] = []

    def say(self, topic: str, text: str, level: Level = "ok") -> None:
        """Adds a finding."""
        from rich.text import Text

        self.findings.append(Finding(level, topic, text))
        sign, style = _STYLES[level]
        self.console.print(Text.assemble((f"{sign:<3}", style), (f"{topic:<12}", "bold"), text), soft_wrap=True)

    def warn(self, topic: str, text: str) -> None:
        """Adds what a run survives, but its owner should know."""
        self.say(topic, text, "warning")

    def fail(self, topic: str, text: str) -> None:
        """Adds what would ruin a run."""
        self.say(topic, text, "error")

    @contextmanager
    def guard(self, topic: str) -> Iterator[None]:
        """Turns an error inside into a finding, so that the examination goes on."""
        try:
            yield
        # What the libraries below raise for a wrong file, option or a device that is too small.
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            self.fail(topic, " ".join(str(error).split()) or type(error).__name__)

    @property
    def errors(self) -> list[Finding]:
        """What would ruin a run."""
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def exit_code(self) -> int:
        """1 where anything would ruin a run, else 0."""
        return 1 if self.errors else 0

    def conclude(self) -> None:
        """Prints a sentence for each thing that would ruin a run."""
        errors = self.errors
        if not errors:
            self.console.print("Nothing found that would ruin this run.")
            return
        things = "One thing" if len(errors) == 1 else f"{len(errors)} things"
        self.console.print(f"{things} would ruin this run:", style="bold red")
        for finding in errors:
            self.console.print(f"  {finding.topic}: {finding.text}", soft_wrap=True, markup=False)


def size(num_bytes: float) -> str:
    """Writes a number of bytes with three digits.

    >>> size(5e5), size(3 * 2**30)
    ('488 KiB', '3 GiB')
    """
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def highlighted(sample: Sample, tokenizer: Any, marks: bool) -> Text:
    """Returns a document's text with its supervised tokens in colour.

    Args:
        sample: The document.
        tokenizer: The target's.
        marks: Also put supervised text between « and », for output without colour.
    """
    from rich.text import Text

    ids = sample.ids.tolist()
    start = sample.prompt_length
    first, last = max(0, start - _SHOWN), min(len(ids), start + _SHOWN)
    text = Text("… " if first else "")
    for supervised, run in _runs(sample.spans, first, last):
        shown = _decoded(tokenizer, ids[run])
        text.append(f"«{shown}»" if supervised and marks else shown, "black on green" if supervised else "dim")
    return text.append(" …" if last < len(ids) else "")


def _runs(spans: Sequence[tuple[int, int]], first: int, last: int) -> Iterator[tuple[bool, slice]]:
    """The range from `first` to `last` in pieces that are supervised, or not.

    >>> list(_runs([(2, 4)], 1, 5))
    [(False, slice(1, 2, None)), (True, slice(2, 4, None)), (False, slice(4, 5, None))]
    """
    at = first
    for start, stop in spans:
        start, stop = max(start, at), min(stop, last)
        if start >= stop:
            continue
        if at < start:
            yield False, slice(at, start)
        yield True, slice(start, stop)
        at = stop
    if at < last:
        yield False, slice(at, last)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
