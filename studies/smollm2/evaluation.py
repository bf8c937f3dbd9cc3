"""Rounds of many drafters on the same texts: the target's answers and features are computed once and kept.

`treespark bench` would decode the answers again at every call; here arms are added one by one, and one that is there
under the same weights is not simulated again. The records are those of `treespark bench --simulate true`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn.utils.rnn import pad_sequence

from runs import write_json
from treespark.bench import PromptTrials, Results, Suite, Trial
from treespark.bench.arms import Arm
from treespark.bench.description import describe
from treespark.bench.suites import BenchPrompt
from treespark.bench.workload import decode_workload
from treespark.decoding import simulate
from treespark.drafters import Drafter
from treespark.target import Target, TargetFeatures

ROWS = 16  # texts that are simulated side by side


@dataclass(frozen=True)
class Text:
    """A prompt of a suite and the target's greedy answer to it.

    Attributes:
        suite: Name of the suite.
        index: Its place there.
        prompt: The prompt.
        answer: Tokens of the answer.
        finish_reason: "stop" or "length".
    """

    suite: str
    index: int
    prompt: BenchPrompt
    answer: tuple[int, ...]
    finish_reason: str


def answered(suite: Suite, file: Path) -> list[Text]:
    """The texts of a suite whose file holds the target's answers, as `treespark generate` wrote them."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        Text(suite.name, index, prompt, tuple(row["response_ids"]), row["finish_reason"])
        for index, (prompt, row) in enumerate(zip(suite.prompts, rows, strict=True))
    ]


def answer(target: Target, suites: Sequence[Suite], max_new_tokens: int, file: Path) -> list[Text]:
    """Decodes the suites plainly, side by side, and keeps the answers in a file; an interruption loses one group."""
    key = f"{target.spec.fingerprint} {max_new_tokens}"
    held: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    answers: dict[str, Any] = held.get("answers", {}) if held.get("key") == key else {}
    places = [(suite.name, index, prompt) for suite in suites for index, prompt in enumerate(suite.prompts)]
    places.sort(key=lambda place: len(place[2].ids))
    left = [place for place in places if repr(place[2].ids) not in answers]
    with Progress(TextColumn("Answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=len(places), completed=len(places) - len(left))
        for first in range(0, len(left), 2 * ROWS):
            group = [prompt.ids for _, _, prompt in left[first : first + 2 * ROWS]]
            served = decode_workload(
                target, None, Arm("plain"), group, batch_size=len(group), max_new_tokens=max_new_tokens
            )
            for ids, item in zip(group, served, strict=True):
                answers[repr(ids)] = [item.result.tokens, item.result.finish_reason]
            write_json(file, {"key": key, "answers": answers})
            bar.advance(task, len(group))
    found = []
    for suite, index, prompt in places:
        tokens, reason = answers[repr(prompt.ids)]
        found.append(Text(suite, index, prompt, tuple(tokens), reason))
    return found


class Texts:
    """The texts of some suites with their features, kept in a file.

    Args:
        target: The target that wrote them.
        suites: The suites.
        texts: All their texts.
        layers: Tapped layers.
        file: Where the features are kept.
    """

    def __init__(
        self, target: Target, suites: Sequence[Suite], texts: Sequence[Text], layers: Sequence[int], file: Path
    ) -> None:
        self.target, self.suites = target, list(suites)
        # Neighbours of like length: what is padded is simulated for nothing.
        self.texts = sorted(texts, key=lambda text: (len(text.prompt.ids) + len(text.answer), text.suite, text.index))
        self.layers = tuple(layers)
        tokens = repr([(text.prompt.ids, text.answer) for text in self.texts])
        self.key = hashlib.sha256(f"{target.spec.fingerprint} {self.layers} {tokens}".encode()).hexdigest()
        self.features = self._features(file)

    def _features(self, file: Path) -> list[TargetFeatures]:
        if file.is_file():
            held = torch.load(file, weights_only=True)
            if held["key"] == self.key:
                return [TargetFeatures(*pair) for pair in held["features"]]
        found = []
        columns = (
            TextColumn("Features"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as bar:
            for text in bar.track(self.texts):
                ids = torch.tensor([[*text.prompt.ids, *text.answer]])
                features = self.target.features(ids, self.layers)
                found.append(TargetFeatures(features.context[0], features.final[0]))
        part = file.with_name(f".{file.name}.part")
        torch.save({"key": self.key, "features": [tuple(item) for item in found]}, part)
        part.replace(file)
        return found

    def simulate(self, drafter: Drafter, arm: Arm, on_wave: Any = None) -> dict[tuple[str, int], Trial]:
        """Simulates an arm on every text: a thread for each processor, since the products of a wave are small.

        Args:
            drafter: The drafter.
            arm: The policy to decode under.
            on_wave: As in `treespark.decoding.simulate`, with the token ids and the texts' ends in front; then one
                thread does it all.
        """
        assert tuple(drafter.layer_ids) == self.layers, "the study's drafters tap the same layers"
        groups = range(0, len(self.texts), ROWS)
        found: dict[tuple[str, int], Trial] = {}
        workers = 1 if on_wave is not None else os.cpu_count() or 1
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for trials in pool.map(lambda first: self._simulate_group(drafter, arm, first, on_wave), groups):
                found |= trials
        return found

    def _simulate_group(self, drafter: Drafter, arm: Arm, first: int, on_wave: Any) -> dict[tuple[str, int], Trial]:
        texts, features = self.texts[first : first + ROWS], self.features[first : first + ROWS]
        ids = pad_sequence([torch.tensor([*text.prompt.ids, *text.answer]) for text in texts], batch_first=True)
        context, final = (pad_sequence([item[part] for item in features], batch_first=True) for part in (0, 1))
        starts = torch.tensor([len(text.prompt.ids) for text in texts])
        ends = starts + torch.tensor([len(text.answer) for text in texts])
        rounds = simulate(
            self.target,
            drafter,
            arm.policy,
            TargetFeatures(context, final),
            ids,
            starts,
            ends,
            on_wave=None if on_wave is None else partial(on_wave, ids, ends),
        )
        return {
            (text.suite, text.index): Trial.of(items, len(text.answer), text.finish_reason)
            for text, items in zip(texts, rounds, strict=True)
        }

    def evaluate(
        self, drafters: dict[str, Drafter], arms: Sequence[Arm], file: Path, settings: dict[str, Any]
    ) -> Results:
        """Simulates the arms that the results in a file lack, and writes them after each.

        Args:
            drafters: By name.
            arms: What to simulate; those of other drafters or policies that the file holds are dropped.
            file: The results.
            settings: Kept with the results.
        """
        results = describe(self.target, drafters, self.suites, arms)
        results.simulated = True
        results.settings = {"batch_sizes": [1], "repeats": 1, "texts_sha256": self.key} | settings
        trials = self._known(results, file)
        missing = [arm for arm in arms if arm.name not in trials]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns) as bar:
            task = bar.add_task("", total=len(arms), completed=len(arms) - len(missing))
            for arm in missing:
                bar.update(task, description=arm.name)
                trials[arm.name] = self.simulate(drafters[arm.drafter], arm)
                self._fill(results, arms, trials)
                results.complete = all(item.name in trials for item in arms)
                results.save(file, computed=False)
                bar.advance(task)
        self._fill(results, arms, trials)
        results.complete = True
        results.save(file, computed=False)
        return results

    def _known(self, wanted: Results, file: Path) -> dict[str, dict[tuple[str, int], Trial]]:
        """Trials by arm that a former call wrote: of the same weights and policy, on the same texts."""
        if not file.is_file():
            return {}
        former = Results.load(file)
        if former.settings.get("texts_sha256") != self.key:
            return {}
        known = {}
        for arm in wanted.arms:
            for other in former.arms:
                same = all(arm[key] == other[key] for key in ("name", "policy", "drafter"))
                weights = [item.drafters.get(arm["drafter"], {}).get("sha256") for item in (wanted, former)]
                if same and weights[0] == weights[1] and all(arm["name"] in item.trials for item in former.prompts):
                    known[arm["name"]] = {(i.suite, i.index): i.trials[arm["name"]] for i in former.prompts}
        return known

    def _fill(self, results: Results, arms: Sequence[Arm], trials: dict[str, dict[tuple[str, int], Trial]]) -> None:
        order = [suite.name for suite in self.suites]
        texts = sorted(self.texts, key=lambda text: (order.index(text.suite), text.index))
        results.prompts = [
            PromptTrials(
                text.suite,
                text.index,
                text.prompt.id,
                len(text.prompt.ids),
                {arm.name: trials[arm.name][text.suite, text.index] for arm in arms if arm.name in trials},
                sha256=text.prompt.sha256,
            )
            for text in texts
        ]


class PathMass:
    """How far a drafter's path probabilities are from the share of nodes that lie on the target's path.

    Args:
        num_bins: Bins of equal width over the probability.
    """

    def __init__(self, num_bins: int = 10) -> None:
        self.sums = torch.zeros(num_bins, 3, dtype=torch.float64)  # prediction, hits, count

    def __call__(
        self, ids: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, packed: Any
    ) -> None:
        """Adds the packed nodes of a wave, as far as the text is known."""
        depths = int(packed.depths.max())
        place = at.unsqueeze(1) + torch.arange(1, depths + 1)
        known = place < ends[rows].unsqueeze(1)
        tokens = ids[rows].gather(1, place.clamp(max=ids.shape[1] - 1)).masked_fill(~known, -1)
        counted = packed.exists & (packed.depths > 0)
        counted &= at.unsqueeze(1) + packed.depths < ends[rows].unsqueeze(1)
        predicted = packed.scores.exp()[counted].double()
        hits = packed.on_path(tokens)[counted].double()
        bins = (predicted * len(self.sums)).long().clamp(0, len(self.sums) - 1)
        self.sums.index_add_(0, bins, torch.stack([predicted, hits, torch.ones_like(hits)], 1))

    def reliability(self) -> list[list[float]]:
        """Mean prediction, share on the target's path and count of each bin that holds a node."""
        return [
            [float(predicted / count), float(hits / count), int(count)] for predicted, hits, count in self.sums if count
        ]
