"""What a decoding round costs besides the models' own products, and how near its speed comes to the machine's limit.

    python benchmarks/decode_round.py --batch_sizes 1,12 --output round.json

Prints JSON. Rounds of plain decoding, rounds with a drafter and bare forward passes take turns, at the same context
length. For each batch size:

* `shares`: of the time of the drafted rounds, by product; `overhead` is what is left.
* `speedup`: measured, tokens per second over plain decoding's.
* `limit`: predicted, tau * t(1) / (t(N+1) + t(draft)), from bare forward passes of 1 and of N + 1 tokens a request and
  from the drafter's products; `of_limit` is the speed-up's share of it.

Without --drafter a drafter of random weights serves: shares and `of_limit` do not depend on what it knows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # used from a checkout

from treespark.bench.stopwatch import PRODUCTS, product_times
from treespark.decoding import BatchDecoding, Request
from treespark.drafters import Drafter, DSparkDrafter
from treespark.environment import environment
from treespark.policies import TreePolicy, parse
from treespark.target import Target


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", help="folder of a drafter; random weights by default")
    parser.add_argument("--policy", default="Budgeted(k=4, num_draft_nodes=32)")
    parser.add_argument("--batch_sizes", default="1,12")
    parser.add_argument("--context", type=int, default=128, help="longest prompt, in tokens")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    target = Target.load(
        options.target, dtype=options.dtype, device_map=None if options.device == "cpu" else options.device
    )
    drafter = load_drafter(options.drafter, target)
    policy = parse(options.policy)
    found = {
        "settings": vars(options),
        "environment": environment(),
        "batches": [
            measure(target, drafter, policy, int(size), options.context, options.rounds)
            for size in options.batch_sizes.split(",")
        ],
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        Path(options.output).write_text(text + "\n", encoding="utf-8")


def load_drafter(path: str | None, target: Target) -> Drafter:
    """Returns the drafter at `path`, or one of random weights in the shape of the SmolLM2 recipes."""
    if path is not None:
        drafter: Drafter = Drafter.from_pretrained(path, target=target)
    else:
        drafter = DSparkDrafter(target.spec, num_layers=3, block_size=7, head_dim_ratio=1.5, markov_rank=128)
        assert drafter.markov is not None
        torch.nn.init.normal_(drafter.markov.markov_w2.weight, std=0.02)
        drafter.bind(target)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def prompts(target: Target, batch_size: int, context: int) -> list[list[int]]:
    """Returns random prompts of unequal lengths, the longest of `context` tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = [max(1, context - 3 * (row % 8)) for row in range(batch_size)]
    return [torch.randint(target.spec.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def start(target: Target, drafter: Drafter | None, policy: TreePolicy | None, texts: list[list[int]]) -> BatchDecoding:
    """Returns a batch after its prefills, which no end token ends."""
    batch = BatchDecoding(target, drafter=drafter, policy=policy, allow_other_policy=True, max_batch_size=len(texts))
    for text in texts:
        batch.add(Request(target, text, max_new_tokens=1024, end_token_ids=[]))
    return batch


def bare_forward(target: Target, batch: BatchDecoding, tokens: int, layer_ids: tuple[int, ...]) -> Callable[[], None]:
    """Returns a forward pass of so many new tokens a request behind the batch's texts, which leaves no trace."""
    assert batch.cache is not None
    rows, length = len(batch.active), max(request.length for request in batch.active)
    ids = torch.zeros(rows, tokens, dtype=torch.long, device=target.device)
    positions = torch.arange(length, length + tokens, device=target.device).expand(rows, -1)
    mask = None
    if tokens > 1:
        mask = torch.ones(rows, tokens, length + tokens, dtype=torch.bool, device=target.device).tril(length)

    def run() -> None:
        assert batch.cache is not None
        batch.cache.select(0, rows, length)
        target(ids, batch.cache, layer_ids, positions, mask)
        batch.cache.select(0, rows, length)

    return run


def timed(target: Target, run: Callable[[], Any]) -> float:
    """Returns the seconds of a call, the device waited for."""
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(
    target: Target, drafter: Drafter, policy: TreePolicy, batch_size: int, context: int, rounds: int
) -> dict[str, Any]:
    """Measures one batch size; see the file's head."""
    texts = prompts(target, batch_size, context)
    plain, drafted = start(target, None, None, texts), start(target, drafter, policy, texts)
    nodes = policy.num_nodes(drafter.block_size)
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", "round", "t1", "tn", "other", *PRODUCTS)}
    committed = 0
    for number in range(rounds + 2):
        lap = {
            "plain": timed(target, plain.step),
            "t1": timed(target, bare_forward(target, plain, 1, ())),
            "tn": timed(target, bare_forward(target, drafted, nodes + 1, drafted.layer_ids)),
        }
        records: list[Any] = []
        lap["round"] = timed(target, lambda into=records: into.extend(drafted.step()))
        with product_times(target, drafter) as products:
            parted = timed(target, drafted.step)  # apart: on an accelerator the clocks themselves wait
        lap |= products | {"other": parted - sum(products.values())}
        if number < 2:
            continue  # the first calls allocate memory and load kernels
        committed += sum(record.committed for _, record in records)
        for name, value in lap.items():
            seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    whole = sum(sum(seconds[name]) for name in (*PRODUCTS, "other"))
    tau = committed / rounds / batch_size
    draft = medians["backbone"] + medians["head"] + medians["markov"]
    limit = tau * medians["t1"] / (medians["tn"] + draft)
    speedup = tau * medians["plain"] / medians["round"]
    return {
        "batch_size": batch_size,
        "context": context,
        "num_nodes": nodes,
        "tau": tau,
        "milliseconds": {name: 1e3 * value for name, value in medians.items()},
        "shares": {name: sum(seconds[name]) / whole for name in PRODUCTS} | {"overhead": sum(seconds["other"]) / whole},
        "speedup": speedup,
        "limit": limit,
        "of_limit": speedup / limit,
    }


if __name__ == "__main__":
    main()
