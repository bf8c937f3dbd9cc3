"""The report's pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treespark.bench.figures import Lines


def draw(panels: Mapping[str, Lines], file: Path, diagonal: bool = False, **labels: Any) -> None:
    """Draws panels of lines side by side, small enough to keep beside the text.

    Args:
        panels: Lines by the panel's title.
        file: The PNG.
        diagonal: Whether to draw where both axes agree.
        labels: Of every panel's axes, for `Axes.set`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        if diagonal:
            axes.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle="--")
        else:
            axes.set_xticks(sorted({x for xs, _ in lines.values() for x in xs}))
        for name, (xs, ys) in lines.items():
            axes.plot(xs, ys, marker="o", markersize=4, label=name)
        axes.set(title=title, **labels)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=80, metadata={"Software": None})
