"""`treespark bench`: its arguments are the function's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treespark.bench.results import Results

_SAVE_EVERY = 20.0  # seconds between saves of unfinished results


def bench(
    drafter: str | list[str],
    suites: str | list[str],
    target: str | None = None,
    modes: str | list[str] = "plain,chain,tree",
    policies: str | list[str] | None = None,
    budgets: str | list[str] | None = None,
    batch_sizes: str | list[str] = "1",
    repeats: int = 1,
    num_prompts: int | None = None,
    max_new_tokens: int = 128,
    simulate: bool = False,
    also_simulate: bool = False,
    lookup_tokens: int = 10,
    profile: str | None = None,
    output: str | None = None,
    resume: bool = True,
    figures: bool = True,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    warmup: int = 1,
    seed: int = 0,
    chat_template_kwargs: dict[str, Any] | None = None,
    allow_other_template: bool = False,
) -> Results:
    """Compares plain, chain and tree decoding: acceptance length, speed, and whether the text is the same.

    Args:
        drafter: Folder or hub id of a drafter, or a checkpoint file (.ckpt) of `treespark fit`; or several drafters of
            the same target as name=folder, separated by commas, whose arms are then called name/tree and so on.
        suites: Prompt files (JSONL; lines with prompt, messages or turns), folders of such files, or YAML files that
            name suites (recipes/suites/paper.yaml), several separated by commas.
        target: The target model; by default the one that is recorded with the drafter.
        modes: Some of plain, chain, tree, recorded, generate and lookup. The tree is the policy recorded with the
            drafter, or Budgeted(k=4, num_draft_nodes=32) for a drafter that was trained under the chain; recorded is
            the recorded policy, tree or chain; generate and lookup are the greedy decoding of transformers, without and
            with prompt lookup, one request at a time.
        policies: More tree policies to decode under, such as Budgeted(k=4,num_draft_nodes=16), separated by commas.
        budgets: Values of num_draft_nodes: every tree is also decoded under each of them, separated by commas.
        batch_sizes: Numbers of requests that decode side by side, separated by commas.
        repeats: How often everything is decoded.
        num_prompts: Only the first so many prompts of each suite.
        max_new_tokens: Most new tokens of an answer.
        simulate: Simulate rounds on the target's own answers: acceptance without timing, much faster.
        also_simulate: Decode live and simulate the rounds too, so that both acceptance lengths are reported.
        lookup_tokens: Tokens that prompt lookup drafts at most.
        profile: File for a cost profile (JSON) that is measured first: the target's time by tokens, batch size and
            context, and the drafter's. It also fits BestFirst's calibration, and sets predicted beside measured speed.
        output: File for the results (JSON). Pictures of them (PNG) get its name.
        resume: Go on with unfinished results in `output`, if they come from the same arguments; else start anew.
        figures: Draw the pictures.
        dtype: Precision of target and drafter.
        device: Where to decode, such as cpu or cuda.
        threads: Threads of the processor; by default as many as PyTorch takes.
        warmup: Prompts that are decoded first without being recorded.
        seed: Of the resampling behind the intervals.
        chat_template_kwargs: Options that the target's chat template reads; by default those stored with the drafter.
        allow_other_template: Take another template or other options than in training; the results say so.

    Returns:
        The results; `exit_code` is 1 when an output is not plain decoding's.

    Raises:
        FileNotFoundError: For a drafter, target or suite that does not exist.
        ValueError: For what cannot be evaluated, in words.
    """
    import torch

    from treespark.bench.arms import make_arms, split_names
    from treespark.bench.figures import draw_figures
    from treespark.bench.profile import print_predictions
    from treespark.bench.profile import profile as measure_costs
    from treespark.bench.report import print_report
    from treespark.bench.runner import OtherRunError, run
    from treespark.bench.sources import find_sources
    from treespark.bench.suites import check_suites, load_suite
    from treespark.drafters.source import check_template, open_drafter
    from treespark.target import Target

    names = split_names(suites)
    if not names:
        raise ValueError("Nothing to evaluate: --suites names no file.")
    sources = find_sources(names)
    sizes, nodes = whole_numbers(batch_sizes, "batch_sizes"), whole_numbers(budgets or [], "budgets")
    if not sizes:
        raise ValueError("Nothing to evaluate: --batch_sizes names no number.")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}.")
        torch.set_num_threads(threads)
    unfinished = _unfinished(output) if output and resume else None
    if output and Path(output).is_dir():
        raise ValueError(f"output: {output} is a folder; give the name of a file for the results.")
    if profile and Path(profile).expanduser().is_dir():
        raise ValueError(f"profile: {profile} is a folder; give the name of a file for the cost profile.")
    opened = {name: open_drafter(path) for name, path in name_drafters(drafter).items()}
    if profile and len(opened) > 1:
        raise ValueError("profile: a cost profile is of one drafter; leave --profile out to compare several.")
    first = next(iter(opened.values()))
    if not (target or first.target_name):
        raise ValueError(f"{first.path} does not say which target it was made for: give --target.")
    loaded = Target.load(target or first.target_name, dtype=dtype, device_map=None if device == "cpu" else device)
    models = {name: source.load(loaded) for name, source in opened.items()}
    arms = make_arms(models if len(models) > 1 else models[""], modes, policies, nodes, lookup_tokens)
    rendering = [check_template(item, loaded, chat_template_kwargs, allow_other_template) for item in models.values()]
    if any(options != rendering[0][0] for options, _ in rendering):
        raise ValueError(
            "The drafters were trained with different chat template options: give --chat_template_kwargs, and "
            "--allow_other_template true to compare them all the same."
        )
    chat_template_kwargs, other_template = rendering[0][0], any(other for _, other in rendering)
    chosen = [
        load_suite(
            item,
            loaded,
            chat_template_kwargs=chat_template_kwargs,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
        )
        for item in sources
    ]
    check_suites(chosen)
    costs = None
    if profile:
        costs = measure_costs(loaded, models[""], chosen, profile, batch_sizes=sorted({1, 4, 12, *sizes}))
    saved_at = monotonic()

    def locate(results: Results) -> None:
        for name, source in opened.items():
            results.drafters[name]["path"] = source.path

    def keep(results: Results) -> None:
        nonlocal saved_at
        if output and monotonic() - saved_at >= _SAVE_EVERY:
            locate(results)
            results.save(output, computed=False)
            saved_at = monotonic()

    if unfinished is not None:
        print(f"Going on with {output}, which holds {len(unfinished.prompts)} prompts (--resume false starts anew).")
    try:
        results = run(
            loaded,
            models,
            chosen,
            arms,
            max_new_tokens=max_new_tokens,
            simulated=simulate,
            also_simulate=also_simulate,
            batch_sizes=sizes,
            repeats=repeats,
            seed=seed,
            warmup=warmup,
            on_prompt=keep,
            unfinished=unfinished,
            settings={
                "modes": split_names(modes),
                "policies": split_names(policies or []),
                "budgets": nodes,
                "num_prompts": num_prompts,
                "chat_template_kwargs": chat_template_kwargs,
                "other_template": other_template,
            },
        )
    except OtherRunError as error:
        raise ValueError(f"{output}: {error} Give another --output, or --resume false to replace them.") from error
    locate(results)
    if output:
        results.save(output)
    print_report(results)
    if costs is not None:
        print_predictions(costs, results)
    if output:
        print(f"Results: {output}")
        if figures:
            print(draw_figures(results, output))
    return results


def name_drafters(text: str | list[str]) -> dict[str, str]:
    """Returns the drafters' paths by name; a single one without a name has the empty one.

    >>> name_drafters("a=runs/one,b=runs/two")
    {'a': 'runs/one', 'b': 'runs/two'}

    Raises:
        ValueError: For several drafters without names, the same name twice, or none.
    """
    from treespark.bench.arms import split_names

    words = split_names(text)
    named = [re.fullmatch(r"([\w.-]+)=(.+)", word) for word in words]
    if len(words) == 1:
        return {"": words[0] if named[0] is None or Path(words[0]).exists() else named[0][2]}
    names = [found[1] for found in named if found is not None]
    if not words or len(names) < len(words) or len(set(names)) < len(names):
        raise ValueError(
            f"drafter: expected one drafter, or several as name=folder with different names; got {text!r}."
        )
    return {found[1]: found[2] for found in named if found is not None}


def whole_numbers(text: str | Iterable[str | int], name: str) -> list[int]:
    """Splits a comma-separated text, or each of several, into numbers of at least 1, each once.

    Raises:
        ValueError: For anything else.
    """
    words = [word.strip() for item in ([text] if isinstance(text, str) else text) for word in str(item).split(",")]
    numbers = [int(word) if word.isdecimal() else 0 for word in words if word]
    if any(number < 1 for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(f"{name}: expected different whole numbers of at least 1, such as 1,6,12; got {text!r}.")
    return numbers


def _unfinished(output: str) -> Results | None:
    """The results of an interrupted run in a file, or None where there is no such run."""
    from treespark.bench.results import Results

    try:
        found = Results.load(output)
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return None  # another file: replaced, as a finished run's is
    return None if found.complete else found
