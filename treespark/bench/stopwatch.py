"""Where the time of a decoding round goes: the model's own products, and everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from treespark.drafters import Drafter
    from treespark.target import Target

PRODUCTS = ("target", "backbone", "head", "markov")


@contextmanager
def product_times(target: Target, drafter: Drafter | None = None) -> Iterator[dict[str, float]]:
    """Adds up, while it is open, the seconds spent in the products that no decoding loop can save.

    On an accelerator the device is waited for at the borders of each product, so that shares are the device's; that
    takes time by itself, and a round's own time is better measured without.

    Args:
        target: The target; "target" is its forward pass, output head included.
        drafter: The drafter: "backbone" is its slots and the projection of new context, "head" the output head on its
            slots, "markov" the products of its Markov head.

    Yields:
        Seconds by product, added to while decoding goes on.
    """
    seconds = dict.fromkeys(PRODUCTS, 0.0)
    wait: Callable[[], None] = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None
    places: list[tuple[Any, str, str]] = [(target, "forward", "target")]
    if drafter is not None:
        places += [(drafter, "draft", "backbone"), (drafter, "encode", "backbone"), (drafter, "base_logits", "head")]
        markov = getattr(drafter, "markov", None)
        if markov is not None:
            places.append((markov, "bias", "markov"))

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            wait()
            begin = perf_counter()
            result = function(*args, **kwargs)
            wait()
            seconds[part] += perf_counter() - begin
            return result

        return call

    for owner, name, part in places:
        owner.__dict__[name] = timed(getattr(owner, name), part)
    try:
        yield seconds
    finally:
        for owner, name, _ in places:
            del owner.__dict__[name]
