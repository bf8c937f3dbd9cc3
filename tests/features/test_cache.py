"""A cache is what the target gives, whole or continued, in one part or several, and refuses to be anything else."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import SmallFiles
from tests.tiny import tiny_target
from treespark.features import CacheBuilder, CacheIndex, Offline, damaged_shards
from treespark.features.store import Layout, locked
from treespark.target import Target

LAYERS = (0, 2)
SHARD = 20_000  # bytes: about four of these documents


RENDERING = {"chat_template": "a", "max_length": 64, "long_sequences": "split"}


def documents(count: int = 24, seed: int = 0) -> list[Tensor]:
    """Documents of 3 to 11 tokens; the last repeats the first."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(3, 60, (3 + i * 5 % 9,), generator=generator, dtype=torch.int32) for i in range(count - 1)]
    return [*made, made[0].clone()]


@pytest.fixture(scope="module")
def target() -> Target:
    """A float64 target of 4 layers, width 32."""
    return tiny_target()


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that was built without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "cache"
    builder(target, folder).build()
    return folder


def builder(target: Target, folder: Path, **options: object) -> CacheBuilder:
    settings = {"documents": documents(), "shard_bytes": SHARD, "rendering": RENDERING}
    return CacheBuilder(target, LAYERS, folder=folder, **settings | options)  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_cache_holds_each_document_once(whole: Path, target: Target) -> None:
    """23 of 24 documents; the index's figures are those of the files, and every number is the target's (bitwise)."""
    index = CacheIndex.read(whole)
    assert index.content["num_documents"] == 23 and index.content["num_shards"] == len(index.shards) > 3
    assert index.num_bytes == sum(path.stat().st_size for path in whole.glob("shard-*"))
    assert index.content["num_tokens"] == sum(map(len, documents()[:-1]))
    source = Offline(str(whole))
    source.open(target, LAYERS)
    source.check(documents())
    for ids in documents():
        tokens = ids.long().unsqueeze(0)
        found = source.features(tokens, torch.zeros_like(tokens), torch.arange(len(ids)).unsqueeze(0))
        for one, own in zip(found, target.features(tokens, LAYERS), strict=True):
            assert torch.equal(one, own)


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_the_plans_bytes_are_the_builds(target: Target, tmp_path: Path, dtype: str, size: int) -> None:
    """Within 5 %, before anything is written; the features alone are tokens · (m + 1) · H · bytes per number."""
    made = builder(target, tmp_path / "cache", dtype=dtype)
    plan = made.plan(num_timed=3)
    assert not (tmp_path / "cache").exists()
    assert plan.num_repeated == 1 and plan.tokens_per_second > 0
    assert plan.seconds == pytest.approx(plan.num_tokens / plan.tokens_per_second)
    assert plan.num_bytes > plan.num_tokens * 3 * 32 * size
    summary = made.build()
    assert plan.num_bytes == pytest.approx(summary.num_bytes, rel=0.05)
    assert (plan.num_shards, plan.num_tokens) == (summary.num_shards, summary.num_tokens)


def test_layout_is_filled_in_order() -> None:
    """Documents of 2, 2, 9 and 1 tokens of 10 bytes and 40 of address into 140 bytes: 120, 130, 50."""
    layout = Layout.of([bytes([i]) * 32 for i in range(4)], [2, 2, 9, 1], 10, 140)
    assert layout.bounds == [0, 2, 3, 4]
    assert [list(layout.documents(shard)) for shard in range(layout.num_shards)] == [[0, 1], [2], [3]]


def _build(target: Target, folder: Path, limit: float | None, used: Any) -> None:
    """Builds a cache in a process that ends itself with SIGKILL when it has used so many seconds of processor time.

    Processor time, so that a busy machine does not decide whether the moment lies inside the build.
    """
    torch.set_num_threads(1)
    started = time.process_time()

    def watch() -> None:
        while limit is not None and time.process_time() - started < limit:
            time.sleep(0.0002)
        os.kill(os.getpid(), signal.SIGKILL)

    if limit is not None:
        threading.Thread(target=watch, daemon=True).start()
    builder(target, folder).build()
    used.value = time.process_time() - started


def test_ten_kills_then_the_same_bytes(whole: Path, target: Target, tmp_path: Path) -> None:
    """`kill -9` at ten random moments of a build, two to a folder: what stands there is whole shards, and the call
    that is not killed leaves the uninterrupted folder, byte for byte."""
    context, draw = multiprocessing.get_context("fork"), random.Random(0)
    used, expected, killed = context.Value("d", 0.0), content(whole), 0

    def run(folder: Path, limit: float | None) -> int | None:
        process = context.Process(target=_build, args=(target, folder, limit, used))
        process.start()
        process.join()
        for path in folder.glob("shard-*"):
            assert path.read_bytes() == expected[path.name]
        return process.exitcode

    assert run(tmp_path / "whole", None) == 0
    assert content(tmp_path / "whole") == expected
    duration = used.value
    for trial in range(10):
        killed += run(tmp_path / f"killed-{trial // 2}", draw.uniform(0.02, 0.9) * duration) == -signal.SIGKILL
    assert killed >= 5  # the second of a folder may be done first
    for number in range(5):
        assert run(tmp_path / f"killed-{number}", None) == 0
        assert content(tmp_path / f"killed-{number}") == expected


def test_parts_in_one_folder_and_apart(whole: Path, target: Target, tmp_path: Path) -> None:
    """Three parts, in any order, give the folder of one; shards of two folders that are put together are listed by a
    last call, which builds nothing."""
    for part in (3, 1, 2):
        summary = builder(target, tmp_path / "one").build((part, 3))
        assert (summary.num_missing == 0) == (part == 2)
        if part == 3:
            with pytest.raises(ValueError, match=r"not finished: \d of \d shards are missing"):
                Offline(str(tmp_path / "one")).open(target, LAYERS)
    assert content(tmp_path / "one") == content(whole)

    for part in (1, 2):
        builder(target, tmp_path / f"apart-{part}").build((part, 2))
    for path in (tmp_path / "apart-2").glob("shard-*"):
        path.rename(tmp_path / "apart-1" / path.name)
    summary = builder(target, tmp_path / "apart-1").build()
    assert (summary.num_built, summary.num_missing) == (0, 0)
    assert content(tmp_path / "apart-1") == content(whole)


def test_what_a_folder_was_built_for_is_kept(whole: Path, target: Target) -> None:
    """Other layers, dtype, weights, template or data: refused, in words, by building and by training."""
    before = content(whole)
    for options, words in (
        ({"dtype": "float16"}, r"the stored dtype \(float64 there, float16 here\)"),
        ({"documents": documents(seed=1)}, r"the documents' tokens \(data files, chat template or lengths\) \("),
        ({"documents": documents(seed=1), "rendering": {"chat_template": "b"}}, r"chat template \(a there, b here\)"),
        ({"documents": documents(seed=1), "rendering": {"max_length": 32}}, r"max_length \(64 there, 32 here\)"),
        (
            {"documents": documents(seed=1), "rendering": {"long_sequences": "cut"}},
            r"long_sequences \(split there, cut",
        ),
        ({"shard_bytes": 9000}, "the number of shards"),
    ):
        with pytest.raises(ValueError, match=words):
            builder(target, whole, **options).build()
    with pytest.raises(ValueError, match=r"the tapped layers \(\[0, 2\] there, \[0, 1\] here\)"):
        CacheBuilder(target, (0, 1), documents(), whole, shard_bytes=SHARD).build()
    with pytest.raises(ValueError, match=r"the tapped layers \(\[0, 2\] there, \[1\] here\)"):
        Offline(str(whole)).open(target, (1,))
    for other in (tiny_target(seed=1), tiny_target(dtype=torch.float32)):
        with pytest.raises(ValueError, match="built for something else: it differs in the target's"):
            Offline(str(whole)).open(other, LAYERS)
        with pytest.raises(ValueError, match="differs in the target's"):
            builder(other, whole, dtype="float64").build()
    builder(target, whole, rendering={"chat_template": "b", "max_length": 64}).build()  # that renders the same tokens
    assert content(whole) == before


def test_missing_documents_are_counted(whole: Path, target: Target) -> None:
    """Two of three are not there: an error with the reason at the start, and one in a step, never a computation."""
    source = Offline(str(whole))
    source.open(target, LAYERS)
    wanted = [documents()[0], *documents(seed=1)[:2]]
    with pytest.raises(ValueError, match=r"2 of 3 training documents are missing .*another max_length \(64 there"):
        source.check(wanted, {"chat_template": "a", "max_length": 32})
    ids = wanted[1].long().unsqueeze(0)
    with pytest.raises(ValueError, match="1 of 1 documents of a batch are missing"):
        source.features(ids, torch.zeros_like(ids), torch.arange(ids.shape[1]).unsqueeze(0))
    assert source.num_computed == 0
    with pytest.raises(FileNotFoundError, match="holds no feature cache .*treespark cache build"):
        Offline(str(whole.parent)).open(target, LAYERS)


def test_damage_is_found_and_repaired(
    whole: Path, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped bit, a cut file and a missing one: verify names each; building again makes those three alone."""
    folder = tmp_path / "cache"
    builder(target, folder).build()
    assert all(fault is None for _, fault in damaged_shards(folder))
    first, second, third = sorted(folder.glob("shard-*"))[:3]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-8])
    third.unlink()
    faults = {name: fault for name, fault in damaged_shards(folder) if fault}
    assert faults.keys() == {first.name, second.name, third.name}
    assert "its checksum" in faults[first.name] and "missing" in faults[third.name]
    with caplog.at_level(logging.WARNING):
        assert builder(target, folder).build().num_built == 3
    assert caplog.text.count("it is built again") == 2
    assert content(folder) == content(whole)


def test_a_shard_of_another_cache_is_not_read(whole: Path, target: Target, tmp_path: Path) -> None:
    """Swapped with one of other data under the same name, it is neither trained with nor counted as done."""
    folder = tmp_path / "cache"
    builder(target, folder).build()
    builder(target, tmp_path / "other", documents=documents(seed=1)).build()
    (folder / "shard-00001.safetensors").write_bytes((tmp_path / "other" / "shard-00001.safetensors").read_bytes())
    with pytest.raises(ValueError, match="not the shard that the index names"):
        Offline(str(folder)).open(target, LAYERS)
    assert builder(target, folder).build().num_built == 1
    assert content(folder) == content(whole)


def test_a_disk_without_room_stops_before_the_start(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written; with half of the shards there, half of the room is enough."""
    made = builder(target, tmp_path / "cache")
    needed = made.plan(0).num_bytes
    monkeypatch.setattr("treespark.features.build.free_bytes", lambda folder: needed - 1)
    with pytest.raises(ValueError, match=r"needs \d+\.\d+ KiB more, .* free. Give another --output, a smaller --dtype"):
        made.build()
    assert not (tmp_path / "cache").exists()
    made.build((1, 2))
    assert made.build().num_missing == 0


def test_a_disk_that_fills_up_while_building(target: Target, tmp_path: Path, small_files: SmallFiles) -> None:
    """The system refuses to write on: a sentence names the shard, whole ones stay, and a later call ends the work."""
    folder = tmp_path / "cache"
    with small_files(SHARD // 2), pytest.raises(OSError, match=r"shard-0000\d.safetensors cannot be written \(.*arge"):
        builder(target, folder).build()
    assert not [path for path in folder.rglob("*.safetensors*") if path.stat().st_size and ".part-" in str(path)]
    assert builder(target, folder).build().num_missing == 0
    assert all(fault is None for _, fault in damaged_shards(folder))


def test_folders_of_others_stay_as_they_are(target: Target, tmp_path: Path) -> None:
    """A file, a folder with other files, and a part that another process is building."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        builder(target, tmp_path / "file").build()
    with pytest.raises(ValueError, match=r"holds other files \(file\)"):
        builder(target, tmp_path).build()
    (tmp_path / "cache" / ".part-1-of-1").mkdir(parents=True)
    with (
        locked(tmp_path / "cache" / ".part-1-of-1"),
        pytest.raises(ValueError, match="part 1/1 is being built by another process"),
    ):
        builder(target, tmp_path / "cache").build()
    with pytest.raises(ValueError, match="1 <= i <= n, got 3/2"):
        builder(target, tmp_path / "cache").build((3, 2))


def test_a_damaged_index_is_said(target: Target, tmp_path: Path) -> None:
    """Not JSON, and of another version."""
    builder(target, tmp_path / "cache").build()
    index = tmp_path / "cache" / "index.json"
    fields = json.loads(index.read_text())
    index.write_text(json.dumps(fields | {"format": 99}))
    with pytest.raises(ValueError, match="format 99, this version reads 1"):
        CacheIndex.read(tmp_path / "cache")
    index.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        CacheIndex.read(tmp_path / "cache")
