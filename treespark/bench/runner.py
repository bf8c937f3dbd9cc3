"""The runner: every prompt under every arm, one arm after the other, so that all arms share the machine's mood."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treespark.bench.arms import Arm
from treespark.bench.description import describe
from treespark.bench.judge import Judge, Place
from treespark.bench.progress import Progress
from treespark.bench.records import PromptTrials, Trial
from treespark.bench.results import Results
from treespark.bench.suites import BenchPrompt, Suite, check_suites
from treespark.bench.workload import Clock, Served, decode_workload
from treespark.decoding import Round, simulate
from treespark.target import TargetFeatures

if TYPE_CHECKING:
    from treespark.drafters import Drafter
    from treespark.target import Target

_log = logging.getLogger(__name__)
_WARMUP_TOKENS = 32
_PROMPTS_PER_ROW = 4  # of a workload: enough that its rows are busy most of the time
_SIMULATED_AT_ONCE = 16  # prompts whose rounds are simulated together: features in memory, and what a kill costs
_PLAIN = Arm("plain")


def run(
    target: Target,
    drafter: Drafter | Mapping[str, Drafter],
    suites: Sequence[Suite],
    arms: Sequence[Arm],
    *,
    max_new_tokens: int = 128,
    simulated: bool = False,
    also_simulate: bool = False,
    batch_sizes: Sequence[int] = (1,),
    repeats: int = 1,
    seed: int = 0,
    warmup: int = 1,
    end_token_ids: Sequence[int] | None = None,
    progress: bool = True,
    on_prompt: Callable[[Results], None] | None = None,
    unfinished: Results | None = None,
    settings: Mapping[str, Any] | None = None,
    clock: Clock = perf_counter,
) -> Results:
    """Decodes every prompt of the suites under every arm and records what happened.

    The prompts of a suite are decoded in groups: one by one, or for several requests side by side enough of them to
    keep the rows busy. Arms take turns group by group, and the one that goes first changes with each group. With
    `simulated`, plain decoding writes the answers of up to 16 prompts side by side, once for all arms and drafters, and
    their rounds are simulated on them together: the same records without a target forward per round, and without
    timing. (Such answers may part from those written one by one at a near-tie.) An interruption (Ctrl-C) ends the run
    after at least one whole group with what stands, marked as incomplete.

    Args:
        target: The target.
        drafter: A drafter bound to it, or several by the names that their arms give.
        suites: What to decode.
        arms: From `make_arms`.
        max_new_tokens: Most new tokens of an answer.
        simulated: Simulate the rounds of all arms with a policy, and leave out the others.
        also_simulate: Decode live, and simulate the same rounds once more on the answers.
        batch_sizes: Numbers of requests that decode side by side. What `transformers` decodes takes part in 1 only.
        repeats: How often everything is decoded.
        seed: Of the intervals' resampling.
        warmup: Prompts that are decoded first, briefly, under every arm and batch size without being recorded.
        end_token_ids: Tokens that end an answer; None takes the target's own.
        progress: Whether to show a progress bar.
        on_prompt: Receives the results so far after every group.
        unfinished: Results of the same run that was interrupted: what they hold is not decoded again.
        settings: Further options to keep with the results.
        clock: Source of times in seconds.

    Raises:
        ValueError: When there is nothing to evaluate: no prompt, no arm, no new token; for batch sizes or repeats below
            1; or (OtherRunError) for unfinished results of another run.
    """
    check_suites(suites)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}: nothing would be evaluated.")
    if repeats < 1 or not batch_sizes or min(batch_sizes) < 1 or len(set(batch_sizes)) < len(batch_sizes):
        raise ValueError(
            f"Expected different batch sizes and repeats of at least 1, got {list(batch_sizes)} and {repeats}."
        )
    if seed < 0 or warmup < 0:
        raise ValueError(f"seed and warmup must be at least 0, got {seed} and {warmup}.")
    if simulated and (list(batch_sizes) != [1] or repeats > 1 or also_simulate):
        raise ValueError(
            "Simulated rounds are neither batched nor timed: leave out batch_sizes, repeats and also_simulate."
        )
    chosen = [arm for arm in arms if not (simulated and arm.policy is None)]
    if not chosen:
        raise ValueError("Nothing to evaluate: no arm" + (" with a policy to simulate." if simulated else "."))
    for size in batch_sizes:
        if not _taking_part(chosen, size):
            raise ValueError(
                f"Nothing to evaluate at batch size {size}: `transformers` decodes one request at a time here."
            )
    drafters = dict(drafter) if isinstance(drafter, Mapping) else {"": drafter}
    results = describe(target, drafters, suites, chosen)
    results.seed, results.simulated = seed, simulated
    results.settings = {
        "max_new_tokens": max_new_tokens,
        "warmup": warmup,
        "batch_sizes": list(batch_sizes),
        "repeats": repeats,
        "also_simulate": also_simulate,
        **(settings or {}),
    }
    if unfinished is not None:
        check_same_run(results, unfinished)
        results.prompts, results.differences = list(unfinished.prompts), list(unfinished.differences)
        results.misses = list(unfinished.misses)
    runner = _Runner(target, drafters, chosen, max_new_tokens, end_token_ids, clock)
    plan = list(_plan(suites, batch_sizes, repeats, _SIMULATED_AT_ONCE if simulated else 1))
    done = {(item.suite, item.index, item.batch_size, item.repeat) for item in results.prompts}
    left = [(turn, group) for turn, group in enumerate(plan) if group.keys()[0] not in done]
    total = sum(len(group.prompts) * len(_taking_part(chosen, group.batch_size)) for _, group in left)
    with Progress(total, progress) as bar:
        try:
            for size in batch_sizes if warmup and not simulated and left else ():
                bar.show("warm-up")
                runner.warm_up([prompt for suite in suites for prompt in suite.prompts], size, warmup)
            for turn, group in left:
                if simulated:
                    trials = runner.simulate(group.prompts, bar)
                else:
                    trials = runner.decode(group, turn, bar, also_simulate and group.is_first(batch_sizes))
                for key, prompt, found in zip(group.keys(), group.prompts, trials, strict=True):
                    suite, index, size, repeat = key
                    results.prompts.append(
                        PromptTrials(suite, index, prompt.id, len(prompt.ids), found, size, repeat, prompt.sha256)
                    )
                differences, misses = runner.judge.take()
                results.differences += differences
                results.misses += misses
                if on_prompt and group is not plan[-1]:
                    on_prompt(results)
        except KeyboardInterrupt:
            if not results.prompts:
                raise
            wanted = sum(len(group.prompts) for group in plan)
            _log.warning("Interrupted: %d of %d prompts were evaluated.", len(results.prompts), wanted)
            return results
    results.complete = True
    return results


class OtherRunError(ValueError):
    """Unfinished results that come from another run."""


def check_same_run(wanted: Results, unfinished: Results) -> None:
    """Checks that a run may go on from unfinished results.

    Raises:
        OtherRunError: With the first thing that differs.
    """
    mine, theirs = wanted.identity(), unfinished.identity()
    for key in mine:
        if mine[key] == theirs[key]:
            continue
        inner = [name for name in mine[key] if mine[key][name] != theirs[key].get(name)] if key == "settings" else []
        what = f"{inner[0]} (there {theirs[key].get(inner[0])}, now {mine[key][inner[0]]})" if inner else key
        raise OtherRunError(f"These unfinished results come from another run: its {what} differ.")


class _Group(NamedTuple):
    """Prompts of a suite that are decoded as one workload."""

    suite: str
    start: int
    prompts: Sequence[BenchPrompt]
    batch_size: int
    repeat: int

    def keys(self) -> list[tuple[str, int, int, int]]:
        """Suite, index, batch size and repeat of each record."""
        return [(self.suite, self.start + i, self.batch_size, self.repeat) for i in range(len(self.prompts))]

    def is_first(self, batch_sizes: Sequence[int]) -> bool:
        """Whether its prompts are decoded for the first time."""
        return self.repeat == 0 and self.batch_size == batch_sizes[0]


def _plan(suites: Sequence[Suite], batch_sizes: Sequence[int], repeats: int, single: int = 1) -> Iterator[_Group]:
    """Yields the groups in order: all batch sizes and suites once, then the next repeat.

    At batch size 1 a group has at most `single` prompts.
    """
    for repeat in range(repeats):
        for size in batch_sizes:
            for suite in suites:
                count = len(suite.prompts)
                groups = -(-count // single) if size == 1 else max(1, count // (_PROMPTS_PER_ROW * size))
                edges = [count * number // groups for number in range(groups + 1)]
                for start, end in itertools.pairwise(edges):
                    yield _Group(suite.name, start, suite.prompts[start:end], size, repeat)


def _taking_part(arms: Sequence[Arm], batch_size: int) -> list[Arm]:
    return [arm for arm in arms if batch_size == 1 or arm.kind in ("plain", "policy")]


class _Runner:
    """Decodes one group of prompts after the other under all arms."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        arms: Sequence[Arm],
        max_new_tokens: int,
        end_token_ids: Sequence[int] | None,
        clock: Clock,
    ) -> None:
        self.target, self.arms = target, arms
        self.drafters = {name: drafter.eval() for name, drafter in drafters.items()}
        self.max_new_tokens, self.end_token_ids, self.clock = max_new_tokens, end_token_ids, clock
        self.judge = Judge(target, max_new_tokens, end_token_ids)

    def warm_up(self, prompts: Sequence[BenchPrompt], batch_size: int, count: int) -> None:
        """Decodes a few tokens under every arm: first calls allocate memory and load kernels."""
        tokens = _WARMUP_TOKENS if batch_size == 1 else _WARMUP_TOKENS // 4
        for arm in _taking_part(self.arms, batch_size):
            self._decode(arm, prompts[: max(count, batch_size)], batch_size, min(self.max_new_tokens, tokens))

    def decode(self, group: _Group, turn: int, bar: Progress, also_simulate: bool) -> list[dict[str, Trial]]:
        """Decodes a group under every arm and judges the outputs: trials of each prompt."""
        arms = _taking_part(self.arms, group.batch_size)
        first = turn % len(arms)
        found: dict[str, list[Served]] = {}
        for arm in [*arms[first:], *arms[:first]]:
            bar.show(arm.name)
            found[arm.name] = self._decode(arm, group.prompts, group.batch_size, self.max_new_tokens)
            bar.advance(len(group.prompts))
        plain = next((arm.name for arm in arms if arm.kind == "plain"), None)
        table = []
        bar.show("judging")
        for place, prompt in enumerate(group.prompts):
            trials = {}
            for arm in arms:
                served = found[arm.name][place]
                reference = found[plain][place].result if plain and arm.name != plain else None
                where = Place(*group.keys()[place], arm.name)
                trials[arm.name] = self.judge.judge(_live_trial(served), served.result, reference, prompt, where)
            if also_simulate:
                text = found[plain or arms[0].name][place].result.tokens
                for name, (rounds,) in self._simulate([prompt], [text]).items():
                    if name in trials:
                        trials[name] = replace(trials[name], simulated=[item.committed for item in rounds])
            table.append(trials)
        return table

    def simulate(self, prompts: Sequence[BenchPrompt], bar: Progress) -> list[dict[str, Trial]]:
        """Writes the target's answers, then simulates every arm's rounds on them: trials of each prompt."""
        bar.show("answers")
        plain = [item.result for item in self._decode(_PLAIN, prompts, len(prompts), self.max_new_tokens)]
        found = self._simulate(prompts, [result.tokens for result in plain], bar)
        return [
            {name: Trial.of(rounds[row], len(answer.tokens), answer.finish_reason) for name, rounds in found.items()}
            for row, answer in enumerate(plain)
        ]

    def _simulate(
        self, prompts: Sequence[BenchPrompt], answers: Sequence[Sequence[int]], bar: Progress | None = None
    ) -> dict[str, list[list[Round]]]:
        """Simulates the rounds of every arm with a policy on the target's answers: one list for each prompt."""
        device = self.target.device
        texts = [torch.tensor([*prompt.ids, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
        ids = pad_sequence(texts, batch_first=True).to(device)  # [R, S]
        starts = torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
        ends = torch.tensor([len(text) for text in texts], device=device)
        features: dict[tuple[int, ...], TargetFeatures] = {}
        found: dict[str, list[list[Round]]] = {}
        for arm in self.arms:
            if arm.policy is None:
                continue
            if bar is not None:
                bar.show(arm.name)
            drafter = self.drafters[arm.drafter]
            layers = tuple(drafter.layer_ids)
            if layers not in features:
                features[layers] = self._features(texts, layers)
            found[arm.name] = simulate(
                self.target,
                drafter,
                arm.policy,
                features[layers],
                ids,
                starts,
                ends,
                end_token_ids=self.end_token_ids,
                check=not found,
            )
            if bar is not None:
                bar.advance(len(prompts))
        return found

    def _features(self, texts: Sequence[Tensor], layers: tuple[int, ...]) -> TargetFeatures:
        """The target's features of texts, right-padded; each text by itself, so that its neighbours change nothing."""
        single = [self.target.features(text.to(self.target.device).unsqueeze(0), layers) for text in texts]
        context, final = (pad_sequence([item[part][0] for item in single], batch_first=True) for part in (0, 1))
        return TargetFeatures(context, final)

    def _decode(self, arm: Arm, prompts: Sequence[BenchPrompt], batch_size: int, max_new_tokens: int) -> list[Served]:
        return decode_workload(
            self.target,
            None if arm.policy is None else self.drafters[arm.drafter],
            arm,
            [prompt.ids for prompt in prompts],
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            end_token_ids=self.end_token_ids,
            clock=self.clock,
        )


def _live_trial(served: Served) -> Trial:
    result, times = served.result, served.times
    trial = Trial.of(result.rounds, len(result.tokens), result.finish_reason)
    return replace(trial, timing=dict(result.timing) | vars(times))
