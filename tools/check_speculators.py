"""Checks exports against foreign code: the package `speculators` loads them and must compute the same logits.

    python tools/check_speculators.py                        # makes an environment in the cache, once (several minutes)
    python tools/check_speculators.py --python ENV/bin/python   # uses one that has the package

Random tiny drafters of several kinds are exported, loaded by the package in that environment, and run on the same text
with teacher forcing; logits and confidence logits are compared. Not part of the test suite, since the package pins
other versions of large libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path
from typing import Any

TOLERANCE = 1e-4
ANCHORS = [3, 9, 14]
TEXT = [5, 9, 13, 20, 7, 33, 41, 2, 8, 60, 17, 25, 31, 6, 11, 48, 52, 19, 22, 44]
DRAFTERS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "wide heads": {"head_dim": 12},
    "no confidence": {"confidence": False},
    "no Markov head": {"markov_rank": 0, "confidence_with_markov": False},
    "own slot": {"sample_from_anchor": False},
    "reduced vocabulary": {"draft_vocab_size": 20},
}

# What runs in the other environment: only the package and torch are there.
INSIDE = """
    import sys, torch
    from safetensors.torch import load_file, save_file
    from speculators import SpeculatorModel
    from speculators.models.dflash import core as dflash
    from speculators.models.dspark import core as dspark

    folder = sys.argv[1]
    given = load_file(folder + "/given.safetensors")
    model = SpeculatorModel.from_pretrained(folder + "/export", dtype=torch.float32).eval()
    model.config.transformer_layer_config._attn_implementation = "eager"
    model._attn_impl, model._create_mask_fn = "eager", dflash.create_float_mask
    anchors = given["anchors"]
    dflash.select_anchors = lambda *_, **__: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    seen = {}

    def keep(logits, targets, confidence, *_, **__):
        seen["logits"] = logits.detach().clone()
        if confidence is not None:
            seen["confidence"] = confidence.detach().clone()
        return torch.zeros(()), {}

    dspark.compute_metrics = keep
    ids = given["ids"]
    with torch.no_grad():
        model(
            hidden_states=given["context"],
            input_ids=ids,
            loss_mask=torch.ones_like(ids),
            verifier_last_hidden_states=given["final"],
            document_ids=torch.zeros_like(ids),
            max_anchors=len(anchors),
        )
    save_file(seen, folder + "/seen.safetensors")
"""


def main() -> int:
    """Runs the comparison; returns 1 when a logit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="interpreter of an environment that has the package")
    python = parser.parse_args().python or make_environment()
    version = "from importlib.metadata import version; print(version('speculators'), version('torch'))"
    print("speculators, torch:", subprocess.check_output([python, "-c", version], text=True).strip())
    failed = False
    for name, options in DRAFTERS.items():
        with tempfile.TemporaryDirectory() as temporary:
            differences = compare(Path(temporary), options, python)
        worst = max(differences.values())
        failed |= not worst <= TOLERANCE  # NaN fails as well
        print(f"{name:20} " + ", ".join(f"{key} {value:.1e}" for key, value in differences.items()))
    print("DIFFERENT" if failed else f"the same within {TOLERANCE}")
    return int(failed)


def make_environment() -> str:
    """Installs the package beside the cached targets, once."""
    from treespark.target.loading import cache_folder

    folder = cache_folder() / "speculators-env"
    python = folder / "bin" / "python"
    if not (folder / "complete").is_file():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "speculators"], check=True)
        (folder / "complete").touch()
    return str(python)


def compare(folder: Path, options: dict[str, Any], python: str) -> dict[str, float]:
    """Largest absolute differences of logits and confidence logits between the package and us."""
    import torch
    from safetensors.torch import load_file, save_file

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.tiny import tiny_drafter, tiny_model
    from treespark.drafters import Drafter, DSparkDrafter, writable_formats
    from treespark.target import Target

    tiny_model("qwen3", torch.float32).save_pretrained(folder / "target")
    from transformers import AutoModelForCausalLM

    target = Target(AutoModelForCausalLM.from_pretrained(folder / "target"), name=str(folder / "target"))
    made = tiny_drafter(target, bind=False, **options)
    assert isinstance(made, DSparkDrafter)
    if made.draft_ids is not None:
        made.draft_ids = torch.arange(3, 63, 3)[:20]
    made.bind(target)
    writable_formats()["speculators"]().save(made, folder / "export", None, {})
    drafter = Drafter.from_pretrained(folder / "export")
    assert isinstance(drafter, DSparkDrafter)

    ids, anchors = torch.tensor([TEXT]), torch.tensor(ANCHORS)
    features = target.features(ids, drafter.layer_ids)
    given = {"ids": ids, "anchors": anchors, "context": features.context, "final": features.final}
    save_file({key: value.contiguous() for key, value in given.items()}, folder / "given.safetensors")
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, "-c", textwrap.dedent(INSIDE), str(folder)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"The package failed on {json.dumps(options)}:\n{done.stderr[-3000:]}")
    theirs = load_file(folder / "seen.safetensors")

    slots, depths = drafter.num_slots, drafter.block_size
    with torch.no_grad():
        context = drafter.encode(features.context, torch.arange(len(TEXT)).unsqueeze(0))
        visible = torch.arange(len(TEXT)) < anchors.unsqueeze(1)
        hidden = drafter.draft(context, ids[:, ANCHORS], anchors.unsqueeze(0), visible.unsqueeze(0))[0]
        proposer = drafter.propose(hidden, ids[0, ANCHORS])
        parents = ids[0, anchors.unsqueeze(1) + torch.arange(depths)]
        logits = proposer.path_logits(parents)
        mine = {"logits": logits if drafter.draft_ids is None else logits[..., drafter.draft_ids]}
        if drafter.has_confidence:
            mine["confidence"] = proposer.confidence_logits(parents)
    assert mine.keys() == theirs.keys()
    return {
        key: float((theirs[key].reshape(len(ANCHORS), slots, *value.shape[2:])[:, -depths:] - value).abs().max())
        for key, value in mine.items()
    }


if __name__ == "__main__":
    sys.exit(main())
