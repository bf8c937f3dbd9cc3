"""What a benchmark measured, prompt by prompt, and the JSON file that it is kept in."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

if TYPE_CHECKING:
    from treespark.bench.statistics import Interval
    from treespark.bench.summary import Summary

FORMAT = 1
"""Version of the JSON layout; raised when a field changes its meaning."""

TAU_WARNING_ROUNDS = 20


@dataclass(frozen=True)
class Trial:
    """One prompt under one arm.

    Attributes:
        num_tokens: New tokens, the prefill's one included.
        finish_reason: "stop" or "length".
        num_accepted: Accepted draft tokens of each round, the bonus left out.
        committed: Committed tokens of each round, the bonus included.
        timing: Seconds by name (prefill, draft, build, verify, commit, decode); empty for simulated rounds.
        identical: Whether the tokens are plain decoding's; None where that was not compared.
        num_compared: Tokens compared, up to and with the first difference.
    """

    num_tokens: int
    finish_reason: str
    num_accepted: list[int]
    committed: list[int]
    timing: dict[str, float] = field(default_factory=dict)
    identical: bool | None = None
    num_compared: int = 0


@dataclass(frozen=True)
class PromptTrials:
    """One prompt under every arm.

    Attributes:
        suite: Name of its suite.
        index: Its place in the suite, from 0.
        id: The line's id.
        num_prompt_tokens: Length of the prompt.
        trials: By name of the arm.
    """

    suite: str
    index: int
    id: str
    num_prompt_tokens: int
    trials: dict[str, Trial]


@dataclass(frozen=True)
class Difference:
    """The first token of an output that is not plain decoding's.

    Attributes:
        suite: Name of the suite.
        index: The prompt's place in it.
        id: The prompt's id.
        arm: Name of the arm.
        position: Index of the token in the answer.
        gap: Plain decoding's best minus second best logit there; None where one output ended and the other went on.
        near_tie: Whether that gap is so small that rounding may decide.
    """

    suite: str
    index: int
    id: str
    arm: str
    position: int
    gap: float | None
    near_tie: bool


@dataclass
class Results:
    """All of a benchmark's records and what they were measured with; tables and intervals are computed from them.

    Attributes:
        arms: Each with name, policy (config or None), description and marked (another policy than the recorded one).
        suites: Each with name, path, sha256 and num_prompts.
        depths: K of the drafter.
        seed: Of the resampling.
        simulated: Whether rounds were simulated on the target's own answers; then nothing was timed.
        dtype: Of target and drafter.
        prompts: The records.
        differences: Outputs that are not plain decoding's.
        complete: False when the run was interrupted.
        settings: Options of the run.
        target: The target's name and identity.
        drafter: The drafter's path, options, recorded policy, and the SHA-256 of its tensors.
        argv: The command.
        versions: Of Python and of the libraries.
        git: Revisions of this framework's checkout and of the working folder, where they are under version control.
        hardware: Device, processor, accelerators, threads.
    """

    arms: list[dict[str, Any]]
    suites: list[dict[str, Any]]
    depths: int
    seed: int = 0
    simulated: bool = False
    dtype: str = "float32"
    prompts: list[PromptTrials] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    complete: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)
    git: dict[str, str | None] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)

    @property
    def arm_names(self) -> list[str]:
        """Names of the arms, in order."""
        return [arm["name"] for arm in self.arms]

    @property
    def suite_names(self) -> list[str]:
        """Names of the suites that hold a record, in order."""
        with_records = {prompt.suite for prompt in self.prompts}
        return [suite["name"] for suite in self.suites if suite["name"] in with_records]

    @property
    def baseline(self) -> str | None:
        """Name of the arm that decodes plainly, or None."""
        return next((arm["name"] for arm in self.arms if arm["policy"] is None), None)

    def select(self, suite: str | None = None) -> list[PromptTrials]:
        """Returns the records of a suite, or all of them."""
        return [prompt for prompt in self.prompts if suite is None or prompt.suite == suite]

    def summary(self, arm: str, suite: str | None = None) -> Summary:
        """Returns what an arm reached on a suite, or on all prompts pooled.

        Raises:
            ValueError: For an unknown arm or suite.
        """
        from treespark.bench.summary import summarise
        from treespark.registry import unknown

        if arm not in self.arm_names:
            raise unknown("arm", arm, self.arm_names)
        if suite is not None and suite not in self.suite_names:
            raise unknown("suite", suite, self.suite_names)
        return summarise(self.select(suite), arm, self.depths, self.baseline, suite)

    def intervals(self, suite: str | None = None) -> dict[str, Interval]:
        """Returns the paired comparisons by name ("tau tree/chain", "speed tree/plain"); see `paired_ratio`."""
        from treespark.bench.summary import compare

        return compare(self.select(suite), self.arm_names, self.baseline, self.simulated, self.seed)

    # The verdict on the outputs -------------------------------------------------------------------------------------

    @property
    def judged(self) -> bool:
        """Whether outputs were compared in a precision where they must be the same but for near-ties."""
        return self.num_compared_tokens > 0 and self.dtype in ("float32", "float64")

    @property
    def num_compared_tokens(self) -> int:
        """Tokens compared with plain decoding's, over all arms."""
        return sum(trial.num_compared for prompt in self.prompts for trial in prompt.trials.values())

    @property
    def allowed_differences(self) -> float:
        """Outputs that may leave plain decoding's text at a near-tie: one, or one in 10,000 compared tokens."""
        return 0 if self.dtype == "float64" else max(1, self.num_compared_tokens / 10_000)

    @property
    def ok(self) -> bool:
        """False when outputs differ from plain decoding's other than by a few near-ties."""
        if not self.judged:
            return True
        few = len(self.differences) <= self.allowed_differences
        return few and all(difference.near_tie for difference in self.differences)

    @property
    def exit_code(self) -> int:
        """For the command line: 1 when outputs are wrong, 130 when interrupted, else 0."""
        return 1 if not self.ok else 0 if self.complete else 130

    def warnings(self) -> list[str]:
        """Returns what a reader must know before trusting the numbers."""
        messages = []
        for arm in self.arms:
            if arm["policy"] is None or not self.prompts:
                continue
            summary = self.summary(arm["name"])
            if summary.num_rounds >= TAU_WARNING_ROUNDS and summary.tau == 1.0:
                messages.append(
                    f"{arm['name']}: tau is exactly 1.0 over {summary.num_rounds} rounds, not one drafted token was "
                    "accepted. Probably the checkpoint's slot layout (sample_from_anchor), its tapped layers or its "
                    "target is another one, or the drafter is untrained."
                )
        if self.num_compared_tokens and not self.judged:
            messages.append(
                f"In {self.dtype} rounding decides between close tokens, so outputs are counted but not judged; use "
                "float32 to check that they are plain decoding's."
            )
        if not self.complete:
            messages.append(f"Interrupted: {len(self.prompts)} prompts were evaluated.")
        return messages

    # Files ----------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Returns the records with the tables and intervals computed from them, as JSON takes them (nan: None)."""
        places: list[str | None] = [*self.suite_names, None]
        record: dict[str, Any] = {"format": FORMAT}
        record |= {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "prompts"}
        record["summaries"] = [self.summary(arm, suite) for suite in places for arm in self.arm_names]
        record["intervals"] = [
            {"suite": suite, "comparison": name} | dataclasses.asdict(interval)
            for suite in places
            for name, interval in self.intervals(suite).items()
        ]
        record["outputs"] = {
            "judged": self.judged,
            "ok": self.ok,
            "num_compared_tokens": self.num_compared_tokens,
            "num_differences": len(self.differences),
            "allowed_differences": self.allowed_differences,
        }
        record["warnings"] = self.warnings()
        record["prompts"] = self.prompts
        plain: dict[str, Any] = _plain(record)
        return plain

    def save(self, path: str | Path) -> None:
        """Writes the JSON file atomically: a reader finds the former file or the new one, never a part."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        record = self.to_dict()
        # One line for each prompt: its lists of counts would otherwise fill a screen.
        lines = [json.dumps(prompt, allow_nan=False) for prompt in record.pop("prompts")]
        head = json.dumps(record, indent=1, allow_nan=False).removesuffix("\n}")
        text = head + ',\n "prompts": [\n  ' + ",\n  ".join(lines) + "\n ]\n}"
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text + "\n")
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads the file that `save` wrote.

        Raises:
            FileNotFoundError: When there is no such file.
            ValueError: When it holds something else, or another version of the layout.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON ({error}); expected a file of `treespark bench`.") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            found = record.get("format") if isinstance(record, dict) else None
            raise ValueError(f"{path}: expected a file of `treespark bench` with format {FORMAT}, got {found}.")
        fields = {item.name: record[item.name] for item in dataclasses.fields(cls) if item.name in record}
        fields["differences"] = [Difference(**item) for item in record["differences"]]
        fields["prompts"] = [
            PromptTrials(**item | {"trials": {arm: Trial(**trial) for arm, trial in item["trials"].items()}})
            for item in record["prompts"]
        ]
        return cls(**fields)


def _plain(value: Any) -> Any:
    """Turns dataclasses, tuples and numbers into what JSON holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
