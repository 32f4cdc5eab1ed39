"""What the end-to-end arms found, in sentences of the comparison's verdict."""

from __future__ import annotations

from ..findings import agreement_in_words, closeness_in_words, difference_in_words, speed_in_words
from ..words import counted, enumerated
from .report import EndToEndReport, PlanReport


def plans_in_words(report: EndToEndReport, is_emulated: bool) -> list[str]:
    """Returns the sentences; nothing about speed where capture is emulated.

    Args:
        report: What was found.
        is_emulated: Whether times say nothing about a GPU.
    """
    if report.why_none is not None:
        return []
    sentences = [sentence for plan in report.plans for sentence in problems_in_words(plan)]
    equal = [plan for plan in report.plans if plan.status == "equal"]
    if equal:
        verb = "agrees" if len(equal) == 1 else "agree"
        values = [entry for plan in equal for phase in plan.phases for entry in phase.values]
        sentences.append(
            f"Through the engine {enumerated([plan.plan for plan in equal])} {verb} with padded eager bit for bit at "
            f"{counted(len(equal[0].first_token.values), 'prompt length')} and "
            f"{counted(len(equal[0].decode.values), 'batch size')}{agreement_in_words(values)}."
        )
    for plan in report.plans:
        if plan.status == "close":
            values = [entry for phase in plan.phases for entry in phase.values]
            sentences.append(f"Through the engine {closeness_in_words(plan.plan, values)}")
    if is_emulated:
        return sentences
    first_tokens = {plan.plan: plan.first_token.times for plan in report.plans}
    decoding = {plan.plan: plan.decode.times for plan in report.plans}
    return [
        *sentences,
        *speed_in_words(
            first_tokens, report.prompt_lengths, unit="token", lead="To the first token of a prompt, "
        ),
        *speed_in_words(decoding, report.batch_sizes, unit="request", lead="Decoding, "),
    ]


def problems_in_words(plan: PlanReport) -> list[str]:
    """Returns what is wrong with a plan, or why it did not run; a sentence each."""
    if plan.status == "left_out":
        return [f"{plan.plan} was left out of the end-to-end arms: {plan.failure}."]
    if plan.status == "failed":
        return [f"{plan.plan} FAILED end to end: {(plan.failure or '').rstrip('.')}."]
    units = zip(plan.phases, ("token", "request"), strict=True)
    return [
        f"{plan.plan} is WRONG end to end: {difference_in_words(phase.first_difference, unit)}; it gets no speed."
        for phase, unit in units
        if phase.first_difference is not None
    ]
