"""Arms: the ways of decoding that a benchmark sets side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treespark.policies import Budgeted, Chain, TreePolicy, parse
from treespark.registry import unknown

if TYPE_CHECKING:
    from treespark.drafters import Drafter

MODES = ("plain", "chain", "tree")


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: plain, chain, tree, or the policy as it was written.
        policy: Tree policy; None decodes plainly.
        marked: Whether it is another policy than the one that the drafter was trained under.
    """

    name: str
    policy: TreePolicy | None = None
    marked: bool = False

    @property
    def description(self) -> str:
        """The policy as a call, `Budgeted(k=4, num_draft_nodes=32)`; empty for plain decoding."""
        if self.policy is None:
            return ""
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
    return [name for name in names if name]


def make_arms(
    drafter: Drafter,
    modes: str | Sequence[str] = MODES,
    policies: str | Sequence[str | TreePolicy] | None = None,
) -> list[Arm]:
    """Builds the arms of a benchmark.

    `tree` is the policy that was recorded with the drafter. For a drafter that was trained under the chain, or without
    a record, it is `Budgeted(k=4, num_draft_nodes=32)`, unless `policies` names other trees. Each entry of `policies`
    adds an arm, except where an arm has the same policy already.

    Args:
        drafter: The drafter.
        modes: Some of plain, chain and tree; a list or comma-separated.
        policies: Policies, as objects or as text.

    Raises:
        ValueError: For an unknown mode or policy, a policy out of range for the drafter, or no arm at all.
    """
    recorded = TreePolicy.from_config(drafter.recorded_policy) if drafter.recorded_policy else None
    entries: list[str | TreePolicy] = []
    for entry in [policies] if isinstance(policies, str) else policies or []:
        entries.extend([entry] if isinstance(entry, TreePolicy) else split_names(entry))
    wanted: list[tuple[str, TreePolicy | None]] = []
    for mode in split_names(modes):
        if mode == "plain":
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
    arms: list[Arm] = []
    for name, policy in wanted:
        config = None if policy is None else policy.config()
        if any(config == (None if arm.policy is None else arm.policy.config()) for arm in arms):
            continue
        if policy is not None:
            policy.check(drafter.block_size, drafter.spec.vocab_size)
        marked = policy is not None and recorded is not None and config != recorded.config()
        arms.append(Arm(name, policy, marked))
    if not arms:
        raise ValueError(f"Nothing to evaluate: no mode given. Choose among {', '.join(MODES)}.")
    return arms
