"""The progress bar of a benchmark."""

from __future__ import annotations


class Progress:
    """A progress bar, or nothing."""

    def __init__(self, total: int, enabled: bool) -> None:
        from rich import progress as parts
        from rich.console import Console

        self.bar = parts.Progress(
            parts.TextColumn("Decoding"),
            parts.BarColumn(),
            parts.MofNCompleteColumn(),
            parts.TimeRemainingColumn(),
            parts.TextColumn("{task.description}"),
            console=Console(stderr=True),
            disable=not enabled,
            transient=True,
        )
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def show(self, what: str) -> None:
        """Names what is being decoded."""
        self.bar.update(self.task, description=what)

    def advance(self, count: int = 1) -> None:
        """Counts answers."""
        self.bar.advance(self.task, count)
