"""Which tree policy a drafter decodes under."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treespark.policies import TreePolicy

if TYPE_CHECKING:
    from treespark.drafters import Drafter


def default_policy(depths: int, vocab_size: int) -> TreePolicy:
    """Returns the reference tree, 4 children per parent and 32 nodes, made smaller where a drafter cannot fill it."""
    k = min(4, vocab_size)
    options = {"k": k, "num_draft_nodes": 1}
    per_depth = TreePolicy.from_config({"class_path": "Budgeted", "init_args": options}).expanded_per_depth(depths)
    assert per_depth is not None
    options["num_draft_nodes"] = min(32, k * sum(per_depth))
    policy = TreePolicy.from_config({"class_path": "Budgeted", "init_args": options})
    assert isinstance(policy, TreePolicy)
    return policy


def resolve_policy(
    drafter: Drafter, policy: TreePolicy | None = None, allow_other: bool = True
) -> tuple[TreePolicy, bool]:
    """Returns the policy to decode under, checked against the drafter, and whether it is the recorded one.

    Args:
        drafter: The drafter, with the policy that it was trained under where its checkpoint recorded one.
        policy: Another policy to use; None takes the recorded one, or else `default_policy`.
        allow_other: Whether it may differ from a recorded one.

    Raises:
        ValueError: When the policy's options are out of range for this drafter, or it is another than the recorded one
            and that is not allowed.
    """
    config = getattr(drafter, "recorded_policy", None)
    recorded = TreePolicy.from_config(config) if config else None
    chosen = policy or recorded or default_policy(drafter.block_size, drafter.spec.vocab_size)
    chosen.check(drafter.block_size, drafter.spec.vocab_size)
    same = recorded is not None and chosen.config() == recorded.config()
    if recorded is not None and not same and not allow_other:
        raise ValueError(
            f"The drafter was trained under {recorded!r}, but {chosen!r} is asked for. Leave the policy out, or set "
            "allow_other_policy to decode under another one on purpose; the result says so."
        )
    return chosen, same
