"""The findings of a comparison in one paragraph.

Says only what the report's numbers bear: a strategy is faster where the interval of the paired
ratio says so, and on an emulated device nothing is said about speed at all.
"""

from __future__ import annotations

from .end_to_end.verdict import plans_in_words
from .findings import (
    Timed,
    agreement_in_words,
    closeness_in_words,
    difference_in_words,
    fastest,
    speed_in_words,
)
from .report import ComparisonReport
from .words import counted, enumerated, in_words_bytes, in_words_s, three_digits

# Host busy for this part of eager's latency: the device waited for launches.
_LAUNCH_BOUND_SHARE = 0.9


def verdict_of(report: ComparisonReport) -> str:
    """Returns the paragraph: what is right, which strategy wins where and why, what it cost."""
    sentences = [*_about_values(report), *plans_in_words(report.end_to_end, report.environment.is_emulated)]
    if report.environment.is_emulated:
        sentences.append(
            "The device is emulated: this shows that capture and replay keep the values; "
            "its times and memory say nothing about a GPU."
        )
    else:
        counts = [case.num_tokens for case in report.cases]
        sentences += [
            *speed_in_words(_timed(report), counts, unit="token"),
            *_about_launches(report),
            *_about_builds(report),
        ]
    return " ".join(sentences)


def _about_values(report: ComparisonReport) -> list[str]:
    others = report.strategies[1:]
    if not others:
        return ["Only eager ran; there is nothing to compare it with."]
    sentences = [*_about_not_finite(report)]
    for strategy in others:
        if strategy.status == "failed":
            sentences.append(f"{strategy.strategy} FAILED: {(strategy.failure or '').rstrip('.')}.")
        if strategy.first_difference is not None:
            sentences.append(
                f"{strategy.strategy} is WRONG: {difference_in_words(strategy.first_difference)}; it gets no speed."
            )
    equal = [strategy for strategy in others if strategy.status == "equal" and strategy.values]
    if equal:
        num_counts = min(len(strategy.values) for strategy in equal)
        verb = "agrees" if len(equal) == 1 else "agree"
        names = enumerated([strategy.strategy for strategy in equal])
        values = [entry for strategy in equal for entry in strategy.values]
        sentences.append(
            f"{names} {verb} with padded eager bit for bit at "
            f"{counted(num_counts, 'token count')} from {report.cases[0].num_tokens} to "
            f"{report.cases[-1].num_tokens}{agreement_in_words(values)}."
        )
    sentences += [
        closeness_in_words(strategy.strategy, strategy.values)
        for strategy in others
        if strategy.status == "close"
    ]
    return sentences


def _about_not_finite(report: ComparisonReport) -> list[str]:
    """Equal bits of NaN say nothing of a strategy: that eager itself has them is told first."""
    counts = [entry.num_tokens for entry in report.eager.values if entry.max_diff_to_padded_eager is None]
    if not counts:
        return []
    where = f"{len(counts)} of {counted(len(report.eager.values), 'token count')}"
    first = counted(counts[0], "token")
    return [f"Eager's own output has NaN or infinity at {where} (first at {first}): nothing is shown there."]


def fastest_at(report: ComparisonReport, num_tokens: int) -> tuple[str, ...]:
    """Returns the fastest strategy at a token count and those not told apart from it."""
    return fastest(_timed(report), num_tokens)


def _timed(report: ComparisonReport) -> Timed:
    return {strategy.strategy: strategy.times for strategy in report.strategies}


def _about_launches(report: ComparisonReport) -> list[str]:
    """Where eager waits for the host, by the host time that was measured beside its latency."""
    times = report.eager.times
    if not times:
        return []
    bound = [
        entry.num_tokens
        for entry in times
        if entry.host_s.value >= _LAUNCH_BOUND_SHARE * entry.latency_s.value
    ]
    if not bound:
        return ["Eager is nowhere launch-bound: the host is always done before the device."]
    why = "the host is busy for nearly all of its latency, and that is what replaying graphs saves"
    if len(bound) == len(times):
        return [f"Eager is launch-bound throughout: {why}."]
    free = [entry.num_tokens for entry in times if entry.num_tokens > max(bound)]
    tail = f"; from {free[0]} on the device is the limit, and graphs have little left to save" if free else ""
    return [f"Eager is launch-bound up to {max(bound)} tokens: {why}{tail}."]


def _about_builds(report: ComparisonReport) -> list[str]:
    sentences = []
    sweep = report.eager_sweep
    for strategy in report.strategies:
        if strategy.build is None:
            continue
        cost = f"Building {strategy.strategy} took {in_words_s(strategy.build.total_s)}"
        if sweep.warm_s > 0 and sweep.num_forwards == len(report.capture_sizes):
            share = three_digits(strategy.build.total_s / sweep.warm_s)
            cost += (
                f", {share} times one eager forward at each of {counted(sweep.num_forwards, 'capture size')}"
            )
        if strategy.memory is not None:
            cost += f"; its graphs hold {in_words_bytes(strategy.memory.allocator_bytes)} by the allocator"
            if strategy.memory.driver_bytes is not None:
                cost += f" and {in_words_bytes(strategy.memory.driver_bytes)} by the driver"
        sentences.append(f"{cost}.")
    return sentences
