"""Tree policies written as calls, for command lines: `Budgeted(k=4, num_draft_nodes=16)`."""

from __future__ import annotations

import ast

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
            f"Budgeted(k=4, num_draft_nodes=16) ({error})."
        ) from error
    return TreePolicy.from_config({"class_path": name, "init_args": options})
