"""The target and the drafter of a run: what they are, and whether training and decoding see the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treespark.data import MicroBatch
from treespark.doctor.report import Report, size
from treespark.drafters import Drafter
from treespark.module import DraftingModule
from treespark.target import Target, TargetFeatures, check_mask_token

_PREFIX, _STEPS = 192, 32  # tokens of a document that are prefilled, then decoded one by one


def examine_target(report: Report, module: DraftingModule) -> Target | None:
    """Loads the target as a training would, and says in which form it is held."""
    target = None
    with report.guard("target"):
        target = Target.load(module.target_name, dtype=module.target_dtype, revision=module.target_revision)
        model: Any = target.model
        quantisation = getattr(model.config, "quantization_config", None)
        method = getattr(quantisation, "quant_method", None) or (
            quantisation and dict(quantisation).get("quant_method")
        )
        placed = getattr(model, "hf_device_map", None)
        dtype = str(target.dtype).removeprefix("torch.")
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        report.say(
            "target",
            f"'{module.target_name}' ({target.spec.model_type}, {target.spec.num_layers} layers, hidden "
            f"{target.spec.hidden_size}, vocabulary {target.spec.vocab_size}): {dtype}, "
            f"{size(num_bytes)}, quantisation {method or 'none'}, device map {placed or 'none'}, attention "
            f"{model.config._attn_implementation}",
        )
    return target


def examine_drafter(report: Report, module: DraftingModule, target: Target) -> Drafter | None:
    """Builds the drafter for the target, each thing that can be wrong in a sentence of its own."""
    num_errors, drafter = len(report.errors), None
    with report.guard("drafter"):
        drafter = module.make_drafter(target.spec)
    if drafter is None:
        return None
    taps = list(drafter.layer_ids)
    report.say("layers", f"taps {taps} of 0 to {target.spec.num_layers - 2}; {drafter.block_size} depths")
    with report.guard("policy"):
        module.policy.check(drafter.block_size, target.spec.vocab_size)
    with report.guard("mask token"):
        tokenizer = target.tokenizer if target.has_tokenizer else None
        check_mask_token(tokenizer, drafter.mask_token_id, target.spec)
        name = "an unused row of the embedding"
        if tokenizer is not None and drafter.mask_token_id < len(tokenizer):
            name = repr(tokenizer.convert_ids_to_tokens(drafter.mask_token_id))
        report.say("mask token", f"{drafter.mask_token_id}, {name}")
    if len(report.errors) > num_errors:
        # The start is a matter of its own, and is told as well.
        with report.guard("init_from"):
            module._warm_start(drafter, target)
        return None
    with report.guard("drafter"):
        module.compose(target)
        count = sum(p.numel() for p in module.drafter.parameters() if p.requires_grad)
        start = module.init_from or module.init_from_target_layers or "random"
        report.say("drafter", f"{type(drafter).__name__}, {count:,} trainable numbers, start: {start}")
        return module.drafter
    return None


def last_document(batch: MicroBatch) -> slice:
    """Where the last document of a micro-batch's first row stands, which others precede in a packed row.

    Of a long one, the beginning.
    """
    documents = batch.document_ids[0]
    places = (documents == documents.max()).nonzero()[:, 0]
    start, length = int(places[0]), len(places)
    return slice(start, start + min(length, _PREFIX + _STEPS))


@torch.no_grad()
def examine_features(report: Report, module: DraftingModule, batch: MicroBatch, features: TargetFeatures) -> None:
    """Compares a training step's features of a document with the model's own logits and with decoding's features.

    Args:
        report: Where findings go.
        module: Composed.
        batch: A micro-batch of training.
        features: What the module takes for it.
    """
    target, here = module.target, last_document(batch)
    ids, final, context = batch.input_ids[:1, here], features.final[:1, here], features.context[:1, here]
    length = ids.shape[1]
    prefill = max(1, length - _STEPS)
    # Numbers from a store were rounded once, by half of an eps of its dtype at most.
    stored = getattr(module.feature_source, "identity", None)
    rounding = 0.0 if stored is None else 4 * torch.finfo(stored.torch_dtype).eps
    limit = max(1e-3, 16 * torch.finfo(target.dtype).eps, rounding)
    expected = target.model(input_ids=ids, use_cache=False).logits.float()
    _compare(
        report, "logits", target.logits(final).float(), expected, limit, "the head on the features", "the model's own"
    )
    decoded = decoded_features(target, ids, module.drafter.layer_ids, prefill)
    both = torch.cat([context, final], -1).float()
    there = torch.cat([decoded.context, decoded.final], -1).float()
    _compare(report, "features", both, there, limit, "training", f"decoding ({length - prefill} tokens one by one)")


def decoded_features(target: Target, ids: Tensor, layer_ids: Sequence[int], prefill: int) -> TargetFeatures:
    """Returns the features of ids [1, S] as decoding gets them: a prefill, then a token at a time through the cache."""
    cache = target.new_cache(ids.shape[1])
    edges = [0, *range(prefill, ids.shape[1] + 1)]
    parts = [
        target(ids[:, start:stop], cache, layer_ids, num_logits=1).features for start, stop in itertools.pairwise(edges)
    ]
    return TargetFeatures(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))


def _compare(report: Report, topic: str, ours: Tensor, theirs: Tensor, limit: float, one: str, other: str) -> None:
    """Compares [1, S, n] position by position: the length of the difference against that of the vector."""
    distance = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-30)).max()
    text = f"{one} and {other}: relative difference {float(distance):.1e} over {ours.shape[1]} tokens"
    if distance <= limit:
        report.say(topic, text)
    else:
        report.fail(
            topic, f"{text}, more than {limit:.1e}: the drafter would be trained on other numbers than it decodes with."
        )
