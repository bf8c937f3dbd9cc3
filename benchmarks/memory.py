"""Expected memory of a training on one GPU of n, by the formula that docs/scaling.md derives; nothing is allocated.

python benchmarks/memory.py
python benchmarks/memory.py --anchors 256 --micro_batches 4 --gpus 1 8 16
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # used from a checkout

from treespark.drafters import DSparkDrafter
from treespark.target import TargetSpec

GIB = 2**30


@dataclass(frozen=True)
class Model:
    """Sizes of a Qwen3 target, from its public config.json."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    tied: bool
    vocab: int = 151936
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 2 * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def shared(self) -> int:
        """Parameters that stay whole in every process: embedding, head where it is its own, final norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    def drafter(self, layers: int, width: float, rank: int) -> DSparkDrafter:
        """Returns a drafter without memory."""
        spec = TargetSpec(
            name=self.name,
            model_type="qwen3",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            max_position_embeddings=40960,
            bos_token_id=None,
            eos_token_ids=(151645,),
            pad_token_id=151643,
            fingerprint="",
            mask_token_id=151669,
        )
        with torch.device("meta"):
            return DSparkDrafter(spec, num_layers=layers, head_dim_ratio=width, markov_rank=rank)


MODELS = (
    Model("Qwen3-4B", hidden=2560, intermediate=9728, layers=36, tied=True),
    Model("Qwen3-8B", hidden=4096, intermediate=12288, layers=36, tied=False),
)


@dataclass(frozen=True)
class Work:
    """What a process computes at once."""

    tokens: int
    anchors: int
    micro_batches: int
    chunk: int
    width: int = 4  # frontier
    depths: int = 7


def activations(model: Model, drafter: DSparkDrafter, work: Work) -> float:
    """Bytes that the backbone keeps for its backward pass, over the micro-batches of a step (an estimate)."""
    queries, keys = (n * drafter.head_dim for n in (drafter.num_attention_heads, drafter.num_key_value_heads))
    slot = 20 * model.hidden + 12 * queries + 16 * keys + 8 * model.intermediate
    context = 16 * keys
    features = 2 * model.hidden * (len(drafter.layer_ids) + 1)
    layers = drafter.num_layers * (work.anchors * work.depths * slot + work.tokens * context)
    return float(work.micro_batches * (layers + work.tokens * features))


def chunk_logits(model: Model, work: Work) -> float:
    """Bytes of a chunk's logits: path, target and expanded parents, times value, gradient and one temporary."""
    rows = 2 * work.depths + 1 + (work.depths - 1) * work.width
    return 3.0 * 4 * work.chunk * rows * model.vocab


def memory(model: Model, drafter: DSparkDrafter, gpus: int, mode: str, work: Work) -> dict[str, float]:
    """Returns bytes by their cause, for mode "ddp", "fsdp2" or "fsdp2, sharded target"."""
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    target = model.shared + model.layers * model.layer
    if mode == "fsdp2, sharded target":
        target = model.shared + model.layers * model.layer / gpus + 2 * model.layer
    ddp = 16 * trained + (4 * trained if gpus > 1 else 0)  # with the buckets that it averages in
    states = ddp if mode == "ddp" else 12 * trained / gpus + 8 * trained
    return {
        "target": 2 * target,
        "drafter": states + 2 * trained,  # autocast keeps bfloat16 copies during a step
        "activations": activations(model, drafter, work),
        "logits": chunk_logits(model, work),
    }


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"tokens": 4096, "anchors": 512, "micro_batches": 1, "chunk": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 16])
    options = parser.parse_args()
    work = Work(options.tokens, options.anchors, options.micro_batches, options.chunk)
    print("| target | GPUs | strategy | target | drafter | activations | logits | sum, GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        drafter = model.drafter(options.layers, 1.5, options.rank)
        for gpus in options.gpus:
            for mode in ("ddp",) if gpus == 1 else ("ddp", "fsdp2", "fsdp2, sharded target"):
                parts = [part / GIB for part in memory(model, drafter, gpus, mode, work).values()]
                label = "one device" if gpus == 1 else mode
                cells = " | ".join(f"{value:.1f}" for value in [*parts, sum(parts)])
                print(f"| {model.name} | {gpus} | {label} | {cells} |")


if __name__ == "__main__":
    main()
