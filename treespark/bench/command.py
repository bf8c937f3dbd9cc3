"""`treespark bench`: its arguments are the function's."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treespark.bench.results import Results

_SAVE_EVERY = 20.0  # seconds between saves of unfinished results


def bench(
    drafter: str,
    suites: str | list[str],
    target: str | None = None,
    modes: str | list[str] = "plain,chain,tree",
    policies: str | list[str] | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int = 128,
    simulate: bool = False,
    profile: str | None = None,
    output: str | None = None,
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
        drafter: Folder or hub id of a drafter, or a checkpoint file (.ckpt) of `treespark fit`.
        suites: Prompt files (JSONL; lines with prompt, messages or turns), several separated by commas.
        target: The target model; by default the one that is recorded with the drafter.
        modes: Some of plain, chain and tree. The tree is the policy recorded with the drafter, or
            Budgeted(k=4, num_draft_nodes=32) for a drafter that was trained under the chain.
        policies: More tree policies to decode under, such as Budgeted(k=4,num_draft_nodes=16), separated by commas.
        num_prompts: Only the first so many prompts of each suite.
        max_new_tokens: Most new tokens of an answer.
        simulate: Simulate rounds on the target's own answers: acceptance without timing, much faster.
        profile: File for a cost profile (JSON) that is measured first: the target's time by tokens, batch size and
            context, and the drafter's. It also fits BestFirst's calibration, and sets predicted beside measured speed.
        output: File for the results (JSON).
        dtype: Precision of target and drafter.
        device: Where to decode, such as cpu or cuda.
        threads: Threads of the processor; by default as many as PyTorch takes.
        warmup: Prompts that are decoded first without being recorded.
        seed: Of the resampling behind the intervals.
        chat_template_kwargs: Options that the target's chat template reads; by default those stored with the drafter.
        allow_other_template: Take other options than those that the drafter was trained with; the results say so.

    Returns:
        The results; `exit_code` is 1 when an output is not plain decoding's.

    Raises:
        FileNotFoundError: For a drafter, target or suite that does not exist.
        ValueError: For what cannot be evaluated, in words.
    """
    import torch

    from treespark.bench.arms import make_arms, split_names
    from treespark.bench.load import check_template, open_drafter
    from treespark.bench.profile import print_predictions
    from treespark.bench.profile import profile as measure_costs
    from treespark.bench.report import print_report
    from treespark.bench.runner import run
    from treespark.bench.suites import check_suites, load_suite
    from treespark.data.prompts import check_file
    from treespark.target import Target

    paths = split_names(suites)
    if not paths:
        raise ValueError("Nothing to evaluate: --suites names no file.")
    for path in paths:
        check_file(path)  # before the models are loaded, which takes a while
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}.")
        torch.set_num_threads(threads)
    if output and Path(output).is_dir():
        raise ValueError(f"output: {output} is a folder; give the name of a file for the results.")
    source = open_drafter(drafter)
    if not (target or source.target_name):
        raise ValueError(f"{drafter} does not say which target it was made for: give --target.")
    loaded = Target.load(target or source.target_name, dtype=dtype, device_map=None if device == "cpu" else device)
    model = source.load(loaded)
    arms = make_arms(model, modes, policies)
    chat_template_kwargs, other_template = check_template(model, chat_template_kwargs, allow_other_template)
    chosen = [
        load_suite(
            path,
            loaded,
            chat_template_kwargs=chat_template_kwargs,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
        )
        for path in paths
    ]
    check_suites(chosen)
    costs = measure_costs(loaded, model, chosen, profile) if profile else None
    settings = {
        "modes": split_names(modes),
        "policies": split_names(policies or []),
        "num_prompts": num_prompts,
        "chat_template_kwargs": chat_template_kwargs,
        "other_template": other_template,
    }

    def describe(results: Results) -> None:
        results.settings |= settings
        results.drafter["path"] = source.path

    saved_at = monotonic()

    def keep(results: Results) -> None:
        nonlocal saved_at
        if output and monotonic() - saved_at >= _SAVE_EVERY:
            describe(results)
            results.save(output)
            saved_at = monotonic()

    results = run(
        loaded,
        model,
        chosen,
        arms,
        max_new_tokens=max_new_tokens,
        simulated=simulate,
        seed=seed,
        warmup=warmup,
        on_prompt=keep,
    )
    describe(results)
    if output:
        results.save(output)
    print_report(results)
    if costs is not None:
        print_predictions(costs, results)
    if output:
        print(f"Results: {output}")
    return results
