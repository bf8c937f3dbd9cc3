"""Arms: the ways of decoding that a benchmark sets side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treespark.policies import Budgeted, Chain, TreePolicy, parse
from treespark.registry import unknown

if TYPE_CHECKING:
    from treespark.drafters import Drafter

MODES = ("plain", "chain", "tree", "generate", "lookup")
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: The mode's name, or the policy as a call.
        policy: Tree policy; None decodes without a drafter.
        marked: Whether it is another policy than the one that the drafter was trained under.
        baseline: Without a policy: "plain" in our loop, or "generate" and "lookup" by `transformers`.
        lookup_tokens: Tokens that prompt lookup drafts at most.
    """

    name: str
    policy: TreePolicy | None = None
    marked: bool = False
    baseline: str = "plain"
    lookup_tokens: int = LOOKUP_TOKENS

    @property
    def kind(self) -> str:
        """One of policy, plain, generate and lookup."""
        return self.baseline if self.policy is None else "policy"

    @property
    def description(self) -> str:
        """The policy as a call, `Budgeted(k=4, num_draft_nodes=32)`, or what `transformers` does; else empty."""
        if self.policy is None:
            words = {
                "generate": "transformers",
                "lookup": f"transformers, prompt_lookup_num_tokens={self.lookup_tokens}",
            }
            return words.get(self.baseline, "")
        config = self.policy.config()
        options = ", ".join(f"{name}={value}" for name, value in config["init_args"].items() if value is not None)
        return f"{config['class_path']}({options})"


def split_names(text: str | Iterable[str]) -> list[str]:
    """Splits a comma-separated text, or each text of several, at commas outside of brackets.

    >>> split_names("Chain, Budgeted(k=4,num_draft_nodes=16)")
    ['Chain', 'Budgeted(k=4,num_draft_nodes=16)']
    """
    names: list[str] = []
    for item in [text] if isinstance(text, str) else text:
        level, start = 0, 0
        for index, sign in enumerate(item + ","):
            level += (sign in "([{") - (sign in ")]}")
            if sign == "," and level <= 0:
                names.append(item[start:index].strip())
                start = index + 1
        if level > 0:  # a bracket that nobody closed: whoever reads the name says so
            names.append(item[start:].strip())
    return [name for name in names if name]


def make_arms(
    drafter: Drafter,
    modes: str | Sequence[str] = MODES[:3],
    policies: str | Sequence[str | TreePolicy] | None = None,
    budgets: Sequence[int] = (),
    lookup_tokens: int = LOOKUP_TOKENS,
) -> list[Arm]:
    """Builds the arms of a benchmark.

    `tree` is the policy that was recorded with the drafter. For a drafter that was trained under the chain, or without
    a record, it is `Budgeted(k=4, num_draft_nodes=32)`, unless `policies` names other trees. Each entry of `policies`
    adds an arm, and so does each of `budgets` for every tree with a budget, except where an arm has the same policy
    already.

    Args:
        drafter: The drafter.
        modes: Some of plain, chain, tree, generate and lookup; a list or comma-separated.
        policies: Policies, as objects or as text.
        budgets: Values of num_draft_nodes.
        lookup_tokens: Tokens that prompt lookup drafts at most.

    Raises:
        ValueError: For an unknown mode or policy, a policy out of range for the drafter, no tree for the budgets, or no
            arm at all.
    """
    if lookup_tokens < 1:
        raise ValueError(f"lookup_tokens must be at least 1, got {lookup_tokens}.")
    recorded = TreePolicy.from_config(drafter.recorded_policy) if drafter.recorded_policy else None
    entries: list[str | TreePolicy] = []
    for entry in [policies] if isinstance(policies, str) else policies or []:
        entries.extend([entry] if isinstance(entry, TreePolicy) else split_names(entry))
    wanted: list[tuple[str, TreePolicy | None]] = []
    for mode in split_names(modes):
        if mode in ("plain", "generate", "lookup"):
            wanted.append((mode, None))
        elif mode == "chain":
            wanted.append((mode, Chain()))
        elif mode != "tree":
            raise unknown("mode", mode, MODES)
        elif recorded is not None and not isinstance(recorded, Chain):
            wanted.append((mode, recorded))
        elif not entries:
            wanted.append((mode, Budgeted(k=4, num_draft_nodes=32)))
    for entry in entries:
        named = parse(entry) if isinstance(entry, str) else entry
        wanted.append((Arm("", named).description, named))
    wanted += [("", policy) for policy in _sweep([policy for _, policy in wanted if policy is not None], budgets)]
    arms: list[Arm] = []
    for name, policy in wanted:
        if policy is None:
            if name not in [arm.name for arm in arms]:
                arms.append(Arm(name, baseline=name, lookup_tokens=lookup_tokens))
            continue
        config = policy.config()
        if any(arm.policy is not None and config == arm.policy.config() for arm in arms):
            continue
        policy.check(drafter.block_size, drafter.spec.vocab_size)
        marked = recorded is not None and config != recorded.config()
        arms.append(Arm(name or Arm("", policy).description, policy, marked))
    if not arms:
        raise ValueError(f"Nothing to evaluate: no mode given. Choose among {', '.join(MODES)}.")
    return arms


def _sweep(policies: Sequence[TreePolicy], budgets: Sequence[int]) -> list[TreePolicy]:
    """Returns every policy that has a budget under each of the budgets."""
    found: list[TreePolicy] = []
    for policy in policies:
        config = policy.config()
        if "num_draft_nodes" not in config["init_args"]:
            continue
        for budget in budgets:
            options = config["init_args"] | {"num_draft_nodes": budget}
            found.append(TreePolicy.from_config({"class_path": config["class_path"], "init_args": options}))
    if budgets and not found:
        raise ValueError("budgets needs a tree with num_draft_nodes: add tree to --modes, or a policy to --policies.")
    return found
