"""The benchmarks run, and what they count by hand is what runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(*given: str) -> Any:
    command = [sys.executable, "benchmarks/train_step.py", *given]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_train_step_counts_its_products() -> None:
    """At 8 anchors, 4 depths, V = 500: a report of both cases, and matrix products within 2 % of the formula.

    Distinct parents alone are multiplied, so that the tree may need less; the confidence head is not in the formula.
    """
    sizes = {"vocab": 500, "hidden": 32, "rank": 8, "anchors": 8, "depths": 4, "k": 2, "nodes": 6, "chunk": 4}
    given = [f"--{name}={value}" for name, value in sizes.items()]
    given += ["--cases=chain,tree", "--repeats=1", "--threads=1"]
    report = run(*given, "--memory=false")
    chain, tree = report["time"]["chain"], report["time"]["tree"]
    assert chain["recorded_flops"] == pytest.approx(chain["counted_flops"], rel=0.02)
    assert tree["recorded_flops"] < 1.02 * tree["counted_flops"]
    assert report["time"]["tree/chain"] > 0
    memory = run(*given, "--worker=tree")
    assert memory["peak"] - memory["inputs"] == pytest.approx(memory["above_inputs"], abs=0.2) and memory["inputs"] > 0
