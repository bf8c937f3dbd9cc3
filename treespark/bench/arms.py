"""Arms: the ways of decoding that a benchmark sets side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treespark.policies import Budgeted, Chain, TreePolicy, parse
from treespark.registry import unknown

if TYPE_CHECKING:
    from treespark.drafters import Drafter

MODES = ("plain", "chain", "tree", "recorded", "generate", "lookup")
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: The mode's name, or the policy as a call; behind the drafter's name where several are compared.
        policy: Tree policy; None decodes without a drafter.
        marked: Whether it is another policy than the one that the drafter was trained under.
        baseline: Without a policy: "plain" in our loop, or "generate" and "lookup" by `transformers`.
        lookup_tokens: Tokens that prompt lookup drafts at most.
        drafter: Name of its drafter among several; empty for the only one, and without a policy.
    """

    name: str
    policy: TreePolicy | None = None
    marked: bool = False
    baseline: str = "plain"
    lookup_tokens: int = LOOKUP_TOKENS
    drafter: str = ""

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
        return policy_name(self.policy.config())


def policy_name(policy: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """Returns a policy's configuration as a call, leaving out options that are None, or named in `without`.

    >>> policy_name({"class_path": "Budgeted", "init_args": {"k": 4, "num_draft_nodes": 32}}, ["k"])
    'Budgeted(num_draft_nodes=32)'
    """
    options = {name: value for name, value in policy["init_args"].items() if value is not None and name not in without}
    return f"{policy['class_path']}({', '.join(f'{name}={value}' for name, value in options.items())})"


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
    drafter: Drafter | Mapping[str, Drafter],
    modes: str | Sequence[str] = MODES[:3],
    policies: str | Sequence[str | TreePolicy] | None = None,
    budgets: Sequence[int] = (),
    lookup_tokens: int = LOOKUP_TOKENS,
) -> list[Arm]:
    """Builds the arms of a benchmark.

    `tree` is the policy that was recorded with the drafter. For a drafter that was trained under the chain, or without
    a record, it is `Budgeted(k=4, num_draft_nodes=32)`, unless `policies` names other trees. `recorded` is the recorded
    policy, tree or chain. Each entry of `policies` adds an arm, and so does each of `budgets` for every tree with a
    budget, except where an arm of the drafter has the same policy already.

    Args:
        drafter: The drafter, or several by their names; then each has its arms, called `name/tree` and so on.
        modes: Some of plain, chain, tree, recorded, generate and lookup; a list or comma-separated.
        policies: Policies, as objects or as text.
        budgets: Values of num_draft_nodes.
        lookup_tokens: Tokens that prompt lookup drafts at most.

    Raises:
        ValueError: For an unknown mode or policy, a policy out of range for the drafter, `recorded` for a drafter
            without a record, no tree for the budgets, or no arm at all.
    """
    if lookup_tokens < 1:
        raise ValueError(f"lookup_tokens must be at least 1, got {lookup_tokens}.")
    entries: list[str | TreePolicy] = []
    for entry in [policies] if isinstance(policies, str) else policies or []:
        entries.extend([entry] if isinstance(entry, TreePolicy) else split_names(entry))
    words = list(dict.fromkeys(split_names(modes)))
    for word in words:
        if word not in MODES:
            raise unknown("mode", word, MODES)
    without = [word for word in words if word in ("plain", "generate", "lookup")]
    arms = [Arm(word, baseline=word, lookup_tokens=lookup_tokens) for word in without]
    drafted = [word for word in words if word not in without]
    several = drafter if isinstance(drafter, Mapping) else {"": drafter}
    for name, item in several.items():
        arms += _drafted_arms(name, item, drafted, entries, budgets)
    if budgets and not any("num_draft_nodes" in _options(arm.policy) for arm in arms if arm.policy is not None):
        raise ValueError("budgets needs a tree with num_draft_nodes: add tree to --modes, or a policy to --policies.")
    # Those of a single drafter as the modes were named; else what has no drafter comes first.
    arms.sort(key=lambda arm: words.index(arm.name) if arm.name in words else len(words))
    if not arms:
        raise ValueError(f"Nothing to evaluate: no mode given. Choose among {', '.join(MODES)}.")
    return arms


def _drafted_arms(
    name: str, drafter: Drafter, modes: Sequence[str], entries: Sequence[str | TreePolicy], budgets: Sequence[int]
) -> list[Arm]:
    """Returns the arms of one drafter."""
    recorded = TreePolicy.from_config(drafter.recorded_policy) if drafter.recorded_policy else None
    wanted: list[tuple[str, TreePolicy]] = []
    for mode in modes:
        if mode == "chain":
            wanted.append((mode, Chain()))
        elif mode == "recorded":
            if recorded is None:
                raise ValueError(
                    f"No policy is recorded with {f'the drafter {name!r}' if name else 'this drafter'}: name chain, "
                    "tree or --policies in the place of recorded."
                )
            wanted.append((mode, recorded))
        elif recorded is not None and not isinstance(recorded, Chain):
            wanted.append((mode, recorded))
        elif not entries:
            wanted.append((mode, Budgeted(k=4, num_draft_nodes=32)))
    for entry in entries:
        named = parse(entry) if isinstance(entry, str) else entry
        wanted.append((Arm("", named).description, named))
    for policy in _sweep([policy for _, policy in wanted], budgets):
        wanted.append((Arm("", policy).description, policy))
    arms: list[Arm] = []
    for label, policy in wanted:
        if any(arm.policy is not None and policy.config() == arm.policy.config() for arm in arms):
            continue
        policy.check(drafter.block_size, drafter.spec.vocab_size)
        marked = recorded is not None and policy.config() != recorded.config()
        arms.append(Arm(f"{name}/{label}" if name else label, policy, marked, drafter=name))
    return arms


def _options(policy: TreePolicy) -> dict[str, Any]:
    options: dict[str, Any] = policy.config()["init_args"]
    return options


def _sweep(policies: Sequence[TreePolicy], budgets: Sequence[int]) -> list[TreePolicy]:
    """Returns every policy that has a budget under each of the budgets."""
    found: list[TreePolicy] = []
    for policy in policies:
        if "num_draft_nodes" in _options(policy):
            for budget in budgets:
                config = {
                    "class_path": policy.config()["class_path"],
                    "init_args": _options(policy) | {"num_draft_nodes": budget},
                }
                found.append(TreePolicy.from_config(config))
    return found
