"""Names of targets: what `target: smollm2-135m-instruct` means, and loading models and tokenizers with clear errors."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from treespark.target.spec import end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Names that stand for a folder of the cache -> the make target that fills it.
KNOWN_TARGETS = {"smollm2-135m-instruct": "make target"}


def cache_folder() -> Path:
    """Returns the folder for converted targets and features: TREESPARK_CACHE, or ~/.cache/treespark."""
    return Path(os.environ.get("TREESPARK_CACHE") or Path.home() / ".cache" / "treespark").expanduser()


def resolve(name: str) -> str:
    """Turns a target's name into what `from_pretrained` takes: a cached folder, a local folder or a hub id.

    Raises:
        FileNotFoundError: For a known target that has not been fetched, or a path that does not exist.
    """
    if name in KNOWN_TARGETS:
        folder = cache_folder() / "targets" / name
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"The target '{name}' is not in the cache ({folder}). Fetch and convert it once with "
                f"`{KNOWN_TARGETS[name]}`."
            )
        return str(folder)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"The target folder {path} holds no config.json; expected a Hugging Face model.")
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"The target folder {path} does not exist.")
    return name


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Returns the torch dtype called `dtype`.

    Raises:
        ValueError: When it is not a floating point dtype of torch.
    """
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"Unknown dtype {dtype!r}. Expected float32, bfloat16, float16 or float64.")
    return found


def _explain(name: str, what: str, error: Exception) -> ValueError:
    offline = " HF_HUB_OFFLINE=1 is set, so nothing is downloaded." if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ValueError(
        f"Cannot load the {what} of the target '{name}': expected one of {', '.join(KNOWN_TARGETS)}, a local model "
        f"folder, or a Hugging Face hub id.{offline} ({reason})"
    )


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a target by the target's name.

    Raises:
        FileNotFoundError: As `resolve` does.
        ValueError: When the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve(name), **options)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise _explain(name, "tokenizer", error) from error
    return tokenizer


def load_end_tokens(name: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that end a target's answers, from its configurations and its tokenizer alone.

    Raises:
        FileNotFoundError: As `resolve` does.
        ValueError: When the target's configuration cannot be loaded.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(resolve(name))
    except OSError:  # base models often have none
        generation = None
    try:
        ends = end_tokens(generation) or end_tokens(AutoConfig.from_pretrained(resolve(name)))
    except FileNotFoundError:
        raise
    except Exception as error:
        raise _explain(name, "configuration", error) from error
    return tuple(dict.fromkeys((*ends, *end_tokens(tokenizer))))


def load_model(
    name: str,
    dtype: torch.dtype,
    device_map: str | dict[str, Any] | None,
    attn_implementation: str,
    revision: str | None,
) -> PreTrainedModel:
    """Loads a causal language model by the target's name.

    Raises:
        FileNotFoundError: As `resolve` does.
        ValueError: When the model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    if device_map is not None:
        options["device_map"] = device_map
    if revision is not None:
        options["revision"] = revision
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(resolve(name), **options)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise _explain(name, "model", error) from error
    return model


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the tokenizer's chat template, by which a checkpoint knows the template that it was trained with."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
