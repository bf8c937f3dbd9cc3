"""Features from any source are the target's own, whatever row, neighbours or epoch a document comes in."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import SmallFiles
from tests.tiny import tiny_target
from treespark.features import CacheBuilder, FeatureIdentity, FeatureSource, Hybrid, Offline, Online, document_key
from treespark.features.hybrid import DocumentFolder
from treespark.features.source import document_places
from treespark.target import Target

LAYERS = (0, 2)
GIB = 2**30


def document(length: int, seed: int = 0) -> Tensor:
    """Tokens that depend on length and seed alone."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 60, (length,), generator=generator, dtype=torch.int32)


def rows_of(rows: list[list[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded ids, documents and positions of rows of documents."""
    width = max(1, *(sum(map(len, row)) for row in rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    documents, positions = torch.full_like(ids, -1), torch.zeros_like(ids)
    for r, row in enumerate(rows):
        start = 0
        for number, tokens in enumerate(row):
            here = slice(start, start + len(tokens))
            ids[r, here], documents[r, here], positions[r, here] = tokens.long(), number, torch.arange(len(tokens))
            start += len(tokens)
    return ids, documents, positions


def opened(source: FeatureSource, target: Target) -> Any:
    source.open(target, LAYERS)
    return source


@pytest.fixture(scope="module")
def target() -> Target:
    """A float64 target of 4 layers, width 32."""
    return tiny_target()


POOL = [document(n) for n in (1, 2, 3, 5, 8, 13)]


@pytest.fixture(scope="module")
def sources(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[FeatureSource]:
    """Each source; the offline one holds the documents of the pool."""
    folder = tmp_path_factory.mktemp("sources")
    CacheBuilder(target, LAYERS, POOL, folder / "cache", shard_bytes=5000).build()
    made = [
        Online(),
        Offline(str(folder / "cache")),
        Hybrid(memory=1, disk=0),
        Hybrid(disk=1, folder=str(folder / "disk")),
        Hybrid(memory=1e-5, disk=1, folder=str(folder / "both")),
    ]
    return [opened(source, target) for source in made]


@given(st.lists(st.lists(st.integers(0, len(POOL) - 1), max_size=4), min_size=1, max_size=4))
@settings(max_examples=25)
def test_packed_rows_equal_documents_by_themselves(
    sources: list[FeatureSource], target: Target, rows: list[list[int]]
) -> None:
    """Any documents in any rows: each source gives what the target gives for the document alone (float64)."""
    batch = rows_of([[POOL[i] for i in row] for row in rows])
    flat = [POOL[i] for row in rows for i in row]
    for source in sources:
        found = source.features(*batch)
        assert found.context.shape == (*batch[0].shape, 64) and found.final.shape == (*batch[0].shape, 32)
        for (place, start, stop), tokens in zip(document_places(batch[1]), flat, strict=True):
            alone = target.features(tokens.long().unsqueeze(0), LAYERS)
            for part, expected in zip(found, alone, strict=True):
                torch.testing.assert_close(part[place, start:stop], expected[0], rtol=1e-10, atol=1e-12)
        if not isinstance(source, Online):
            outside = batch[1] < 0
            assert not found.context[outside].any() and not found.final[outside].any()


def test_a_document_is_computed_once_and_bitwise_the_same_in_any_row(target: Target, tmp_path: Path) -> None:
    """The second batch holds a known document behind another one: no forward for it, the same bits."""
    for source in (Hybrid(memory=1, disk=0), Hybrid(disk=1, folder=str(tmp_path))):
        opened(source, target)
        first = source.features(*rows_of([[POOL[3]]]))
        second = source.features(*rows_of([[POOL[4], POOL[3]]]))
        assert (source.num_computed, source.num_found) == (2, 1)
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one[0], other[0, 8:])


def test_the_address_is_the_tokens(target: Target) -> None:
    """Equal tokens have one address in any integer type; one token more, less or another changes it."""
    ids = torch.tensor([5, 6, 7])
    assert document_key(ids) == document_key(ids.int())
    assert len({document_key(torch.tensor(other)) for other in ([5, 6, 7], [5, 6], [5, 6, 7, 0], [5, 7, 6])}) == 4


def test_memory_keeps_what_came_first_up_to_its_limit(target: Target) -> None:
    """5 tokens of (2 + 1)·32 float64 are 3,840 bytes: a limit of 4,000 keeps one such document."""
    source = opened(Hybrid(memory=4000 / GIB, disk=0), target)
    batch = rows_of([[document(5)], [document(5, 1)]])
    source.features(*batch)
    assert source.num_bytes == 3840
    source.features(*batch)
    assert (source.num_computed, source.num_found) == (3, 1)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("float16", 1e-2), ("bfloat16", 5e-2)])
def test_the_first_epoch_sees_the_stored_numbers(target: Target, tmp_path: Path, dtype: str, error: float) -> None:
    """What is computed comes back rounded as it is stored, in the target's dtype; so a resume sees the same."""
    source = opened(Hybrid(disk=1, folder=str(tmp_path), dtype=dtype), target)
    batch = rows_of([[POOL[5]]])
    first, again, exact = source.features(*batch), source.features(*batch), target.features(batch[0], LAYERS)
    assert first.final.dtype == torch.float64
    for one, other, own in zip(first, again, exact, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, own, rtol=error, atol=error)
    assert not torch.equal(first.context, exact.context)


def test_numbers_that_float16_cannot_hold_are_an_error(tmp_path: Path) -> None:
    """A layer that writes 1e6 into the stream: float16 ends at 65504, bfloat16 holds it."""
    target = tiny_target(dtype=torch.float32)
    with torch.no_grad():
        target.input_embedding().weight[POOL[3].long()] = 1e6
    with pytest.raises(ValueError, match="reach 1e.06, which float16 cannot hold: store them as bfloat16"):
        opened(Hybrid(memory=1, disk=0, dtype="float16"), target).features(*rows_of([[POOL[3]]]))
    opened(Hybrid(memory=1, disk=0, dtype="bfloat16"), target).features(*rows_of([[POOL[3]]]))


def test_a_fine_tuned_target_is_another_target(target: Target) -> None:
    """One matrix of one layer differs, sizes and embedding do not: the fingerprint is blind to it, the identity not."""
    other = tiny_target()
    same = FeatureIdentity.of(other, LAYERS)
    assert same == FeatureIdentity.of(target, LAYERS)
    with torch.no_grad():
        next(p for name, p in other.model.named_parameters() if "layers.1.mlp" in name).mul_(1.01)
    tuned = FeatureIdentity.of(other, LAYERS)
    assert tuned.fingerprint == same.fingerprint
    assert tuned.differences(same).startswith("the target's weights (")


# The folder of a hybrid source ------------------------------------------------------------------------------------


def folder_for(target: Target, root: Path, num_documents: float) -> tuple[DocumentFolder, FeatureIdentity, int]:
    """A folder with room for documents of 5 tokens, whose files have one size."""
    identity = FeatureIdentity.of(target, LAYERS)
    probe = DocumentFolder(root / "probe", identity, GIB)
    probe.put(document_key(POOL[3]), POOL[3], torch.zeros(5, 96, dtype=torch.float64))
    size = probe.usage()
    return DocumentFolder(root / "folder", identity, int(num_documents * size)), identity, size


def test_least_recently_used_makes_room(target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Room for three: after a, b, c, the use of a, and d, it is b that is gone; the run is told, once."""
    files, _, size = folder_for(target, tmp_path, 3.5)
    named = {name: document(5, seed) for seed, name in enumerate("abcde")}

    def put(name: str) -> None:
        files.put(document_key(named[name]), named[name], torch.full((5, 96), 1.0, dtype=torch.float64))
        time.sleep(0.002)

    def held() -> str:
        return "".join(name for name, ids in named.items() if files.path(document_key(ids)).exists())

    for name in "abc":
        put(name)
    assert held() == "abc" and files.usage() == 3 * size
    assert files.get(document_key(named["a"])) is not None
    with caplog.at_level(logging.WARNING):
        put("d")
        assert held() == "acd" and files.usage() == 3 * size
        put("e")
    assert held() == "ade"
    assert files.get(document_key(named["b"])) is None
    assert caplog.text.count("dropped before they are needed again") == 1


def test_a_lowered_limit_and_foreign_files(target: Target, tmp_path: Path) -> None:
    """Opened with room for one, the folder drops the older of two documents; files of other names stay."""
    files, identity, size = folder_for(target, tmp_path, 2.5)
    for seed in (0, 1):
        files.put(document_key(document(5, seed)), document(5, seed), torch.zeros(5, 96, dtype=torch.float64))
        time.sleep(0.002)
    foreign = tmp_path / "folder" / "models" / "mine" / "model.safetensors"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"x" * size * 10)
    os.utime(foreign, (0, 0))
    smaller = DocumentFolder(tmp_path / "folder", identity, int(1.5 * size))
    assert smaller.get(document_key(document(5, 0))) is None
    assert smaller.get(document_key(document(5, 1))) is not None
    assert foreign.exists() and smaller.usage() == size


def test_a_damaged_file_is_computed_again(target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped byte and a file cut short, as a power cut leaves them: said, and the right numbers come back."""
    for damage in ("flip", "cut"):
        good = opened(Hybrid(disk=1, folder=str(tmp_path)), target).features(*rows_of([[POOL[3]]]))
        (path,) = tmp_path.glob("*/*/*.safetensors")
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-100])
        with caplog.at_level(logging.WARNING):
            source = opened(Hybrid(disk=1, folder=str(tmp_path)), target)
            again = source.features(*rows_of([[POOL[3]]]))
        assert source.num_computed == 1 and "damaged" in caplog.text
        assert torch.equal(good.context, again.context)
        caplog.clear()


def _writer(root: str, seed: int, limit: int, barrier: Any) -> None:
    torch.set_num_threads(1)
    target = tiny_target()
    source = opened(Hybrid(disk=limit / GIB, folder=root), target)
    documents = [document(5, i) for i in range(12)]
    random.Random(seed).shuffle(documents)
    barrier.wait()
    for _ in range(2):
        for tokens in documents:
            found = source.features(*rows_of([[tokens]]))
            assert torch.equal(found.final[0], target.features(tokens.long()[None], LAYERS).final[0])


def test_processes_share_a_folder(target: Target, tmp_path: Path) -> None:
    """Three processes with room for eight of twelve documents, then one killed in the midst: never wrong numbers, the
    limit holds, the count is that of the files."""
    _, identity, size = folder_for(target, tmp_path, 1)
    context, limit = multiprocessing.get_context("fork"), int(8.5 * size)
    root = tmp_path / "shared"
    barrier = context.Barrier(3)
    workers = [context.Process(target=_writer, args=(str(root), seed, limit, barrier)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]

    def used() -> int:
        return sum(path.stat().st_size for path in root.glob("[0-9a-f]*/*/*.safetensors"))

    assert 0 < used() <= limit
    assert int((root / ".bytes").read_text()) == used()

    victim = context.Process(target=_writer, args=(str(root), 9, limit, context.Barrier(1)))
    victim.start()
    time.sleep(0.3)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert DocumentFolder(root, identity, limit).usage() == used() <= limit


def test_wrong_options_are_said() -> None:
    """Limits below 0, nothing kept at all, and a dtype that is none."""
    with pytest.raises(ValueError, match="not both 0"):
        Hybrid(memory=0, disk=0)
    with pytest.raises(ValueError, match="at least 0"):
        Hybrid(memory=-1)
    with pytest.raises(ValueError, match="stored as float16, bfloat16, float32, not as 'int8'"):
        Hybrid(dtype="int8")


def test_a_disk_that_fills_up_costs_no_training(
    target: Target, tmp_path: Path, small_files: SmallFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """Documents that cannot be kept are computed, with one warning, and the folder serves the next run."""
    source, batch = opened(Hybrid(disk=1, folder=str(tmp_path)), target), rows_of([[document(60)], [document(61)]])
    expected = opened(Hybrid(memory=1, disk=0), target).features(*batch)
    with small_files(20_000):  # of 46,080 and more
        for num_computed in (2, 4):
            found = source.features(*batch)
            assert torch.equal(found.context, expected.context) and source.num_computed == num_computed
    assert caplog.text.count("no longer kept") == 1 and not list(tmp_path.rglob("*.safetensors"))
    again = opened(Hybrid(disk=1, folder=str(tmp_path)), target)
    again.features(*batch)
    again.features(*batch)
    assert (again.num_computed, again.num_found) == (2, 2)


def test_a_disk_that_is_too_small_is_said_at_start(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 bytes free for a document of 3,840: refused before anything is computed, unless it is there already."""
    source = opened(Hybrid(disk=1, folder=str(tmp_path)), target)
    source.check([POOL[3]])
    monkeypatch.setattr("treespark.features.hybrid.free_bytes", lambda folder: 1000)
    with pytest.raises(ValueError, match=r"4\.\d+ KiB of features are to be kept, .* has 1000 B free. Lower disk"):
        source.check([POOL[3]])
    source.features(*rows_of([[POOL[3]]]))
    source.check([POOL[3]])
