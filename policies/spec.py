"""Tree policies written as calls, for command lines: `Budgeted(k=4, num_draft_nodes=16)`."""

from __future__ import annotations

import ast
import typing
from typing import Any

from treespark.policies.base import TreePolicy


def parse(text: str) -> TreePolicy:
    """Builds the policy that `text` names, such as `Chain` or `Budgeted(k=4, num_draft_nodes=16)`.

    Raises:
        ValueError: When the text is not a name or a call with literal keyword options, or names an unknown policy.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("options are given by name")
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        name = ast.unparse(call.func)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"Cannot read the policy '{text}': expected a name or a call with named options, such as "
            f"Budgeted(k=4, num_draft_nodes=16), and texts in quotes ({error})."
        ) from error
    found = TreePolicy.get(name)
    hints = typing.get_type_hints(found.__init__)
    for key, value in options.items():
        if key in hints and not _fits(value, hints[key]):
            raise ValueError(f"The policy '{text}': {key} must be of type {_type_name(hints[key])}, got {value!r}.")
    return TreePolicy.from_config({"class_path": name, "init_args": options})


def _fits(value: Any, hint: Any) -> bool:
    """Whether a literal is of a type, or one of several; a whole number is a float too. Other hints take anything."""
    kinds = typing.get_args(hint) or (hint,)
    if not all(isinstance(kind, type) for kind in kinds):
        return True
    return type(value) in kinds or (type(value) is int and float in kinds)


def _type_name(hint: Any) -> str:
    return getattr(hint, "__name__", None) or str(hint)
