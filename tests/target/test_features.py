"""Features of the frozen target: taps, final norm, own head, padding, documents in one row."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import tiny_model, tiny_target
from treespark.target import Target

FAMILIES = ["llama", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_taps_and_head_equal_the_models_own(family: str, tie: bool) -> None:
    """Tap i is `hidden_states[i + 1]` (0 is the embedding); the head on the final state gives the model's logits."""
    target = tiny_target(family, tie=tie)
    ids = torch.randint(3, 64, (2, 9))
    features = target.features(ids, [2, 0])
    with torch.no_grad():
        output = target.model(ids, output_hidden_states=True)
    assert torch.equal(features.context, torch.cat([output.hidden_states[3], output.hidden_states[1]], -1))
    assert torch.equal(features.final, output.hidden_states[-1])
    assert torch.equal(target.logits(features.final), output.logits)


def test_taps_are_hook_outputs_not_neighbours() -> None:
    """An off-by-one tap would still be plausible: compare with a hook on the named layer itself."""
    target = tiny_target()
    seen: list[torch.Tensor] = []
    handle = target.model.model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out))
    features = target.features(torch.tensor([[5, 6, 7]]), [1])
    handle.remove()
    assert torch.equal(features.context, seen[0])
    assert not target.model.model.layers[1]._forward_hooks


@pytest.mark.parametrize("family", FAMILIES)
def test_right_padding_changes_nothing(family: str) -> None:
    """Rows of 4 and 7 tokens together give what each gives alone: causal attention never sees the right."""
    target = tiny_target(family)
    ids = torch.randint(3, 64, (2, 7))
    mask = torch.arange(7) < torch.tensor([[4], [7]])
    together = target.features(ids, [0, 1], mask, torch.arange(7).expand(2, -1) * mask)
    alone = target.features(ids[:1, :4], [0, 1])
    assert torch.allclose(together.context[:1, :4], alone.context, atol=1e-12)
    assert torch.allclose(together.final[:1, :4], alone.final, atol=1e-12)


def test_documents_of_one_row_are_independent() -> None:
    """Documents of 3 and 5 tokens packed into a row with restarting positions = the two rows apart."""
    target = tiny_target()
    ids = torch.randint(3, 64, (1, 9))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0]])
    mask = torch.tensor([[True] * 8 + [False]])
    packed = target.features(ids, [0, 2], mask, positions)
    first, second = target.features(ids[:, :3], [0, 2]), target.features(ids[:, 3:8], [0, 2])
    # The rotary embedding of `transformers` is computed in float32, so offsets leave that much.
    assert torch.allclose(packed.context[:, :3], first.context, atol=1e-10)
    assert torch.allclose(packed.final[:, 3:8], second.final, atol=1e-10)


def test_positions_may_start_late() -> None:
    """A row that starts at position 4 keeps its offset: equal to rotating by the same positions in the model."""
    target = tiny_target()
    ids, positions = torch.randint(3, 64, (1, 5)), torch.arange(4, 9).unsqueeze(0)
    with torch.no_grad():
        expected = target.model.model(ids, position_ids=positions).last_hidden_state
    assert torch.equal(target.features(ids, [], None, positions).final, expected)


@pytest.mark.parametrize("bad", [-1, 3, 4])
def test_only_layers_before_the_final_one_are_tapped(bad: int) -> None:
    with pytest.raises(ValueError, match=r"offers 0 to 2 \(the final layer excluded\)"):
        tiny_target().features(torch.tensor([[5, 6]]), [bad])


def test_left_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="padded on the right"):
        tiny_target().features(torch.tensor([[5, 6]]), [0], torch.tensor([[False, True]]))


def test_target_stays_frozen() -> None:
    target = tiny_target().train()
    assert not target.training and not target.model.training
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert not target.features(torch.tensor([[5, 6]]), [0]).context.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "llama", "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"family": "llama", "logits_scaling": 8.0}, "logits_scaling=8.0"),
        (
            {"family": "qwen3", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "slides over 16",
        ),
        ({"family": "llama", "attn_implementation": "flash_attention_2"}, "takes no tree mask"),
    ],
)
def test_unsupported_models_are_refused(options: dict[str, object], message: str) -> None:
    options = dict(options)
    implementation = options.pop("attn_implementation", None)
    model = tiny_model(**options)  # type: ignore[arg-type]
    if implementation is not None:
        model.config._attn_implementation_internal = implementation
    with pytest.raises(ValueError, match=message):
        Target(model)


def test_a_head_that_is_not_the_models_own_is_refused() -> None:
    """A model that rescales its logits in a way no config key tells is still caught, by comparing once."""
    model = tiny_model()
    forward = model.forward

    def doubled(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    with pytest.raises(ValueError, match="not its output head"):
        Target(model)


def test_biased_head_is_refused() -> None:
    model = tiny_model()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
    with pytest.raises(ValueError, match="has a bias"):
        Target(model)


def test_autocast_does_not_touch_the_target() -> None:
    """A trainer's bfloat16 is the drafter's: features and logits of a float32 target are the same, bit for bit."""
    target = tiny_target("qwen3", torch.float32)
    ids = torch.randint(3, 64, (2, 9))
    plain = target.features(ids, [0, 2])
    with torch.autocast("cpu", torch.bfloat16):
        found = target.features(ids, [0, 2])
        logits = target.logits(found.final)
        live = target(ids[:1], target.new_cache(16))
    assert torch.equal(found.context, plain.context) and torch.equal(found.final, plain.final)
    assert torch.equal(logits, target.logits(plain.final))
    assert torch.equal(live.logits, target(ids[:1], target.new_cache(16)).logits)
