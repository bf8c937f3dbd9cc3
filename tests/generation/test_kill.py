"""`kill -9` at random moments: whatever a dead process leaves behind is continued to the bytes of a whole run."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.answering import PROMPTS, run, save_drafter, write
from tests.openai_server import OpenAIServer
from treespark.generation import generate

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
KILLS = 10
DEADLINE = 300.0  # seconds


@pytest.fixture(scope="module")
def drafter(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_drafter(target, tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def server(target: str) -> Iterator[OpenAIServer]:
    found = OpenAIServer(target)
    yield found
    found.close()


@pytest.fixture(scope="module")
def processes() -> Any:
    """Fresh processes that start at once: forked from one that has imported what takes long and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "tests.answering",
            "transformers.models.llama.modeling_llama",
            "treespark.generation.local",
            "treespark.generation.server",
        ]
    )
    return context


@pytest.mark.parametrize("backend", ["plain", "drafter", "server"])
def test_kill_9_at_random_moments(
    processes: Any, target: str, drafter: str, server: OpenAIServer, tmp_path: Path, backend: str
) -> None:
    """Ten kills: each waits until a random share of the answers is on disk, or strikes while the process starts.

    When a run ends before it is struck, the next one begins anew.
    """
    prompts = write(tmp_path / "prompts.jsonl", PROMPTS)
    options = {
        "plain": {},
        "drafter": {"drafter": drafter},
        "server": {"server": server.url, "model": "tiny", "concurrency": 3},
    }[backend]
    whole = tmp_path / "whole.jsonl"
    run(target, prompts, whole, **options)
    server.delay, server.answered = 0.01, type(server.answered)()
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    arguments = {"max_new_tokens": 12, "batch_size": 1, "dtype": "float64", **options}
    draw = random.Random(backend)
    num_torn = num_whole = 0
    for _ in range(KILLS):
        share = draw.uniform(0.0, 1.2)  # beyond 1: while the last files are put in place, or too late
        process = processes.Process(target=generate, args=(target, prompts, str(output)), kwargs=arguments)
        process.start()
        deadline = time.monotonic() + DEADLINE
        while process.is_alive() and (not partial.exists() or partial.stat().st_size < share * whole.stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.01))
        process.kill()
        process.join()
        num_torn += partial.exists()
        if output.exists():
            num_whole += 1
            assert output.read_bytes() == whole.read_bytes()
            for file in tmp_path.glob("out.jsonl*"):
                file.unlink()
    assert num_torn >= 2 and num_whole < KILLS
    run(target, prompts, output, **options)
    assert output.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("out.jsonl*")) == ["out.jsonl", "out.jsonl.meta.json"]


def test_two_processes_do_not_write_one_file(processes: Any, target: str, server: OpenAIServer, tmp_path: Path) -> None:
    """While a process writes, another one is refused; killed, it has lost no answer that was on disk."""
    prompts, output = write(tmp_path / "prompts.jsonl", PROMPTS), tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    options: dict[str, Any] = {"server": server.url, "model": "tiny", "concurrency": 2}
    server.reset()
    server.delay = 0.1
    process = processes.Process(
        target=generate, args=(target, prompts, str(output)), kwargs=options | {"max_new_tokens": 12}
    )
    process.start()
    try:
        deadline = time.monotonic() + DEADLINE
        while not partial.exists() or partial.read_bytes().count(b"\n") < 5:
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(ValueError, match="is being written by another process"):
            run(target, prompts, output, **options)
    finally:
        process.kill()
        process.join()
    server.delay = 0.0
    assert 4 <= run(target, prompts, output, **options).num_reused < 23
