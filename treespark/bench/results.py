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

from treespark.bench.records import Difference, Miss, PromptTrials, Trial

if TYPE_CHECKING:
    from treespark.bench.statistics import Interval
    from treespark.bench.summary import Summary

FORMAT = 3
"""Version of the JSON layout; raised when a field changes its meaning."""

TAU_WARNING_ROUNDS = 20

# Settings that decide what is recorded.
_DECIDING = ("max_new_tokens", "warmup", "batch_sizes", "repeats", "also_simulate", "chat_template_kwargs")


@dataclass
class Results:
    """All of a benchmark's records and what they were measured with; tables and intervals are computed from them.

    Attributes:
        arms: Each with name, kind, policy (config or None), description, marked (another policy than the recorded
            one) and drafter (its name among several).
        suites: Each with name, category, path, sha256 and num_prompts.
        depths: K of the drafter.
        seed: Of the resampling.
        simulated: Whether rounds were simulated on the target's own answers; then nothing was timed.
        dtype: Of target and drafter.
        prompts: The records.
        differences: Outputs that are not plain decoding's, in float32 and float64.
        misses: Outputs that are not the target's own, in bfloat16 and float16.
        complete: False when the run was interrupted.
        settings: Options of the run.
        target: The target's name and identity.
        drafters: By name (empty for a single one) each drafter's path, options, recorded policy, and the SHA-256 of
            its tensors.
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
    misses: list[Miss] = field(default_factory=list)
    complete: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    drafters: dict[str, dict[str, Any]] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)
    git: dict[str, str | None] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)

    @property
    def drafter(self) -> dict[str, Any]:
        """The only drafter, or the first of several."""
        return next(iter(self.drafters.values()), {})

    @property
    def drafter_label(self) -> str:
        """The drafters in a line: name and place of each."""
        places = {
            name: str(item.get("path") or item.get("config", {}).get("class_path", ""))
            for name, item in self.drafters.items()
        }
        return ", ".join(f"{name}={place}" if name else place for name, place in places.items())

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
    def categories(self) -> list[str]:
        """Categories of these suites, in order, where there are several."""
        found = {suite["category"]: None for suite in self.suites if suite["name"] in self.suite_names}
        return list(found) if len(found) > 1 else []

    @property
    def batch_sizes(self) -> list[int]:
        """Numbers of requests side by side, in order."""
        return list(self.settings.get("batch_sizes", [1]))

    @property
    def baseline(self) -> str | None:
        """Name of the arm that decodes plainly in our loop, or None."""
        return next((arm["name"] for arm in self.arms if arm["kind"] == "plain"), None)

    def suites_of(self, category: str = "") -> list[str]:
        """Names of the suites of a category that hold a record; of all for the empty one."""
        wanted = [suite["name"] for suite in self.suites if category in ("", suite["category"])]
        return [name for name in self.suite_names if name in wanted]

    def has(self, arm: str, batch_size: int) -> bool:
        """Whether an arm was decoded with so many requests side by side."""
        return any(arm in prompt.trials for prompt in self.prompts if prompt.batch_size == batch_size)

    def select(self, suite: str | None = None, batch_size: int | None = None) -> list[PromptTrials]:
        """Returns the records of a suite and a batch size, or of all."""
        return [
            prompt
            for prompt in self.prompts
            if suite in (None, prompt.suite) and batch_size in (None, prompt.batch_size)
        ]

    def summary(self, arm: str, suite: str | None = None, category: str = "", batch_size: int | None = None) -> Summary:
        """Returns what an arm reached on a suite, or the unweighted mean over the suites of a category.

        Args:
            arm: Name of the arm.
            suite: Name of the suite; None for the mean.
            category: Category of the suites; empty takes all.
            batch_size: Requests side by side; None takes the first.

        Raises:
            ValueError: For an unknown arm or suite, or where nothing was evaluated.
        """
        from treespark.bench.summary import mean_over_suites, summarise
        from treespark.registry import unknown

        if arm not in self.arm_names:
            raise unknown("arm", arm, self.arm_names)
        if suite is not None and suite not in self.suite_names:
            raise unknown("suite", suite, self.suite_names)
        size = self.batch_sizes[0] if batch_size is None else batch_size
        names = self.suites_of(category) if suite is None else [suite]
        if not names:
            raise ValueError(f"Nothing was evaluated in the category '{category}'.")
        kinds = {item["name"]: item["category"] for item in self.suites}
        found = [
            summarise(self.select(name, size), arm, self.depths, self.baseline, name, kinds[name], size)
            for name in names
        ]
        return mean_over_suites(found, category) if suite is None else found[0]

    def intervals(
        self, suite: str | None = None, category: str = "", batch_size: int | None = None
    ) -> dict[str, Interval]:
        """Returns the paired comparisons by name ("tau tree/chain", "speed tree/plain"); see `compare_arms`."""
        from treespark.bench.gains import compare_arms

        return compare_arms(self, suite, category, batch_size)

    # The verdict on the outputs -------------------------------------------------------------------------------------

    @property
    def judged(self) -> bool:
        """Whether outputs were judged: by plain decoding's, or in a narrow dtype by the target's own logits."""
        return (self.num_judged_tokens if self.narrow else self.num_compared_tokens) > 0

    @property
    def narrow(self) -> bool:
        """Whether rounding decides between close tokens so often that texts are judged by their own margins."""
        return self.dtype not in ("float32", "float64")

    @property
    def num_compared_tokens(self) -> int:
        """Tokens compared with plain decoding's, over all arms."""
        return sum(trial.num_compared for prompt in self.prompts for trial in prompt.trials.values())

    @property
    def num_judged_tokens(self) -> int:
        """Tokens set against the target's own logits, in a narrow dtype, over all arms."""
        return sum(trial.num_judged for prompt in self.prompts for trial in prompt.trials.values())

    @property
    def num_near_ties(self) -> int:
        """Tokens that rounding decided: in a narrow dtype those that are not the likeliest; else differing outputs."""
        if self.narrow:
            return sum(trial.num_near_ties for prompt in self.prompts for trial in prompt.trials.values())
        return sum(difference.near_tie for difference in self.differences)

    @property
    def largest_margin(self) -> float:
        """The furthest that a token's logit lies below the best one, in spacings of the dtype; nan unless judged so."""
        trials = [trial for prompt in self.prompts for trial in prompt.trials.values() if trial.num_judged]
        found = [math.nan if trial.margin is None else trial.margin for trial in trials]
        return math.nan if not found or any(map(math.isnan, found)) else max(found)

    @property
    def allowed_differences(self) -> float:
        """Outputs that may leave plain decoding's text at a near-tie: one, or one in 10,000 compared tokens."""
        return 0 if self.dtype == "float64" else max(1, self.num_compared_tokens / 10_000)

    @property
    def ok(self) -> bool:
        """False when outputs differ from plain decoding's other than by a few near-ties, or miss the target's own."""
        if self.narrow or not self.judged:
            return not self.misses
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
            if arm["kind"] != "policy" or not self.prompts:
                continue
            summary = self.summary(arm["name"])
            if summary.num_rounds >= TAU_WARNING_ROUNDS and summary.tau == 1.0 and summary.mean_accepted == 0:
                messages.append(
                    f"{arm['name']}: tau is exactly 1.0 over {summary.num_rounds} rounds, not one drafted token was "
                    "accepted. Probably the checkpoint's slot layout (sample_from_anchor), its tapped layers or its "
                    "target is another one, or the drafter is untrained."
                )
        if self.num_compared_tokens and not self.judged:
            messages.append(
                f"In {self.dtype} rounding decides between close tokens, and these results hold no verdict on the "
                "outputs by the target's own logits: decode again to have it."
            )
        for size in self.batch_sizes:
            short = [suite["name"] for suite in self.suites if suite["num_prompts"] < size]
            if short and not self.simulated:
                messages.append(
                    f"Batch size {size}: {', '.join(short)} hold fewer prompts, so that fewer decode side by side."
                )
        if not self.complete:
            messages.append(f"Interrupted: {len(self.prompts)} prompts were evaluated.")
        return messages

    # Files ----------------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """Returns what two runs must share for the records of one to go on in the other."""
        keys = ("arms", "depths", "seed", "simulated", "dtype", "versions", "hardware")
        found: dict[str, Any] = {key: getattr(self, key) for key in keys}
        found["suites"] = [{key: suite[key] for key in ("name", "sha256", "num_prompts")} for suite in self.suites]
        found["target"] = self.target.get("fingerprint")
        found["drafters"] = {name: drafter.get("sha256") for name, drafter in self.drafters.items()}
        found["settings"] = {key: self.settings.get(key) for key in _DECIDING}
        plain: dict[str, Any] = to_plain(found)
        return plain

    def to_dict(self, computed: bool = True) -> dict[str, Any]:
        """Returns the records as JSON takes them (nan: None), with the tables and intervals computed from them."""
        record: dict[str, Any] = {"format": FORMAT}
        record |= {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "prompts"}
        if computed and self.prompts:
            record |= self._computed()
        record["prompts"] = self.prompts
        plain: dict[str, Any] = to_plain(record)
        return plain

    def _computed(self) -> dict[str, Any]:
        places: list[tuple[str | None, str]] = [(suite, "") for suite in self.suite_names]
        places += [(None, category) for category in [*self.categories, ""]]
        sizes = [size for size in self.batch_sizes if any(prompt.batch_size == size for prompt in self.prompts)]
        record: dict[str, Any] = {}
        record["summaries"] = [
            self.summary(arm, suite, category, size)
            for size in sizes
            for suite, category in places
            for arm in self.arm_names
            if self.has(arm, size)
        ]
        record["intervals"] = [
            {"suite": suite, "category": category, "batch_size": size, "comparison": name}
            | dataclasses.asdict(interval)
            for size in sizes
            for suite, category in places
            for name, interval in self.intervals(suite, category, size).items()
        ]
        record["outputs"] = {
            "judged": self.judged,
            "ok": self.ok,
            "num_compared_tokens": self.num_compared_tokens,
            "num_judged_tokens": self.num_judged_tokens,
            "num_near_ties": self.num_near_ties,
            "largest_margin": self.largest_margin,
            "num_misses": len(self.misses),
            "num_differences": len(self.differences),
            "allowed_differences": self.allowed_differences,
        }
        record["warnings"] = self.warnings()
        return record

    def save(self, path: str | Path, computed: bool = True) -> None:
        """Writes the JSON file atomically: a reader finds the former file or the new one, never a part.

        Args:
            path: The file.
            computed: Whether tables and intervals are computed and written too.
        """
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        record = self.to_dict(computed)
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
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such file of results; `treespark bench --output {path}` writes one.")
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON ({error}); expected a file of `treespark bench`.") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            found = record.get("format") if isinstance(record, dict) else None
            raise ValueError(f"{path}: expected a file of `treespark bench` with format {FORMAT}, got {found}.")
        fields = {item.name: record[item.name] for item in dataclasses.fields(cls) if item.name in record}
        fields["differences"] = [Difference(**item) for item in record["differences"]]
        fields["misses"] = [Miss(**item) for item in record.get("misses", [])]
        fields["prompts"] = [
            PromptTrials(**item | {"trials": {arm: Trial(**trial) for arm, trial in item["trials"].items()}})
            for item in record["prompts"]
        ]
        return cls(**fields)


def to_plain(value: Any) -> Any:
    """Turns dataclasses, tuples and numbers into what JSON holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
