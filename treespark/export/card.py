"""The model card of an exported drafter: README.md."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treespark.drafters import DSparkDrafter

_LONGEST_RECIPE = 20_000  # characters


def model_card(
    drafter: DSparkDrafter,
    policy: dict[str, Any] | None,
    extra: dict[str, Any],
    *,
    recipe: str | None = None,
    results: dict[str, Any] | None = None,
) -> str:
    """Returns the text of a card.

    Args:
        drafter: The drafter.
        policy: Config of the tree policy that it was trained under.
        extra: Further fields of its config.json: provenance, chat template options.
        recipe: The resolved configuration of its training (YAML).
        results: A results file of `treespark bench`.
    """
    provenance = extra.get("provenance") or {}
    revision = (provenance.get("git") or {}).get("treespark") or "unknown"
    spec, options = drafter.spec, drafter.config()["init_args"]
    facts = {
        "Target": f"`{spec.name or 'unknown'}` ({spec.model_type}, {spec.num_layers or '?'} layers, hidden size "
        f"{spec.hidden_size}, vocabulary {spec.vocab_size})",
        "Target identity": f"`{spec.fingerprint or 'unknown'}` (SHA-256 of sizes and output embedding)",
        "Drafted depths": f"{drafter.block_size}; slot j predicts the token at anchor + "
        f"{'j + 1' if drafter.sample_from_anchor else 'j'}",
        "Tree policy": f"`{_call(policy)}`" if policy else "none recorded",
        "Chat template options": f"`{extra.get('chat_template_kwargs') or {}}`",
        "Training data": f"SHA-256 `{provenance.get('data_hash') or 'unknown'}`",
        "Code": f"treespark {_version(provenance)}, git `{revision}`",
        "Trained with": f"`{_command(provenance)}`",
    }
    lines = [
        "---",
        "library_name: treespark",
        *([f"base_model: {spec.name}"] if spec.name.count("/") == 1 and not spec.name.startswith((".", "/")) else []),
        "tags: [speculative-decoding, draft-model, dspark]",
        "---",
        f"# Drafter for {spec.name or 'an unknown target'}",
        "",
        "A draft model for speculative decoding; it is of use with its target only.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in facts.items()),
        "",
        "Options: `" + ", ".join(f"{name}={value}" for name, value in options.items() if value is not None) + "`",
        "",
        "## Measured acceptance",
        "",
        *_measured(results),
    ]
    if recipe:
        cut = "" if len(recipe) <= _LONGEST_RECIPE else "\n# (cut)"
        lines += ["", "## Recipe", "", "```yaml", recipe[:_LONGEST_RECIPE].rstrip() + cut, "```"]
    return "\n".join(lines) + "\n"


def _measured(results: dict[str, Any] | None) -> list[str]:
    if results is None:
        return [
            "Not measured for this export. Measure it with "
            "`treespark bench --drafter THIS_FOLDER --suites PROMPTS.jsonl --output results.json`.",
        ]
    marked = {arm["name"] for arm in results.get("arms", []) if arm.get("marked")}
    rows = [
        f"| {item['suite'] or 'all'} | {item['arm']}{' *' if item['arm'] in marked else ''} | {item['tau']:.3f} |"
        for item in results["summaries"]
        if item.get("tau") is not None and item["arm"] != "plain"
    ]
    lines = [
        "| suite | decoding | tau |",
        "|---|---|---|",
        *rows,
        "",
        "tau: committed tokens per round, bonus included.",
    ]
    if marked:
        lines.append("\\* another policy than the one that the drafter was trained under.")
    command = results.get("argv")
    return [*lines, "", f"Command: `{shlex.join(map(str, command)) if command else 'not recorded'}`"]


def _call(config: dict[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in (config.get("init_args") or {}).items() if value is not None)
    return f"{config.get('class_path')}({options})"


def _version(provenance: dict[str, Any]) -> str:
    return str((provenance.get("versions") or {}).get("treespark", "unknown"))


def _command(provenance: dict[str, Any]) -> str:
    argv = provenance.get("argv")
    return shlex.join(map(str, argv)) if argv else "unknown"
