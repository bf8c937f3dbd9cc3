"""What a benchmark is about to measure, and with what: results that hold no record yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from treespark.bench.arms import Arm
from treespark.bench.results import Results
from treespark.bench.suites import Suite
from treespark.drafters.source import weights_hash
from treespark.environment import environment

if TYPE_CHECKING:
    from treespark.drafters import Drafter
    from treespark.target import Target


def describe(target: Target, drafters: Mapping[str, Drafter], suites: Sequence[Suite], arms: Sequence[Arm]) -> Results:
    """Returns results without records, with what they will be measured with."""
    found = environment()
    return Results(
        arms=[
            {
                "name": arm.name,
                "kind": arm.kind,
                "policy": None if arm.policy is None else arm.policy.config(),
                "description": arm.description,
                "marked": arm.marked,
                "drafter": arm.drafter,
            }
            for arm in arms
        ],
        suites=[
            {
                "name": suite.name,
                "category": suite.category,
                "path": suite.path,
                "sha256": suite.sha256,
                "num_prompts": len(suite.prompts),
            }
            for suite in suites
        ],
        depths=max(drafter.block_size for drafter in drafters.values()),
        dtype=str(target.dtype).removeprefix("torch."),
        complete=False,
        target={
            "name": target.spec.name,
            "model_type": target.spec.model_type,
            "fingerprint": target.spec.fingerprint,
        },
        drafters={name: _describe_drafter(drafter) for name, drafter in drafters.items()},
        argv=found["argv"],
        versions=found["versions"],
        git=found["git"],
        hardware={
            "device": str(target.device),
            "cpu": found["cpu"],
            "accelerators": found["accelerators"] if target.device.type != "cpu" else [],
            "num_threads": torch.get_num_threads(),
            "platform": found["platform"],
        },
    )


def _describe_drafter(drafter: Drafter) -> dict[str, Any]:
    return {
        "config": drafter.config(),
        "sha256": weights_hash(drafter),
        "target": drafter.spec.name,
        "target_fingerprint": drafter.spec.fingerprint,
        "block_size": drafter.block_size,
        "recorded_policy": drafter.recorded_policy,
        "num_parameters": sum(p.numel() for p in drafter.parameters() if p.requires_grad),
    }
