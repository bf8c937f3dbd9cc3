"""Warm starts: equal shapes keep the function, wider heads keep values and outputs, one line names the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import tiny_drafter, tiny_target
from treespark.drafters import DSparkDrafter
from treespark.drafters.warm_start import start_from_drafter, start_from_target

TARGET = tiny_target("qwen3")
IDS = torch.tensor([[5, 9, 13, 20, 7, 33]])


def make(**options: Any) -> DSparkDrafter:
    drafter = tiny_drafter(TARGET, **options)
    assert isinstance(drafter, DSparkDrafter)
    return drafter


@torch.no_grad()
def logits(drafter: DSparkDrafter) -> torch.Tensor:
    features = TARGET.features(IDS, drafter.layer_ids).context[:, :5]
    context = drafter.encode(features, torch.arange(5).unsqueeze(0))
    hidden = drafter.draft(context, IDS[:, 5:], torch.tensor([[5]]))[0]
    return drafter.propose(hidden, IDS[:, 5]).path_logits(torch.tensor([[33, 1, 2, 3]]))


def test_equal_shapes_keep_the_function() -> None:
    """Another seed, then everything is loaded: the same logits to the bit."""
    source, new = make(), make(seed=1)
    assert not torch.equal(logits(new), logits(source))
    assert start_from_drafter(new, source, "runs/a") == "Started from runs/a: everything was loaded."
    assert torch.equal(logits(new), logits(source))
    assert all(parameter.requires_grad for parameter in new.layers.parameters())


def test_wider_heads_keep_values_and_outputs() -> None:
    """8 -> 12: inside each head's block old rows of v and old columns of o stay; new columns are zero, new rows not.

    So for any attention weights the layer's output is the source's: o(v(x)) summed over heads is the same.
    """
    source, new = make(), make(seed=1, head_dim=12)
    fresh = make(seed=1, head_dim=12)
    line = start_from_drafter(new, source, "D")
    names = ["self_attn.k_norm", "self_attn.k_proj", "self_attn.q_norm", "self_attn.q_proj"]
    assert line == f"Started from D: {', '.join(names)} start anew."
    for theirs, mine, start in zip(source.layers, new.layers, fresh.layers, strict=True):
        a, b, c = theirs.self_attn, mine.self_attn, start.self_attn  # type: ignore[union-attr]
        v, o = b.v_proj.weight.view(2, 12, 32), b.o_proj.weight.view(32, 4, 12)
        assert torch.equal(v[:, :8], a.v_proj.weight.view(2, 8, 32))
        assert torch.equal(v[:, 8:], c.v_proj.weight.view(2, 12, 32)[:, 8:])
        assert torch.equal(o[..., :8], a.o_proj.weight.view(32, 4, 8)) and bool((o[..., 8:] == 0).all())
        assert torch.equal(b.q_proj.weight, c.q_proj.weight) and torch.equal(b.k_norm.weight, c.k_norm.weight)
        x = torch.randn(3, 32, dtype=torch.float64)
        values = [att.v_proj(x).view(3, 2, 1, -1).expand(-1, -1, 2, -1).reshape(3, -1) for att in (a, b)]
        assert torch.allclose(a.o_proj(values[0]), b.o_proj(values[1]))
    assert torch.equal(new.fc.weight, source.fc.weight)
    assert torch.equal(new.layers[1].mlp.up_proj.weight, source.layers[1].mlp.up_proj.weight)  # type: ignore[union-attr]


def test_what_does_not_fit_is_named() -> None:
    """Fewer layers, another rank, no confidence head, fewer depths; narrower heads keep neither v nor o."""
    source = make(num_layers=3)
    line = start_from_drafter(make(seed=1, markov_rank=4, block_size=3), source, "D")
    assert line == (
        "Started from D: confidence_head.proj, markov.markov_w1, markov.markov_w2 start anew; layers.2 of the source "
        "are left out; block_size is 3, was 4."
    )
    assert start_from_drafter(make(num_layers=3), make(), "D") == "Started from D: layers.2 start anew."
    narrow = start_from_drafter(make(head_dim=6), source, "D")
    assert "self_attn.o_proj" in narrow and "self_attn.v_proj" in narrow


def test_reduced_vocabulary_becomes_full() -> None:
    """Drafted tokens keep their Markov rows, the others have zero; so on the kept tokens logits are the same."""
    source, new = make(draft_vocab_size=20), make(seed=1)
    assert source.draft_ids is not None
    line = start_from_drafter(new, source, "D")
    assert "the reduced vocabulary (20 tokens) is gone" in line
    assert torch.allclose(logits(new)[..., source.draft_ids], logits(source)[..., source.draft_ids])
    assert new.markov is not None and bool((new.markov.markov_w2.weight[20:] == 0).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_layer_ids": [0, 1]}, r"has target_layer_ids \[0, 1\], the new drafter \[0, 2\]"),
        ({"mask_token_id": 62}, "has mask_token_id 62, the new drafter 63"),
        ({"sample_from_anchor": False}, "has sample_from_anchor False, the new drafter True"),
        ({"num_key_value_heads": 4}, "has num_key_value_heads 4"),
    ],
)
def test_sources_that_mean_something_else(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_from_drafter(make(), make(**options), "D")


def test_start_from_target_layers() -> None:
    """The drafter's layers and last norm are the target's; its own parts start anew."""
    new = make()
    line = start_from_target(new, TARGET, [1, 3])
    assert "layers [1, 3]" in line and "fc, hidden_norm, markov.markov_w1" in line and "self_attn" not in line
    for mine, i in zip(new.layers, (1, 3), strict=True):
        theirs = TARGET.layer_state(i)
        assert all(torch.equal(value, theirs[key]) for key, value in mine.state_dict().items())
    assert torch.equal(new.norm.weight, TARGET.final_norm())
    wide = make(head_dim=12)
    assert "self_attn.q_proj start anew" in start_from_target(wide, TARGET, [0, 0])
    with pytest.raises(ValueError, match="one for each of the drafter's 2"):
        start_from_target(new, TARGET, [1])
    with pytest.raises(ValueError, match="has layers 0 to 3, not 4"):
        start_from_target(new, TARGET, [1, 4])
