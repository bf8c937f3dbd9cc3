"""Where a run or a checkpoint comes from: versions, git revision, arguments, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("treespark", "torch", "lightning", "transformers", "tokenizers", "torchmetrics", "safetensors", "numpy")


def environment() -> dict[str, Any]:
    """Returns versions, the git revision of treespark's checkout and of the current folder, arguments and hardware.

    Neither the machine's name nor the user's is part of it.
    """
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "versions": versions(),
        "git": {"treespark": _revision(Path(__file__).parent, Path(__file__)), "working_folder": _revision(Path.cwd())},
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "accelerators": devices,
    }


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the packages that decide the numbers; None for a bare checkout's."""
    import torch

    # torch knows its build (+cpu, +cu130), which the package's metadata may leave out.
    exact = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return {name: _version(name) for name in _PACKAGES} | exact


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # used from a bare checkout
        return None


def _revision(folder: Path, tracked: Path | None = None) -> str | None:
    """The commit that a folder stands at, with "-dirty" if tracked files were changed; None outside a repository.

    Where `tracked` is not a file of that repository, the answer is None: an environment installed inside another
    project's checkout is no part of it.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if tracked is not None and git("ls-files", "--error-unmatch", str(tracked)) is None:
        return None
    sha = git("rev-parse", "HEAD")
    if not sha:
        return None
    return f"{sha}-dirty" if git("status", "--porcelain", "--untracked-files=no") else sha


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
