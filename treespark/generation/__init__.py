"""The target's own greedy answers for prompt files: what a drafter trains on and is validated with.

Answers come from a backend, in this process or from a server; files, progress and resuming are the same for all.
"""

from __future__ import annotations

from treespark.generation.backend import Answer, Backend, Prompt
from treespark.generation.command import generate
from treespark.generation.summary import GenerationSummary

__all__ = ["Answer", "Backend", "GenerationSummary", "Prompt", "generate"]
