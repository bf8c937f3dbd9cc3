"""What `train_step.py` measures: the loss stage and the whole step, on random weights and labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treespark.blocks import DraftBlocks, Labels
from treespark.drafters import DSparkDrafter
from treespark.losses import L1, Confidence, Coverage, CrossEntropy, LossTerm, Survival
from treespark.objective import Drafted, Objective
from treespark.policies import Budgeted, Chain, TreePolicy
from treespark.target.linear import apply_head
from treespark.target.spec import TargetSpec


@dataclass
class Options:
    """What is measured.

    Args:
        part: "loss" for the loss stage, "step" for the whole optimiser step.
        cases: Of chain, tree, plain (loss stage only), with commas between.
        anchors: A.
        depths: K.
        k: Children per parent.
        nodes: N, packed nodes.
        vocab: V.
        rank: r.
        hidden: H.
        markov_head: vanilla, gated or rnn.
        chunk: Anchors per chunk.
        layers: Of the drafter (step).
        target_layers: Of the random Qwen3 target (step).
        length: S, tokens of the one row (step).
        spread: Deviation of the random base logits; that of the corrections is half of it.
        dtype: Of weights and states.
        device: cpu or cuda.
        threads: Of the CPU.
        repeats: Timed runs of each case, after one that is not timed.
        seed: Of all random numbers.
        time: Whether to time.
        memory: Whether to measure memory.
        worker: Internal: the case whose peak memory this process measures.
    """

    part: str = "loss"
    cases: str = "chain,tree"
    anchors: int = 64
    depths: int = 7
    k: int = 4
    nodes: int = 32
    vocab: int = 151_936
    rank: int = 256
    hidden: int = 1_024
    markov_head: str = "vanilla"
    chunk: int = 8
    layers: int = 5
    target_layers: int = 28
    length: int = 512
    spread: float = 2.0
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 2
    repeats: int = 3
    seed: int = 0
    time: bool = True
    memory: bool = True
    worker: str | None = None


def setting(case: str, options: Options) -> tuple[TreePolicy, list[LossTerm]]:
    """Returns a case's policy and losses, with their default coefficients."""
    base: list[LossTerm] = [CrossEntropy(), L1(), Confidence()]
    if case == "tree":
        return Budgeted(options.k, options.nodes), [*base, Survival(), Coverage()]
    if case in ("chain", "plain"):
        return Chain(), base
    raise ValueError(f"Unknown case '{case}': expected chain, tree or plain.")


@dataclass
class Inputs:
    """What the loss stage starts from."""

    drafter: DSparkDrafter
    head: Tensor
    hidden: Tensor
    target_hidden: Tensor
    labels: Labels

    @property
    def parameters(self) -> list[Tensor]:
        """The heads' parameters."""
        modules = [self.drafter.markov, self.drafter.confidence_head]
        return [parameter for module in modules if module is not None for parameter in module.parameters()]


def random_inputs(options: Options) -> Inputs:
    """Returns random weights, states and labels; every depth is valid."""
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    v, h, r, k = options.vocab, options.hidden, options.rank, options.depths
    spec = TargetSpec(
        "random", "qwen3", v, h, 4, 4, 4, 64, 64, 1e-6, {"rope_type": "default", "rope_theta": 1e4}, 4096, None, (0,),
        None, "", 1,
    )  # fmt: skip
    with torch.device(device):
        drafter = DSparkDrafter(
            spec, num_layers=1, block_size=k, markov_rank=r, markov_head=options.markov_head, target_layer_ids=[0],
            confidence=True, confidence_with_markov=r > 0,
        )  # fmt: skip
        drafter = drafter.to(dtype)
        head = torch.empty(v, h, dtype=dtype).normal_(std=options.spread / h**0.5)
        drafter.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
        if drafter.markov is not None:
            torch.nn.init.normal_(drafter.markov.markov_w1.weight)
            torch.nn.init.normal_(drafter.markov.markov_w2.weight, std=0.5 * options.spread / r**0.5)
        tokens = torch.randint(v, (options.anchors, k))
        expanded = None
        labels = Labels(
            torch.randint(v, (options.anchors,)), tokens, torch.ones_like(tokens, dtype=torch.bool), expanded
        )
        states = [torch.randn(options.anchors, k, h, dtype=dtype) for _ in range(2)]
    return Inputs(drafter, head, states[0].requires_grad_(), states[1], labels)


def loss_stage(case: str, inputs: Inputs, options: Options) -> Callable[[], list[Tensor]]:
    """Returns a function that runs the stage once and returns the gradients of the states and of the heads."""
    if case == "plain":
        return lambda: plain_stage(inputs)
    policy, losses = setting(case, options)
    objective = Objective(losses, options.chunk)
    known = inputs.labels
    labels = Labels(known.root_tokens, known.tokens, known.valid, policy.expanded_per_depth(options.depths))

    def make_blocks(chunk: Tensor, rows: slice) -> DraftBlocks:
        proposer = inputs.drafter.propose(chunk, labels.root_tokens[rows])
        return DraftBlocks(labels[rows], proposer, inputs.target_hidden[rows], target_logits, policy)

    def target_logits(states: Tensor) -> Tensor:
        return apply_head(states, inputs.head)

    def run() -> list[Tensor]:
        drafted = Drafted(inputs.hidden, labels, make_blocks)
        loss = objective([drafted], inputs.parameters, labels=[labels]).loss
        return list(torch.autograd.grad(loss, [inputs.hidden, *inputs.parameters]))

    return run


def plain_stage(inputs: Inputs) -> list[Tensor]:
    """The DSpark losses written out: all anchors at once, torch's own functions, one backward pass."""
    labels, markov, head = inputs.labels, inputs.drafter.markov, inputs.drafter.confidence_head
    assert markov is not None and head is not None
    parents = torch.cat([labels.root_tokens.unsqueeze(1), labels.tokens[:, :-1]], 1)
    embedded = markov.embed(parents)
    correction = F.linear(markov.path(parents, inputs.hidden), markov.markov_w2.weight)
    logits = F.linear(inputs.hidden, inputs.head) + correction
    with torch.no_grad():
        target = F.linear(inputs.target_hidden, inputs.head).softmax(-1)
    log_probs = logits.log_softmax(-1)
    l1 = (log_probs.exp() - target).abs().sum(-1)
    cross_entropy = -log_probs.gather(-1, labels.tokens.unsqueeze(-1)).squeeze(-1)
    guess = head.proj(torch.cat([inputs.hidden, embedded], -1)).squeeze(-1)
    confidence = F.binary_cross_entropy_with_logits(guess, (1 - 0.5 * l1.detach()).clamp(0, 1), reduction="none")
    weights = labels.decay(4.0).to(l1.dtype) * labels.valid
    loss = ((0.1 * cross_entropy + 0.9 * l1 + confidence) * weights).sum() / weights.sum()
    return list(torch.autograd.grad(loss, [inputs.hidden, *inputs.parameters]))


def whole_step(case: str, options: Options, target: Any) -> Callable[[], None]:
    """Returns a function that takes one optimiser step of a `DraftingModule` on one row of random text."""
    from treespark.data import MicroBatch
    from treespark.module import DraftingModule

    policy, losses = setting(case, options)
    module = DraftingModule(
        "random",
        lambda spec: DSparkDrafter(
            spec, num_layers=options.layers, block_size=options.depths, markov_rank=options.rank,
            markov_head=options.markov_head, mask_token_id=1,
        ),
        policy,
        losses,
        chunk_anchors=options.chunk,
    )  # fmt: skip
    module.compose(target)
    module.open_features(None)
    module.drafter.to(options.device)
    if module.drafter.markov is not None:
        torch.nn.init.normal_(module.drafter.markov.markov_w2.weight, std=options.spread / options.rank**0.5)
        torch.nn.init.normal_(module.drafter.markov.markov_w1.weight)
    parameters = module.drafter.trainable_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    length, anchors = options.length, options.anchors
    flags = torch.ones(1, length, dtype=torch.bool)
    start = torch.randperm(length - options.depths - 2)[:anchors].sort().values + 1
    batch = MicroBatch(
        input_ids=torch.randint(2, options.vocab, (1, length)), attention_mask=flags, loss_mask=flags,
        document_ids=torch.zeros(1, length, dtype=torch.long), position_ids=torch.arange(length).unsqueeze(0),
        anchors=start.unsqueeze(0), anchor_mask=torch.ones(1, anchors, dtype=torch.bool),
        sample_ids=torch.zeros(1, dtype=torch.long), prompt_lengths=torch.zeros(1, dtype=torch.long),
        own_text=torch.zeros(1, dtype=torch.bool),
        document_samples=torch.zeros(1, 1, dtype=torch.long),
    ).to(options.device)  # fmt: skip

    def run() -> None:
        labels = module._labels(batch)
        drafted = (module._draft(batch, labels, module._features(batch)) for _ in range(1))
        module.objective(drafted, parameters, labels=[labels]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def random_target(options: Options) -> Any:
    """Returns a random Qwen3 target of Qwen3-0.6B's proportions, head tied to the embedding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from treespark.target import Target

    config = Qwen3Config(
        vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.target_layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128), head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=40_960, bos_token_id=None, eos_token_id=0, pad_token_id=None,
        initializer_range=options.spread / options.hidden**0.5,
    )  # fmt: skip
    with torch.device(options.device):
        model = Qwen3ForCausalLM(config).to(getattr(torch, options.dtype))
    return Target(model, name="random")


def runner(case: str, options: Options, shared: Any) -> Callable[[], Any]:
    """Returns what is measured of a case."""
    if options.part == "step":
        return whole_step(case, options, shared)
    return loss_stage(case, shared, options)


def counted_flops(case: str, options: Options) -> float:
    """Floating-point operations of the loss stage by hand, as if every expanded parent were another token.

    Heads: base logits forward, their gradient backward (the head is frozen), the target's logits. Corrections: forward,
    gradient of the latents, gradient of W2; on the path, and for the parents of the tree.
    """
    policy, _ = setting(case, options)
    rows = options.anchors * options.depths
    parents = options.anchors * sum(policy.expanded_per_depth(options.depths) or []) if case == "tree" else 0
    return 2.0 * options.vocab * (3 * rows * options.hidden + 3 * (rows + parents) * options.rank)


def prepared(options: Options) -> Any:
    """Returns what the cases share: the inputs of the loss stage, or the target."""
    torch.manual_seed(options.seed)
    return random_target(options) if options.part == "step" else random_inputs(options)
