"""Who may import whom: strictly lower floors only, and heavy libraries only in their rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "treespark"

FLOORS: list[set[str]] = [
    {"registry", "tree", "selection", "cost", "environment", "workspace"},
    {"policies", "target", "distributions"},
    {"drafters", "features", "replay"},
    {"blocks"},
    {"losses", "metrics"},
    {"checkpoint", "data", "decoding", "export", "tracking", "objective", "sharding", "vocabulary"},
    {"bench", "generation"},
    {"module"},
    {"doctor"},
    {"cli", "commands", "__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ONLY_IN = {
    "transformers": {"target", "drafters", "data", "export", "generation"},
    "lightning": {"data", "module", "tracking", "commands", "sharding"},
    "mlflow": {"tracking"},
}


def room_of(file: Path) -> str:
    part = file.relative_to(PACKAGE).parts[0]
    return part.removesuffix(".py")


def imports(file: Path) -> Iterator[tuple[int, str, set[str]]]:
    """Line, module, and imported names of each import statement, wherever it stands in the file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, set()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            yield node.lineno, node.module or "", {alias.name for alias in node.names}


def faults(file: Path) -> Iterator[str]:
    room = room_of(file)
    for line, module, names in imports(file):
        place = f"{file.relative_to(PACKAGE.parent)}:{line}"
        top = module.partition(".")[0]
        if room not in ONLY_IN.get(top, {room}):
            yield f"{place}: {top} is imported in {sorted(ONLY_IN[top])} only"
        if FLOOR[room] == 0 and top not in sys.stdlib_module_names | {"torch", "typing_extensions", "treespark"}:
            yield f"{place}: floor 0 needs torch and the standard library only"
        if top != "treespark":
            continue
        others = {module.split(".")[1]} if "." in module else names & FLOOR.keys()
        for other in others - {room}:
            same_command = FLOOR[room] == FLOOR[other] == len(FLOORS) - 1
            if FLOOR[other] >= FLOOR[room] and not same_command:
                yield f"{place}: {room} (floor {FLOOR[room]}) imports {other} (floor {FLOOR[other]})"
            if {room, other} <= {"losses", "policies", "metrics"}:
                yield f"{place}: losses, policies and metrics do not know each other"
        if room == "decoding" and module.startswith("treespark.policies") and names != {"TreePolicy"}:
            yield f"{place}: decoding knows TreePolicy, no concrete policy"


FILES = [
    file for file in sorted(PACKAGE.glob("**/*.py")) + sorted(PACKAGE.glob("*/*.py")) if file != PACKAGE / "__init__.py"
]


@pytest.mark.parametrize("file", sorted(set(FILES)), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_rooms_import_lower_floors_only(file: Path) -> None:
    """Every import of every file, also those inside functions."""
    assert list(faults(file)) == []


def test_all_rooms_have_a_floor() -> None:
    """The linked rooms losses and policies are seen too."""
    rooms = {room_of(file) for file in FILES}
    assert rooms <= FLOOR.keys()
    assert {"losses", "policies", "tree", "cli"} <= rooms


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import treespark", ["torch"]),
        ("from treespark.cli import dispatch; dispatch(['--help'])", ["torch"]),
        (
            "from treespark.cli import dispatch; dispatch(['list'])",
            ["lightning", "transformers", "mlflow", "matplotlib"],
        ),
        ("import treespark.decoding, treespark.losses, treespark.bench", ["lightning", "transformers"]),
    ],
)
def test_imports_stay_cheap(code: str, absent: list[str]) -> None:
    """A fresh interpreter has not loaded the heavy libraries."""
    check = f"import sys; {code}; sys.exit(' '.join(name for name in {absent} if name in sys.modules) or None)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["losses", "policies"])
def test_linked_rooms_have_one_name(name: str) -> None:
    """`import losses` from the repository's root would register every loss a second time."""
    done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode != 0
    assert f"treespark.{name}" in done.stderr
