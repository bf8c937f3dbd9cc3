"""`treespark cache plan`, `build` and `verify`: target features on disk, from the recipe of their training."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treespark.registry import unknown

if TYPE_CHECKING:
    from treespark.features import CacheBuilder, CachePlan

_ACTIONS = ("plan", "build", "verify")
_USAGE = """usage: treespark cache plan   --config RECIPE [--output DIR] [options]
       treespark cache build  --config RECIPE --output DIR [--part i/n] [options]
       treespark cache verify DIR

The target's features of a recipe's training data on disk, for `model.features: Offline`.

  plan    tokens, bytes, time and disk left; writes nothing
  build   writes the cache; the same command continues after an interruption
  verify  reads every shard and compares its checksum; exit status 1 when one is damaged

options:"""
_EPILOG = """Every key of the recipe is an option too (treespark fit --help): --data.train FILE, --model.target NAME.
Target, tapped layers, chat template and lengths come from the recipe, so that they are those of the training."""

# Of plan and build: name -> (type, default, help).
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "output": (str | None, None, "Folder of the cache; by default that of model.features, if it is Offline."),
    "dtype": (str | None, None, "float16, bfloat16 or float32; by default the target's own."),
    "part": (str, "1/1", "build: i/n writes every n-th shard; n processes share the work and the folder."),
    "shard_mib": (float, 256.0, "MiB of a shard; an interruption loses the work of one at most."),
    "sample": (int, 12, "plan: documents on which the target is timed; 0 leaves the time out."),
    "device": (str | None, None, "Where the target runs, such as cuda; an accelerator if there is one."),
}


def run(name: str, argv: list[str]) -> int:
    """Runs one of the actions; returns the exit status, 1 for a damaged cache.

    Raises:
        ValueError: For a wrong call, a cache of something else, or a disk without room.
        FileNotFoundError: For a recipe, data file or cache that does not exist.
    """
    action = argv[0] if argv else "--help"
    if action in ("-h", "--help") or any(word in ("-h", "--help") for word in argv[1:]):
        width = max(map(len, OPTIONS))
        lines = [f"  --{option:<{width}}  {text}" for option, (_, _, text) in OPTIONS.items()]
        print("\n".join([_USAGE, *lines, "", _EPILOG]))
        return 0
    if action not in _ACTIONS:
        raise unknown("action", action, _ACTIONS)
    if action == "verify":
        return _verify(argv[1:])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    builder, options = _prepare(argv[1:], needs_output=action == "build")
    if action == "plan":
        _print_plan(builder.plan(options["sample"]), builder.folder)
        return 0
    return _build(builder, parse_part(options["part"]))


def parse_part(text: str) -> tuple[int, int]:
    """Reads "i/n".

    Raises:
        ValueError: For anything else.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"part: expected i/n with 1 <= i <= n, such as 2/4, got {text!r}.")
    return int(found[1]), int(found[2])


def _prepare(words: list[str], needs_output: bool) -> tuple[CacheBuilder, dict[str, Any]]:
    """The builder that a recipe and its overrides ask for, and the options."""
    import torch

    from treespark.commands.recipe import read_recipe
    from treespark.features import CacheBuilder, Offline
    from treespark.target import Target

    module, data, options = read_recipe(words, OPTIONS)
    source = module.feature_source
    output = options["output"] or (source.folder if isinstance(source, Offline) else None)
    if output is None and needs_output:
        raise ValueError("output is missing: give the folder of the cache as --output DIR.")
    if options["shard_mib"] <= 0 or options["sample"] < 0:
        raise ValueError(f"Expected shard_mib > 0 and sample >= 0, got {options['shard_mib']} and {options['sample']}.")
    samples = data.samples("train")  # before the target is loaded: bad data fails in no time
    device = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    target = Target.load(
        module.target_name,
        dtype=module.target_dtype,
        revision=module.target_revision,
        device_map=None if device == "cpu" else device,
    )
    with torch.device("meta"):  # only the ids of its layers are asked for
        layer_ids = module.make_drafter(target.spec).layer_ids
    builder = CacheBuilder(
        target,
        layer_ids,
        (sample.ids for sample in samples),
        output or ".",
        dtype=options["dtype"],
        shard_bytes=int(options["shard_mib"] * 2**20),
        rendering=data.rendering,
    )
    return builder, options


def _print_plan(plan: CachePlan, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from treespark.features import readable

    identity = plan.identity
    repeated = f" ({plan.num_repeated} more are repeated)" if plan.num_repeated else ""
    left = plan.free - plan.num_bytes
    seconds = f"{_duration(plan.seconds)} at {plan.tokens_per_second:.0f} tokens/s" if plan.seconds else "not measured"
    formula = (
        f"{plan.num_tokens} tokens × ({len(identity.layer_ids)} + 1) × {identity.hidden_size} × "
        f"{identity.torch_dtype.itemsize} bytes"
    )
    table = Table(show_header=False, box=None)
    for label, value in (
        ("documents", f"{plan.num_documents}{repeated}"),
        ("tokens", f"{plan.num_tokens}"),
        ("tapped layers", f"{', '.join(map(str, identity.layer_ids))}, and the final hidden state"),
        ("bytes", f"{plan.num_bytes} = {readable(plan.num_bytes)} in {plan.num_shards} shards, {identity.dtype}"),
        ("", formula),
        ("time", seconds),
        ("disk left", f"{readable(left) if left >= 0 else '-' + readable(-left)} of {readable(plan.free)} free"),
    ):
        table.add_row(label, value)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    if left < 0:
        console.print(f"{folder}: the disk has no room for this cache.", markup=False)


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _duration(3725)
    '1 h 2 min'
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _build(builder: CacheBuilder, part: tuple[int, int]) -> int:
    from rich.console import Console

    from treespark.features import readable

    layout = builder.layout
    mine = range(part[0] - 1, layout.num_shards, part[1])
    with _progress(layout.num_tokens(mine), len(mine)) as advance:
        summary = builder.build(part, advance)
    reused = f", {summary.num_reused} of them from before" if summary.num_reused else ""
    done = (
        f"{summary.num_tokens} tokens, {readable(summary.num_bytes)}, complete"
        if not summary.num_missing
        else f"{summary.num_missing} of {summary.num_shards} shards are left to other parts"
    )
    Console(soft_wrap=True, highlight=False).print(
        f"{summary.folder}: {summary.num_built + summary.num_reused} shards{reused}; {done}", markup=False
    )
    return 0


@contextmanager
def _progress(num_tokens: int, num_shards: int) -> Iterator[Any]:
    import time

    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("Computing features"),
        BarColumn(),
        TextColumn("{task.fields[shards]}/{task.fields[total_shards]} shards, {task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    started, tokens, shards = time.monotonic(), 0, 0
    with Progress(*columns) as bar:
        task = bar.add_task("", total=num_tokens, shards=0, total_shards=num_shards, rate=0.0)

        def advance(done: int, reused: bool) -> None:
            nonlocal tokens, shards
            tokens, shards = tokens + (0 if reused else done), shards + 1
            rate = tokens / max(time.monotonic() - started, 1e-9)
            bar.update(task, advance=done, shards=shards, rate=rate)

        yield advance


def _verify(words: list[str]) -> int:
    from rich.console import Console
    from rich.progress import track

    from treespark.features import CacheIndex, damaged_shards, readable

    if len(words) != 1 or words[0].startswith("-"):
        raise ValueError("Expected the folder of one cache: treespark cache verify DIR")
    folder = Path(words[0]).expanduser()
    index = CacheIndex.read(folder)
    found = track(damaged_shards(folder), description="Verifying", total=len(index.shards), transient=True)
    faults = [fault for _, fault in found if fault is not None]
    console = Console(soft_wrap=True, highlight=False)
    for fault in faults:
        console.print(fault, markup=False)
    content = index.content
    console.print(
        f"{folder}: {len(faults)} of {len(index.shards)} shards are damaged; treespark cache build makes them again."
        if faults
        else f"{folder}: {len(index.shards)} shards, {content['num_documents']} documents, {content['num_tokens']} "
        f"tokens, {readable(index.num_bytes)}: every checksum is right.",
        markup=False,
    )
    return 1 if faults else 0
