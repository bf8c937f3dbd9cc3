"""The data of a run: files, template, supervised tokens, anchors."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from treespark.data import DraftingData, Sample
from treespark.doctor.report import Report, highlighted


def examine_template(report: Report, data: DraftingData) -> None:
    """Says how answers are found in a conversation, which is what the loss rests on."""
    with report.guard("template"):
        encoder = data.encoder
        if not encoder.tokenizer.chat_template:
            report.say("template", "none: single prompts, each answer between its prompt and the end token")
        elif encoder.has_generation_tag:
            report.say("template", "marks the answers itself with {% generation %}")
        else:
            report.say(
                "template", "has no {% generation %}: answers are found by rendering the conversation up to each"
            )
        if encoder.chat_template_kwargs:
            report.say("template", f"options: {encoder.chat_template_kwargs}")


def examine_documents(report: Report, data: DraftingData) -> list[Sample]:
    """Reads every file that is configured; returns the training documents, none where they cannot be used."""
    train: list[Sample] = []
    for role, is_set in (("train", True), ("val", bool(data.val)), ("test", bool(data.test))):
        if not is_set:
            if role == "val":
                report.warn("val", "no validation file: no val/tau, and no best.ckpt is kept")
            continue
        found: list[Sample] = []
        with report.guard(role):
            found = list(data.samples(role))
        if found:
            examine_coverage(report, role, found)
            train = found if role == "train" else train
    if train:
        tokenizer, console = data.encoder.tokenizer, report.console
        console.print(f"   {train[0].where}, the supervised tokens highlighted:", style="bold", markup=False)
        console.print(highlighted(train[0], tokenizer, marks=not console.is_terminal), soft_wrap=True)
    return train


def examine_coverage(report: Report, role: str, samples: Sequence[Sample]) -> None:
    """Says how many tokens are supervised; none or all of them is an error."""
    supervised = sum(stop - start for sample in samples for start, stop in sample.spans)
    tokens = sum(map(len, samples))
    text = f"{len(samples):,} documents, {tokens:,} tokens, {supervised / tokens:.1%} of them supervised"
    if supervised == 0:
        report.fail(role, f"{text}: nothing would be trained. Check the chat template and the answers.")
    elif supervised == tokens:
        report.fail(role, f"{text}: the prompts would be trained as well. Check that prompts are told from answers.")
    else:
        report.say(role, text)


def examine_anchors(report: Report, data: DraftingData, samples: Sequence[Sample], block_size: int | None) -> None:
    """Says how many anchors documents offer, and how many a step draws."""
    eligible = [sample.num_eligible for sample in samples]
    without = eligible.count(0)
    if without == len(eligible):
        report.fail(
            "anchors", "no document has an anchor, which takes two supervised tokens in a row. Give longer answers."
        )
        return
    text = f"{mean(eligible):.1f} places per document (least {min(eligible)}, most {max(eligible)}), "
    if data.anchors_per_step is not None:
        text += f"{data.anchors_per_step:,} drawn per step over all documents"
    else:
        text += f"{mean(min(data.num_anchors, number) for number in eligible):.1f} drawn from each"
    report.say("anchors", text)
    if without:
        report.warn(
            "anchors", f"{without:,} of {len(eligible):,} documents have none: they cost time and train nothing"
        )
    if block_size is not None and mean(eligible) < block_size:
        report.warn("anchors", f"answers are shorter than the drafter's {block_size} depths on average")


def examine_lengths(report: Report, data: DraftingData, samples: Sequence[Sample], most: int) -> None:
    """Refuses documents with positions that the target does not know, and says how full packed rows are."""
    longest = max(map(len, samples))
    if longest > most:
        report.fail(
            "lengths",
            f"the longest training document has {longest} tokens, but the target knows {most} positions. Set "
            f"data.max_length to {most} or less.",
        )
    if data.packing:
        loader = data.train_dataloader()
        tokens = sum(map(len, samples))
        report.say(
            "packing",
            f"{len(samples):,} documents in {loader.num_rows:,} rows of up to {data.max_length} tokens, "
            f"{tokens / (loader.num_rows * data.max_length):.1%} full",
        )
