"""Pictures of a benchmark: acceptance by position, speed by batch size, tau by budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treespark.bench.results import Results

Lines = dict[str, tuple[list[float], list[float]]]


def draw_figures(results: Results, output: str | Path) -> str:
    """Draws what the results hold into files that are called after theirs.

    Args:
        results: The results.
        output: Their file: `runs/a.json` gives `runs/a.acceptance.png` and so on.

    Returns:
        A sentence: the files that were written, or why there are none.
    """
    pictures: dict[str, tuple[Lines, dict[str, Any]]] = {
        "acceptance": (
            acceptance_lines(results),
            {"xlabel": "position in the block", "ylabel": "share of rounds that accept it", "ylim": (0, 1)},
        ),
        "speed": (
            speed_lines(results),
            {"xlabel": "requests side by side", "ylabel": "system throughput (tokens/s)"},
        ),
        "budget": (budget_lines(results), {"xlabel": "num_draft_nodes", "ylabel": "acceptance length (tau)"}),
    }
    wanted = {name: picture for name, picture in pictures.items() if picture[0]}
    if not wanted:
        return "Pictures: none, nothing was drafted."
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "Pictures: none, matplotlib is not installed (pip install matplotlib)."
    files = []
    for name, (lines, labels) in wanted.items():
        files.append(Path(output).with_suffix(f".{name}.png"))
        _draw(lines, labels, files[-1])
    return f"Pictures: {', '.join(str(file) for file in files)}"


def acceptance_lines(results: Results) -> Lines:
    """Acceptance by position of every arm with drafts, at the first batch size."""
    positions = [float(depth) for depth in range(1, results.depths + 1)]
    size = results.batch_sizes[0]
    return {
        arm["name"]: (positions, results.summary(arm["name"]).acceptance_by_position)
        for arm in results.arms
        if arm["kind"] in ("policy", "lookup") and results.has(arm["name"], size)
    }


def speed_lines(results: Results) -> Lines:
    """System throughput of every arm by batch size; empty for simulated rounds."""
    lines: Lines = {}
    for arm in results.arms if not results.simulated else ():
        sizes = [size for size in results.batch_sizes if results.has(arm["name"], size)]
        if sizes:
            speeds = [results.summary(arm["name"], batch_size=size).system_throughput for size in sizes]
            lines[arm["name"]] = ([float(size) for size in sizes], speeds)
    return lines


def budget_lines(results: Results) -> Lines:
    """Acceptance length by budget of every policy that was decoded under several budgets."""
    families: dict[str, list[tuple[float, float]]] = {}
    for arm in results.arms:
        if arm["policy"] is None or not results.has(arm["name"], results.batch_sizes[0]):
            continue
        options = dict(arm["policy"]["init_args"])
        budget = options.pop("num_draft_nodes", None)
        if budget is not None:
            shown = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
            name = f"{arm['policy']['class_path']}({shown})"
            families.setdefault(name, []).append((float(budget), results.summary(arm["name"]).tau))
    lines: Lines = {}
    for name, points in families.items():
        if len(points) > 1:
            points.sort()
            lines[name] = ([x for x, _ in points], [y for _, y in points])
    return lines


def _draw(lines: Lines, labels: dict[str, Any], file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, (xs, ys) in lines.items():
        axes.plot(xs, ys, marker="o", label=name)
    axes.set(**labels)
    axes.set_xticks(sorted({x for xs, _ in lines.values() for x in xs}))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
