"""What the tests of generated answers start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.answering import PROMPTS, save_tiny_target, write


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_target(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write(tmp_path / "prompts.jsonl", PROMPTS)
