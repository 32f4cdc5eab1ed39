"""The findings of a comparison in one paragraph.

Says only what the report's numbers bear: a strategy is faster where the interval of the paired
ratio says so, and on an emulated device nothing is said about speed at all.
"""

from __future__ import annotations

from itertools import groupby

from .intervals import Median, median_of
from .report import ComparisonReport, StrategyReport
from .words import counted, enumerated, in_words_bytes, in_words_s, three_digits

# Host busy for this part of eager's latency: the device waited for launches.
_LAUNCH_BOUND_SHARE = 0.9
# Beyond this a paragraph of stretches says less than a count of wins.
_MOST_STRETCHES = 5


def verdict_of(report: ComparisonReport) -> str:
    """Returns the paragraph: what is right, which strategy wins where and why, what it cost."""
    sentences = _about_values(report)
    if report.environment.is_emulated:
        sentences.append(
            "The device is emulated: this shows that capture and replay keep the values; "
            "its times and memory say nothing about a GPU."
        )
    else:
        sentences += [*_about_speed(report), *_about_launches(report), *_about_builds(report)]
    return " ".join(sentences)


def _about_values(report: ComparisonReport) -> list[str]:
    others = report.strategies[1:]
    if not others:
        return ["Only eager ran; there is nothing to compare it with."]
    sentences = []
    for strategy in others:
        if strategy.status == "failed":
            sentences.append(f"{strategy.strategy} FAILED: {(strategy.failure or '').rstrip('.')}.")
        if strategy.first_difference is not None:
            sentences.append(
                f"{strategy.strategy} is WRONG: {difference_in_words(strategy)}; it gets no speed."
            )
    equal = [strategy for strategy in others if strategy.status == "equal" and strategy.values]
    if equal:
        num_counts = min(len(strategy.values) for strategy in equal)
        verb = "agrees" if len(equal) == 1 else "agree"
        names = enumerated([strategy.strategy for strategy in equal])
        sentences.append(
            f"{names} {verb} with padded eager bit for bit at "
            f"{counted(num_counts, 'token count')} from {report.cases[0].num_tokens} to "
            f"{report.cases[-1].num_tokens}{_agreement(equal)}."
        )
    sentences += [_about_closeness(strategy) for strategy in others if strategy.status == "close"]
    return sentences


def _about_closeness(strategy: StrategyReport) -> str:
    """Says how a strategy that rounds otherwise compares with eager's own rounding."""
    ratios = [
        values.max_error / values.eager_error
        for values in strategy.values
        if values.max_error is not None and values.eager_error
    ]
    if not ratios:
        return f"{strategy.strategy} ran at no token count."
    num_excused = sum(values.num_excused for values in strategy.values)
    num_rows = sum(values.num_rows for values in strategy.values)
    tokens = "all next tokens are padded eager's"
    if num_excused:
        tokens = f"{num_excused} of {num_rows} next tokens differ from padded eager's, each a tie"
    return (
        f"{strategy.strategy} is at most {max(ratios):.2f} times as far from the model in a wider dtype as padded "
        f"eager is; {tokens}."
    )


def _agreement(strategies: list[StrategyReport]) -> str:
    agreements = [
        values.next_token_agreement
        for strategy in strategies
        for values in strategy.values
        if values.next_token_agreement is not None
    ]
    if not agreements:
        return ""
    share = "all" if min(agreements) == 1.0 else f"at least {100 * min(agreements):.2f} % of"
    return f", and with unpadded eager in {share} next tokens"


def difference_in_words(strategy: StrategyReport) -> str:
    """Returns where a strategy first differs from padded eager, with both sides."""
    found = strategy.first_difference
    assert found is not None, "only a wrong strategy has a difference"
    where = f"at {found.num_tokens} tokens (padded to {found.padded_size}), input {found.input_index}"
    if found.index:
        where += f", row {found.index[0]}"
    if len(found.index) > 1:
        where += f", column {', '.join(map(str, found.index[1:]))}"
    return f"{where}, padded eager has {found.expected} and it has {found.got}"


def paired_ratio(report: ComparisonReport, one: str, other: str, num_tokens: int) -> Median | None:
    """Returns the median over rounds of one strategy's latency over another's; None if not timed."""
    times = {
        strategy.strategy: strategy.times_at(num_tokens)
        for strategy in report.strategies
        if strategy.strategy in (one, other)
    }
    one_times, other_times = times[one], times[other]
    if one_times is None or other_times is None:
        return None
    pairs = zip(one_times.samples_s, other_times.samples_s, strict=True)
    return median_of([one_s / other_s for one_s, other_s in pairs])


def fastest_at(report: ComparisonReport, num_tokens: int) -> tuple[str, ...]:
    """Returns the fastest strategy at a token count and those not told apart from it."""
    timed = [(times.latency_s.value, strategy.strategy) for strategy in report.strategies
             if (times := strategy.times_at(num_tokens)) is not None]  # fmt: skip
    if not timed:
        return ()
    best = min(timed)[1]
    level = []
    for _, name in timed:
        ratio = paired_ratio(report, name, best, num_tokens)
        if name == best or (ratio is not None and ratio.low <= 1.0):
            level.append(name)
    return tuple(level)


def _about_speed(report: ComparisonReport) -> list[str]:
    """One sentence for each stretch of token counts with the same winners, if those are few."""
    counts = [case.num_tokens for case in report.cases]
    grouped = groupby(counts, key=lambda count: fastest_at(report, count))
    stretches = [(winners, list(stretch)) for winners, stretch in grouped if winners]
    if len(stretches) > _MOST_STRETCHES:
        return _about_wins(report, stretches)
    sentences = []
    for winners, stretch in stretches:
        first, last = stretch[0], stretch[-1]
        where = f"At {first} tokens" if first == last else f"From {first} to {last} tokens"
        what = f"{winners[0]} is fastest" if len(winners) == 1 else f"{enumerated(winners)} are level"
        sentences.append(f"{where} {what}{_ratios(report, winners, stretch)}.")
    return sentences


def _about_wins(report: ComparisonReport, stretches: list[tuple[tuple[str, ...], list[int]]]) -> list[str]:
    """One sentence for each strategy: how often it wins, and between which token counts."""
    num_counts = sum(len(stretch) for _, stretch in stretches)
    sentences = []
    for strategy in report.strategies:
        won = [count for winners, stretch in stretches if strategy.strategy in winners for count in stretch]
        if won:
            where = f"at {won[0]}" if len(won) == 1 else f"between {won[0]} and {won[-1]}"
            sentences.append(
                f"{strategy.strategy} is fastest, or level with the fastest, at {len(won)} of {num_counts} "
                f"token counts, {where}{_ratios(report, (strategy.strategy,), won)}."
            )
    return sentences


def _ratios(report: ComparisonReport, winners: tuple[str, ...], counts: list[int]) -> str:
    ratios = [
        times.ratio_to_eager.value
        for strategy in report.strategies
        if strategy.strategy in winners
        for count in counts
        if (times := strategy.times_at(count)) is not None and times.ratio_to_eager is not None
    ]
    if not ratios:
        return ""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f" ({low if low == high else f'{low} to {high}'} of eager's latency)"


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
