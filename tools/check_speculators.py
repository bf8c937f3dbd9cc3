"""Checks exports against foreign code: the package `speculators` loads them and must compute the same logits.

    python tools/check_speculators.py                        # makes an environment in the cache, once (several minutes)
    python tools/check_speculators.py --python ENV/bin/python   # uses one that has the package

The environment is `speculators-env` in TREESPARK_CACHE (or ~/.cache/treespark), a few GB with torch; pip's own settings
apply, so `PIP_CONSTRAINT` or `PIP_EXTRA_INDEX_URL` may ask for a torch without CUDA.

Random tiny drafters of several kinds are exported, loaded by the package in that environment, and run on the same text
with teacher forcing; logits and confidence logits are compared. Not part of the test suite, since the package pins
other versions of large libraries.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))  # used from a checkout

from treespark.drafters import Drafter, DSparkDrafter, writable_formats
from treespark.target import Target
from treespark.target.loading import cache_folder

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

# What runs in the other environment, once for all folders: only the package and torch are there.
INSIDE = """
    import sys, torch
    from safetensors.torch import load_file, save_file
    from speculators import SpeculatorModel
    from speculators.models.dflash import core as dflash
    from speculators.models.dspark import core as dspark

    given, seen = {}, {}

    def keep(logits, targets, confidence, *_, **__):
        seen["logits"] = logits.detach().clone()
        if confidence is not None:
            seen["confidence"] = confidence.detach().clone()
        return torch.zeros(()), {}

    def anchors(*_, **__):
        return given["anchors"], torch.ones_like(given["anchors"], dtype=torch.bool)

    dspark.compute_metrics, dflash.select_anchors = keep, anchors
    for folder in sys.argv[1:]:
        given = load_file(folder + "/given.safetensors")
        seen = {}
        model = SpeculatorModel.from_pretrained(folder + "/export", dtype=torch.float32).eval()
        model.config.transformer_layer_config._attn_implementation = "eager"
        model._attn_impl, model._create_mask_fn = "eager", dflash.create_float_mask
        with torch.no_grad():
            model(
                hidden_states=given["context"],
                input_ids=given["ids"],
                loss_mask=torch.ones_like(given["ids"]),
                verifier_last_hidden_states=given["final"],
                document_ids=torch.zeros_like(given["ids"]),
                max_anchors=len(given["anchors"]),
            )
        save_file(seen, folder + "/seen.safetensors")
"""


def main() -> int:
    """Runs the comparison; returns 1 when a logit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="interpreter of an environment that has the package")
    python = parser.parse_args().python or make_environment()
    version = "from importlib.metadata import version; print(version('speculators'), version('torch'))"
    try:
        print("speculators, torch:", subprocess.check_output([python, "-c", version], text=True).strip(), flush=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"--python {python}: expected the interpreter of an environment with speculators and torch ({error}).")
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / name.replace(" ", "_") for name in DRAFTERS}
        drafters = {name: write(folder, DRAFTERS[name]) for name, folder in folders.items()}
        run_package(python, list(folders.values()))
        for name, drafter in drafters.items():
            differences = compare(folders[name], drafter)
            failed |= not max(differences.values()) <= TOLERANCE  # NaN fails as well
            print(f"{name:20} " + ", ".join(f"{key} {value:.1e}" for key, value in differences.items()), flush=True)
    print("DIFFERENT" if failed else f"the same within {TOLERANCE}")
    return int(failed)


def make_environment() -> str:
    """Installs the package beside the cached targets, once; what an interruption left is made anew."""
    folder = cache_folder() / "speculators-env"
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not (folder / "complete").is_file():
        print(f"Installing speculators into {folder}, once; this takes minutes.", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", "speculators"]).returncode:
            sys.exit(
                f"pip could not install the package speculators into {folder} (its message stands above). Repeat this "
                "with a connection, or name an environment that has the package: --python ENV/bin/python"
            )
        (folder / "complete").touch()
    return str(python)


def run_package(python: str, folders: list[Path]) -> None:
    """Has the package compute its outputs in each folder."""
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-c", textwrap.dedent(INSIDE), *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"The package failed:\n{done.stderr[-3000:]}")


def write(folder: Path, options: dict[str, Any]) -> DSparkDrafter:
    """Writes a tiny target, the export of a drafter for it, and inputs; returns the drafter read back."""
    from transformers import AutoModelForCausalLM

    from tests.tiny import tiny_drafter, tiny_model

    tiny_model("qwen3", torch.float32).save_pretrained(folder / "target")
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
    return drafter


@torch.no_grad()
def compare(folder: Path, drafter: DSparkDrafter) -> dict[str, float]:
    """Largest absolute differences of logits and confidence logits between the package and us."""
    given, theirs = load_file(folder / "given.safetensors"), load_file(folder / "seen.safetensors")
    ids, anchors = given["ids"], given["anchors"]
    slots, depths = drafter.num_slots, drafter.block_size
    context = drafter.encode(given["context"], torch.arange(len(TEXT)).unsqueeze(0))
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
