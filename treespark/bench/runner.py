"""The runner: every prompt under every arm, one arm after the other, so that all arms share the machine's mood."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from treespark.bench.results import Difference, PromptTrials, Results, Trial
from treespark.bench.suites import BenchPrompt, Suite, check_suites
from treespark.decoding import DecodeResult, Round, compare_outputs, decode, decode_plain, simulate
from treespark.decoding.record import NEAR_TIE
from treespark.drafters.source import weights_hash
from treespark.environment import environment

if TYPE_CHECKING:
    from treespark.bench.arms import Arm
    from treespark.drafters import Drafter
    from treespark.target import Target

_log = logging.getLogger(__name__)
_WARMUP_TOKENS = 32


def run(
    target: Target,
    drafter: Drafter,
    suites: Sequence[Suite],
    arms: Sequence[Arm],
    *,
    max_new_tokens: int = 128,
    simulated: bool = False,
    seed: int = 0,
    warmup: int = 1,
    end_token_ids: Sequence[int] | None = None,
    progress: bool = True,
    on_prompt: Callable[[Results], None] | None = None,
) -> Results:
    """Decodes every prompt of the suites under every arm and records what happened.

    Arms take turns prompt by prompt, and the one that goes first changes with each prompt. With `simulated`, plain
    decoding writes the target's answer once per prompt and the arms' rounds are simulated on it: the same records
    without a target forward per round, and without timing. An interruption (Ctrl-C) ends the run after at least one
    whole prompt with what stands, marked as incomplete.

    Args:
        target: The target.
        drafter: A drafter bound to it.
        suites: What to decode.
        arms: From `make_arms`.
        max_new_tokens: Most new tokens of an answer.
        simulated: Simulate the rounds of all arms but plain decoding, which is left out.
        seed: Of the intervals' resampling.
        warmup: Prompts that are decoded first, briefly, under every arm without being recorded.
        end_token_ids: Tokens that end an answer; None takes the target's own.
        progress: Whether to show a progress bar.
        on_prompt: Receives the results so far after every prompt.

    Raises:
        ValueError: When there is nothing to evaluate: no prompt, no arm, no new token.
    """
    check_suites(suites)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}: nothing would be evaluated.")
    chosen = [arm for arm in arms if not (simulated and arm.policy is None)]
    if not chosen:
        raise ValueError("Nothing to evaluate: no arm" + (" but plain decoding to simulate." if simulated else "."))
    runner = _Runner(target, drafter, chosen, max_new_tokens, end_token_ids)
    found = environment()
    results = Results(
        arms=[
            {
                "name": arm.name,
                "policy": None if arm.policy is None else arm.policy.config(),
                "description": arm.description,
                "marked": arm.marked,
            }
            for arm in chosen
        ],
        suites=[
            {"name": suite.name, "path": suite.path, "sha256": suite.sha256, "num_prompts": len(suite.prompts)}
            for suite in suites
        ],
        depths=drafter.block_size,
        seed=seed,
        simulated=simulated,
        dtype=str(target.dtype).removeprefix("torch."),
        complete=False,
        settings={"max_new_tokens": max_new_tokens, "warmup": warmup},
        target={
            "name": target.spec.name,
            "model_type": target.spec.model_type,
            "fingerprint": target.spec.fingerprint,
        },
        drafter={
            "config": drafter.config(),
            "sha256": weights_hash(drafter),
            "target": drafter.spec.name,
            "target_fingerprint": drafter.spec.fingerprint,
            "block_size": drafter.block_size,
            "recorded_policy": drafter.recorded_policy,
            "num_parameters": sum(p.numel() for p in drafter.parameters() if p.requires_grad),
        },
        argv=found["argv"],
        versions=found["versions"],
        git=found["git"],
        hardware={
            "device": str(target.device),
            "cpu": found["cpu"],
            "accelerators": found["accelerators"] if target.device.type != "cpu" else [],
            "num_threads": torch.get_num_threads(),
            "platform": found["platform"],
        },
    )
    prompts = [(suite, index, prompt) for suite in suites for index, prompt in enumerate(suite.prompts)]
    with _Progress(len(prompts) * len(chosen), progress) as bar:
        try:
            if not simulated:
                for _, _, prompt in prompts[:warmup]:
                    bar.show("warm-up")
                    runner.warm_up(prompt)
            for turn, (suite, index, prompt) in enumerate(prompts):
                decoded = (runner.simulate if simulated else runner.decode)(prompt, turn, bar)
                results.prompts.append(PromptTrials(suite.name, index, prompt.id, len(prompt.ids), decoded))
                results.differences += [
                    Difference(suite.name, index, prompt.id, **item) for item in runner.take_differences()
                ]
                if on_prompt and turn + 1 < len(prompts):
                    on_prompt(results)
        except KeyboardInterrupt:
            if not results.prompts:
                raise
            _log.warning("Interrupted: %d of %d prompts were evaluated.", len(results.prompts), len(prompts))
            return results
    results.complete = True
    return results


class _Runner:
    """Decodes one prompt after the other under all arms."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        arms: Sequence[Arm],
        max_new_tokens: int,
        end_token_ids: Sequence[int] | None,
    ) -> None:
        self.target, self.drafter, self.arms = target, drafter.eval(), arms
        self.max_new_tokens, self.end_token_ids = max_new_tokens, end_token_ids
        # float64 leaves nothing to rounding; a near-tie excuses a difference in float32 only.
        self.near_tie = 0.0 if target.dtype == torch.float64 else NEAR_TIE
        self.differences: list[dict[str, Any]] = []

    def warm_up(self, prompt: BenchPrompt) -> None:
        """Decodes a few tokens under every arm: first calls allocate memory and load kernels."""
        for arm in self.arms:
            self._decode_arm(arm, prompt, min(self.max_new_tokens, _WARMUP_TOKENS))

    def decode(self, prompt: BenchPrompt, turn: int, bar: _Progress) -> dict[str, Trial]:
        """Decodes a prompt under every arm and compares the outputs with plain decoding's."""
        first = turn % len(self.arms)
        found: dict[str, DecodeResult] = {}
        for arm in [*self.arms[first:], *self.arms[:first]]:
            bar.show(arm.name)
            found[arm.name] = self._decode_arm(arm, prompt, self.max_new_tokens)
            bar.advance()
        plain = next((found[arm.name] for arm in self.arms if arm.policy is None), None)
        trials = {}
        for arm in self.arms:
            result = found[arm.name]
            identical, num_compared = None, 0
            if plain is not None and result is not plain:
                seen = compare_outputs(plain, result, near_tie=self.near_tie)
                identical, num_compared = seen.identical, seen.num_compared
                if not identical:
                    self.differences.append(
                        {"arm": arm.name, "position": seen.first_difference, "gap": seen.gap, "near_tie": seen.near_tie}
                    )
            trials[arm.name] = _trial(result.rounds, len(result.tokens), result, identical, num_compared)
        return trials

    def simulate(self, prompt: BenchPrompt, turn: int, bar: _Progress) -> dict[str, Trial]:
        """Writes the target's answer, then simulates every arm's rounds on it."""
        bar.show("answer")
        plain = decode_plain(
            self.target, prompt.ids, max_new_tokens=self.max_new_tokens, end_token_ids=self.end_token_ids
        )
        device = self.target.device
        ids = torch.tensor([[*prompt.ids, *plain.tokens]], device=device)  # [1, S]
        features = self.target.features(ids, self.drafter.layer_ids)
        start, end = torch.tensor([len(prompt.ids)], device=device), torch.tensor([ids.shape[1]], device=device)
        trials = {}
        for number, arm in enumerate(self.arms):
            bar.show(arm.name)
            rounds = simulate(
                self.target,
                self.drafter,
                arm.policy,
                features,
                ids,
                start,
                end,
                end_token_ids=self.end_token_ids,
                check=number == 0,
            )[0]
            trials[arm.name] = _trial(rounds, len(plain.tokens), plain)
            bar.advance()
        return trials

    def take_differences(self) -> list[dict[str, Any]]:
        """Returns the differences of the last prompt."""
        found, self.differences = self.differences, []
        return found

    def _decode_arm(self, arm: Arm, prompt: BenchPrompt, max_new_tokens: int) -> DecodeResult:
        if arm.policy is None:
            return decode_plain(
                self.target, prompt.ids, max_new_tokens=max_new_tokens, end_token_ids=self.end_token_ids
            )
        return decode(
            self.target,
            self.drafter,
            prompt.ids,
            policy=arm.policy,
            allow_other_policy=True,  # an arm is asked for by name, and `marked` says what it is
            max_new_tokens=max_new_tokens,
            end_token_ids=self.end_token_ids,
        )


def _trial(
    rounds: Sequence[Round], num_tokens: int, result: DecodeResult, identical: bool | None = None, num_compared: int = 0
) -> Trial:
    return Trial(
        num_tokens=num_tokens,
        finish_reason=result.finish_reason,
        num_accepted=[item.num_accepted for item in rounds],
        committed=[item.committed for item in rounds],
        timing=dict(result.timing) if rounds is result.rounds else {},
        identical=identical,
        num_compared=num_compared,
    )


class _Progress:
    """A progress bar, or nothing."""

    def __init__(self, total: int, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("Decoding"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            disable=not enabled,
            transient=True,
        )
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def show(self, what: str) -> None:
        """Names what is being decoded."""
        self.bar.update(self.task, description=what)

    def advance(self) -> None:
        """Counts one answer."""
        self.bar.advance(self.task)
