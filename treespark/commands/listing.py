"""`treespark list`: what is registered, one line each."""

from __future__ import annotations

import inspect

from treespark.registry import unknown

KINDS = ("losses", "policies", "drafters", "formats")


def run(name: str, argv: list[str]) -> None:
    """Prints the registered classes of the named kinds, or of all."""
    if any(word in ("-h", "--help") for word in argv):
        print(f"usage: treespark {name} [{'|'.join(KINDS)}]\n")
        print("Registered classes, one line each; without a name all of them.")
        return
    for word in argv:
        if word not in KINDS:
            raise unknown("kind", word, KINDS)
    wanted = argv or list(KINDS)
    for kind in wanted:
        classes = _classes(kind)
        width = max(map(len, classes), default=0)
        if len(wanted) > 1:
            print(f"{kind}:")
        for class_name, item in classes.items():
            summary = (inspect.getdoc(item) or "").partition("\n")[0]
            print(f"{'  ' if len(wanted) > 1 else ''}{class_name:<{width}}  {summary}")


def _classes(kind: str) -> dict[str, type]:
    """The concrete classes of a kind by name; imports no other kind than needed."""
    if kind == "losses":
        from treespark.losses import LossTerm

        return dict(LossTerm.available())
    if kind == "policies":
        from treespark.policies import TreePolicy

        return dict(TreePolicy.available())
    if kind == "formats":
        from treespark.drafters import CheckpointFormat
        from treespark.registry import load_formats

        load_formats()
        return {item.name or name: item for name, item in CheckpointFormat.available().items()}
    from treespark.drafters import Drafter

    return dict(Drafter.available())
