"""The GPU's check script, run on the CPU with tiny sizes: the same functions, the same lines."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cuda_checks, cuda_decoding
from benchmarks.checks import Outcome

ROOT = Path(__file__).parents[2]


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {line["check"]: line for line in map(json.loads, capsys.readouterr().out.splitlines()) if "check" in line}


def test_all_checks_pass_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Float32 against itself differs by nothing, bfloat16 by its rounding; what only CUDA can show is skipped."""
    assert cuda_checks.main(["--device", "cpu", "--tiny"]) == 0
    found = lines(capsys)
    assert len(found) == len(cuda_checks.CHECKS)
    skipped = {name for name, line in found.items() if line["result"] == "SKIP"}
    assert skipped == {"compile", "step_compiled"}
    assert all(line["result"] == "PASS" for name, line in found.items() if name not in skipped)
    assert found["losses_float32"]["relative_error"] == {"losses": 0, "gradients": 0}
    assert 0 < found["losses_bf16"]["largest_relative_error"] < 0.05
    assert found["step_eager"]["peak_gib"] > 0


def test_decoding_checks_pass_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Every policy and batch size, and bfloat16's own margins; rounds report what they took and synchronised."""
    names = ["text_policies", "text_bfloat16", "rounds"]
    assert cuda_decoding.main(["--device", "cpu", "--tiny", "--only", *names]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    assert [(line["check"], line["result"]) for line in lines] == [(name, "PASS") for name in names]
    assert [batch["batch_size"] for batch in lines[2]["batches"]] == list(cuda_decoding.BATCH_SIZES)


def test_a_wrong_device_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A gradient that is off by 1 %, and a check that raises, both end with 1; the others still run."""
    right = cuda_checks.losses_and_gradients
    calls: list[int] = []

    def wrong(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        losses, gradients = right(*arguments)
        calls.append(1)
        return losses, gradients * (1.01 if len(calls) == 1 else 1.0)

    def broken(run: cuda_checks.Run) -> Outcome:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(cuda_checks, "losses_and_gradients", wrong)
    monkeypatch.setattr(cuda_checks, "CHECKS", [broken, cuda_checks.check_losses_float32, cuda_checks.check_features])
    assert cuda_checks.main(["--device", "cpu", "--tiny"]) == 1
    found = lines(capsys)
    assert found["broken"] | {"wall_seconds": 0} == {
        "check": "broken",
        "result": "FAIL",
        "wall_seconds": 0,
        "error": "RuntimeError: no kernel",
    }
    assert [found[name]["result"] for name in ("losses_float32", "features")] == ["FAIL", "PASS"]


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so and ends with 2; the shell script is well formed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_checks.main(["--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert subprocess.run(["bash", "-n", "benchmarks/gpu.sh"], cwd=ROOT).returncode == 0
