"""What a training checkpoint holds besides weights: what decoding needs, and what a resume must agree with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treespark.drafters import Drafter
    from treespark.policies import TreePolicy

_RENDERING = ("chat_template_kwargs", "chat_template_sha256")


def make_record(
    drafter: Drafter, policy: TreePolicy, target_name: str, data: Any, provenance: dict[str, Any]
) -> dict[str, Any]:
    """Returns the entry `treespark` of a checkpoint.

    Args:
        drafter: The drafter, whose options and target's identity are recorded.
        policy: The tree policy of the training.
        target_name: The target, as the user calls it.
        data: The datamodule, whose chat template and its options are recorded where it has them.
        provenance: Versions, revision, arguments, hash of the data.
    """
    return {
        "drafter": drafter.config(),
        "policy": policy.config(),
        "target": target_name,
        "fingerprint": drafter.spec.fingerprint,
        "chat_template_kwargs": getattr(data, "chat_template_kwargs", {}),
        "chat_template_sha256": getattr(data, "chat_template_sha256", None),
        "provenance": provenance,
    }


def check_record(record: dict[str, Any], fingerprint: str, target_name: str, data: Any) -> None:
    """Refuses a checkpoint that does not belong to this target and data.

    Args:
        record: What `make_record` gave.
        fingerprint: Identity of the target.
        target_name: The target, as the user calls it.
        data: The datamodule.

    Raises:
        ValueError: When the recorded identity is not this target's, or prompts were rendered otherwise.
    """
    for key in _RENDERING:
        recorded = record.get(key)
        if recorded is not None and recorded != (now := getattr(data, key, recorded)):
            raise ValueError(
                f"The checkpoint was trained on prompts rendered with {key} {recorded}, the data has {now}: set "
                "data.chat_template_kwargs, or restore the template of the target's tokenizer."
            )
    recorded = record.get("fingerprint")
    if recorded != fingerprint:
        raise ValueError(
            f"The checkpoint was trained for another target (identity {str(recorded)[:12]}, here {fingerprint[:12]} of "
            f"'{target_name}'). Give the target it was trained for."
        )


def follow_options(
    schedulers: Iterable[dict[str, Any]], optimizers: Iterable[dict[str, Any]], learning_rate: float, **options: Any
) -> None:
    """Lets changed optimiser options apply after a resume: the configuration is the truth, the saved state follows.

    Where nothing changed, the factor is exactly 1 and the resume stays bitwise.

    Args:
        schedulers: Saved states of the learning rate's schedulers, changed in place.
        optimizers: Saved states of the optimisers, changed in place.
        learning_rate: The configured peak.
        options: The configured other options of each parameter group.
    """
    for state in schedulers:
        state["base_lrs"] = [learning_rate] * len(state["base_lrs"])
    for state in optimizers:
        for group in state["param_groups"]:
            group["lr"] *= learning_rate / group["initial_lr"]
            group |= {"initial_lr": learning_rate, **options}
