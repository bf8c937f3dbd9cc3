"""Training over a reduced draft vocabulary against the full one with the other tokens masked out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_drafter, tiny_target
from tests.tiny_text import save_tiny_target
from treespark.blocks import DraftBlocks, Labels
from treespark.cli import dispatch
from treespark.decoding import decode, decode_plain
from treespark.drafters import Drafter, DSparkDrafter
from treespark.drafters.reduced import frequent_tokens
from treespark.drafters.source import open_drafter
from treespark.drafters.warm_start import start_from_drafter
from treespark.generation import generate
from treespark.losses import L1, Confidence, Coverage, CrossEntropy, LossTerm, Retention, Survival
from treespark.module import DraftingModule
from treespark.policies import Budgeted, Chain, DDTree, TreePolicy
from treespark.target import Target
from treespark.vocabulary import choose_tokens, draft_blocks, draftable

LOSSES: list[LossTerm] = [CrossEntropy(), L1(), Confidence(), Survival(), Coverage(), Retention(margin=9.0, cap=99.0)]
SIZE = 40


def made(head: str = "vanilla", rank: int = 8) -> tuple[Target, Drafter]:
    """A drafter of 40 of 64 tokens, every third left out from token 3 on."""
    target = tiny_target("llama")
    options: dict[str, Any] = {"draft_vocab_size": SIZE, "markov_head": head, "markov_rank": rank}
    drafter = tiny_drafter(target, bind=False, confidence_with_markov=rank > 0, **options)
    counts = torch.ones(64, dtype=torch.long)
    counts[3::3] = 0
    drafter.select_tokens(frequent_tokens(counts, SIZE))
    drafter.bind(target)
    return target, drafter


def anchors(drafter: Drafter, rows: int = 5) -> tuple[Labels, Tensor, Tensor]:
    """Random labels of which most can be drafted, slot states and target states."""
    generator = torch.Generator().manual_seed(1)
    ids = drafter.draft_ids
    assert ids is not None
    depths, hidden = drafter.block_size, drafter.spec.hidden_size
    tokens = ids[torch.randint(SIZE, (rows, depths), generator=generator)]
    tokens[0, 2], tokens[1, 0] = 3, 6  # cannot be drafted
    roots = torch.tensor([3, 5, 9, 2, 6])
    labels = Labels(roots, tokens, torch.ones(rows, depths, dtype=torch.bool), None)
    states = torch.randn(2, rows, depths, hidden, generator=generator, dtype=torch.float64)
    return labels, states[0].requires_grad_(), states[1]


@pytest.mark.parametrize("policy", [Budgeted(2, 6), Chain(), DDTree(6)], ids=repr)
@pytest.mark.parametrize(("head", "rank"), [("vanilla", 8), ("gated", 8), ("rnn", 8), ("vanilla", 0)])
def test_losses_are_those_of_masked_logits(policy: TreePolicy, head: str, rank: int) -> None:
    """Each loss and its gradients against decoding's proposer (other tokens at -inf) and a target masked alike."""
    target, drafter = made(head, rank)
    plain, hidden, target_hidden = anchors(drafter)
    ids, size = drafter.draft_ids, drafter.block_size
    assert ids is not None
    expanded = policy.expanded_per_depth(size)
    labels = draftable(replace(plain, expanded_per_depth=expanded), drafter)
    assert labels.valid.sum(1).tolist() == [2, 0, size, size, size]
    masked = torch.full((64,), -torch.inf, dtype=torch.float64).index_fill(0, ids, 0.0)
    reference = DraftBlocks(
        replace(plain, valid=labels.valid, expanded_per_depth=expanded),
        drafter.propose(hidden, plain.root_tokens),
        target_hidden,
        lambda states: target.logits(states) + masked,
        policy,
    )
    blocks = draft_blocks(target, drafter, policy, labels, hidden, target_hidden)
    assert blocks.path_logits.shape[-1] == SIZE
    weights = [hidden, *(parameter for parameter in drafter.parameters() if parameter.requires_grad)]
    for term in LOSSES:
        if isinstance(term, Coverage) and isinstance(policy, Chain):
            continue
        found, expected = term(blocks), term(reference)
        torch.testing.assert_close(found.sum, expected.sum, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.weight, expected.weight, rtol=1e-10, atol=1e-12)
        assert float(found.weight) > 0
        if not found.sum.requires_grad:
            continue
        pairs = (torch.autograd.grad(s.sum, weights, allow_unused=True, retain_graph=True) for s in (found, expected))
        for one, other in zip(*pairs, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_trees_hold_tokens_of_the_target() -> None:
    """Decoding proposes the draft vocabulary's tokens by the target's numbers, the likeliest of the masked logits."""
    _, drafter = made()
    labels, hidden, _ = anchors(drafter)
    proposer = drafter.propose(hidden, labels.root_tokens)
    found = proposer.expand(1, labels.root_tokens.unsqueeze(1), proposer.root_carry(), 4)
    logits, _ = proposer.logits(1, labels.root_tokens.unsqueeze(1), proposer.root_carry())
    best = logits.log_softmax(-1).topk(4)
    assert torch.equal(found.tokens, best.indices)
    torch.testing.assert_close(found.log_probs, best.values)
    assert torch.equal(proposer.marginals(3)[0], proposer.base_logits.topk(3).indices)


def test_the_most_frequent_tokens() -> None:
    """Counts of the data, end tokens always; data that cannot count is an error, no data leaves all as it is."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, bind=False, draft_vocab_size=3)
    counts = torch.zeros(64, dtype=torch.long)
    counts[[7, 30, 9]] = torch.tensor([5, 9, 1])

    class Data:
        def token_counts(self, vocab_size: int) -> Tensor:
            return counts

    choose_tokens(drafter, target, Data())
    assert drafter.draft_ids is not None and drafter.draft_ids.tolist() == [2, 7, 30]
    choose_tokens(drafter, target, None)
    assert drafter.draft_ids.tolist() == [2, 7, 30]
    with pytest.raises(ValueError, match="no method token_counts"):
        choose_tokens(drafter, target, object())
    with pytest.raises(ValueError, match="Expected 3 tokens"):
        drafter.select_tokens(torch.arange(4))


def test_warm_start_from_a_full_vocabulary() -> None:
    """W2 keeps the rows of the tokens that can be drafted: the drafts are those of the full drafter among them."""
    target, drafter = made()
    full = tiny_drafter(target, seed=5)
    assert "everything was loaded" in start_from_drafter(drafter, full, "here")
    labels, hidden, _ = anchors(drafter)
    ids, parents = drafter.draft_ids, labels.root_tokens.unsqueeze(1)
    assert ids is not None
    logits, expected = (
        item.propose(hidden, labels.root_tokens).logits(2, parents, hidden.new_zeros(5, 1, 0))[0]
        for item in (drafter, full)
    )
    torch.testing.assert_close(logits[..., ids], expected[..., ids])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Four steps of training over 30 tokens through the command."""
    folder = tmp_path_factory.mktemp("reduced")
    target = save_tiny_target(folder / "target", num_hidden_layers=4)
    (folder / "prompts.jsonl").write_text('{"prompt": "hello there"}\n{"prompt": "a b c"}\n')
    answers = str(folder / "answers.jsonl")
    generate(target, str(folder / "prompts.jsonl"), answers, max_new_tokens=12)
    words = f"""fit --model.target {target} --data.train {answers} --data.val {answers}
        --model.drafter DSparkDrafter --model.drafter.num_layers 1 --model.drafter.block_size 3
        --model.drafter.markov_rank 4 --model.drafter.draft_vocab_size 30 --model.policy Budgeted
        --model.policy.init_args.k 2 --model.policy.init_args.num_draft_nodes 5 --data.num_anchors 4
        --data.batch_size 2 --trainer.accelerator cpu --trainer.logger false --trainer.max_steps 4
        --trainer.default_root_dir {folder}/run""".split()
    words += ["--model.losses", "[{class_path: CrossEntropy}, {class_path: L1}, {class_path: Survival}]"]
    assert dispatch(words) == 0
    return folder, words


def test_training_saves_what_decodes(trained: tuple[Path, list[str]]) -> None:
    """The saved folder and the checkpoint hold the same tokens, and decoding gives the target's own text."""
    folder, _ = trained
    target = Target.load(str(folder / "target"), dtype="float64")
    drafters = [open_drafter(folder / "run" / name).load(target) for name in ("drafter", "checkpoints/last.ckpt")]
    ids = [drafter.draft_ids for drafter in drafters]
    assert ids[0] is not None and ids[1] is not None and torch.equal(ids[0], ids[1])
    assert len(ids[0]) == 30 and set(target.spec.eos_token_ids) <= set(ids[0].tolist())
    assert ids[0].tolist() != list(range(30))
    expected = decode_plain(target, [5, 6, 7], max_new_tokens=12)
    for drafter in drafters:
        assert isinstance(drafter, DSparkDrafter)
        assert torch.equal(drafter.lm_head.weight, target.output_head().weight[ids[0]])
        assert decode(target, drafter, [5, 6, 7], max_new_tokens=12).tokens == expected.tokens


def test_a_checkpoint_brings_its_tokens(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    """A resume, and a validation without training data, take the tokens and their rows of the head from the file."""
    folder, words = trained
    last = str(folder / "run/checkpoints/last.ckpt")
    before = torch.load(last, map_location="cpu", weights_only=True)["state_dict"]["drafter.draft_ids"]
    changed = {"--trainer.max_steps": "6", "--trainer.default_root_dir": str(tmp_path / "run")}
    resumed = [changed.get(words[i - 1], word) for i, word in enumerate(words)]
    assert dispatch([*resumed, "--ckpt_path", last]) == 0
    after = torch.load(tmp_path / "run/checkpoints/last.ckpt", map_location="cpu", weights_only=True)
    assert after["global_step"] == 6 and torch.equal(after["state_dict"]["drafter.draft_ids"], before)
    target = Target.load(str(folder / "target"))

    def partial_drafter(spec: Any) -> DSparkDrafter:
        return DSparkDrafter(spec, num_layers=1, block_size=3, markov_rank=4, draft_vocab_size=30)

    module = DraftingModule("tiny", partial_drafter, Budgeted(2, 5), [CrossEntropy()])
    module.compose(target)
    module.load_state_dict(after["state_dict"])
    assert torch.equal(module.drafter.lm_head.weight, target.output_head().weight[before])
