"""What a newcomer reads is true: the README's map, its commands, the links, the pins."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def mapped() -> set[str]:
    """The paths that the README's map names."""
    block = README.split("## The map", 1)[1].split("```")[1]
    paths, folder = set(), ""
    for line in block.strip().splitlines():
        if line.startswith("   "):
            continue  # a description goes on
        name = line.split()[0]
        folder = "" if not line.startswith(" ") else folder
        paths.add((folder + name).rstrip("/"))
        folder = name if not line.startswith(" ") else folder
    return paths


def test_the_map_is_the_tree() -> None:
    """Each folder and each module of the package has its line, and no line names what is not there."""
    rooms = {f"treespark/{p.name}" for p in (ROOT / "treespark").iterdir() if p.suffix == ".py" or p.is_dir()}
    rooms -= {f"treespark/{name}" for name in ("__init__.py", "__pycache__", "losses", "policies")}
    folders = {"losses", "policies", "recipes", "tools", "benchmarks", "docs", "tests", "treespark", "studies"}
    assert mapped() == rooms | folders
    assert all((ROOT / path).exists() for path in mapped())


@pytest.mark.parametrize(
    "document",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md", "studies/smollm2/README.md", *DOCUMENTS],
)
def test_documents_name_files_that_are_there(document: str) -> None:
    """Every relative link, and every file in backquotes with a folder of ours in front."""
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:tests|studies|recipes|losses|policies|tools|benchmarks|treespark)/[\w./]+\.\w+)`", text)
    missing = [link for link in links if not ((ROOT / document).parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def code_blocks(text: str, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_documented_subcommands_exist() -> None:
    """`treespark WORD` in a code block is a subcommand, and the README shows all that matter."""
    from treespark.cli import COMMANDS

    shown = re.findall(r"^treespark (\w+)", "\n".join(code_blocks(README)), flags=re.MULTILINE)
    assert set(shown) == COMMANDS.keys() - {"validate"}


def test_the_readmes_loss_works() -> None:
    """The example is a loss as it stands; in a process of its own, since it registers."""
    (example,) = [block for block in code_blocks(README, "python") if block.startswith("# my_module.py")]
    check = "from treespark.losses import LossTerm; assert LossTerm.get('Squared')(coefficient=0.5).gamma == 4.0"
    done = subprocess.run([sys.executable, "-c", f"{example}\n{check}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_guides_policy_works() -> None:
    """The variant in CONTRIBUTING.md keeps its option and builds the parent's trees, eight children wide."""
    (example,) = code_blocks((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "python")
    check = "policy = Wide(5); assert policy.config()['init_args'] == {'num_draft_nodes': 5} and policy.k == 8"
    done = subprocess.run([sys.executable, "-c", f"{example}\n{check}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_linked_rooms_are_relative_links() -> None:
    """Losses and policies stand at the top and are imported through the package."""
    for name in ("losses", "policies"):
        link = ROOT / "treespark" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_every_dependency_is_pinned_and_explained() -> None:
    """Each range of pyproject.toml says who needs it, and constraints.txt pins what is tested."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("dependencies = [", 1)[1].split("[project.scripts]")[0]
    entries = re.findall(r'^    "([A-Za-z0-9-]+)[^"]*",(.*)$', section, flags=re.MULTILINE)
    assert len(entries) > 15
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    for name, comment in entries:
        assert re.search(r"# \w", comment), f"{name}: who needs it?"
        assert f"\n{name.lower()}==" in pins, f"{name} is not pinned"


def test_files_stay_short() -> None:
    """A file that passes 400 lines is two files."""
    done = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split() if (ROOT / name).is_file()]
    assert [file.name for file in files if len(file.read_text(encoding="utf-8").splitlines()) > 400] == []
