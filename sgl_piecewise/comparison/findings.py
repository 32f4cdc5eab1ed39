"""Sentences about values and speed, for whatever was compared with eager.

Says only what the numbers bear: something is faster where the interval of the paired ratio says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from .intervals import median_of
from .records import CaseTimes, CaseValues, FirstDifference
from .words import counted, enumerated

Timed = Mapping[str, Sequence[CaseTimes]]
"""By name, one entry per size; those without times are there too."""

# Beyond this a paragraph of stretches says less than a count of wins.
_MOST_STRETCHES = 5


def closeness_in_words(name: str, values: Sequence[CaseValues]) -> str:
    """Returns how something that rounds otherwise compares with eager's own rounding."""
    ratios = [
        entry.max_error / entry.eager_error
        for entry in values
        if entry.max_error is not None and entry.eager_error
    ]
    if not ratios:
        return f"{name} ran at no token count."
    num_excused = sum(entry.num_excused for entry in values)
    num_rows = sum(entry.num_rows for entry in values)
    tokens = "all next tokens are padded eager's"
    if num_excused:
        tokens = f"{num_excused} of {num_rows} next tokens differ from padded eager's, each a tie"
    return (
        f"{name} is at most {max(ratios):.2f} times as far from the model in a wider dtype as padded "
        f"eager is; {tokens}."
    )


def agreement_in_words(values: Sequence[CaseValues]) -> str:
    """Returns the end of a sentence: in how many next tokens unpadded eager is met; empty if none was looked at."""
    agreements = [entry.next_token_agreement for entry in values if entry.next_token_agreement is not None]
    if not agreements:
        return ""
    share = "all" if min(agreements) == 1.0 else f"at least {100 * min(agreements):.2f} % of"
    return f", and with unpadded eager in {share} next tokens"


def difference_in_words(found: FirstDifference, unit: str = "token") -> str:
    """Returns where something first differs from padded eager, with both sides.

    Args:
        found: Where.
        unit: What its ``num_tokens`` counts.
    """
    where = f"at {counted(found.num_tokens, unit)} (padded to {found.padded_size}), input {found.input_index}"
    if found.index:
        where += f", row {found.index[0]}"
    if len(found.index) > 1:
        where += f", column {', '.join(map(str, found.index[1:]))}"
    return f"{where}, padded eager has {found.expected} and it has {found.got}"


def fastest(timed: Timed, size: int) -> tuple[str, ...]:
    """Returns the fastest at a size and those not told apart from it."""
    of_size = {
        name: entry for name, entries in timed.items() for entry in entries if entry.num_tokens == size
    }
    if not of_size:
        return ()
    best = min(of_size, key=lambda name: (of_size[name].latency_s.value, name))
    return tuple(
        name
        for name, entry in of_size.items()
        if name == best or _paired_ratio_low(entry, of_size[best]) <= 1.0
    )


def _paired_ratio_low(one: CaseTimes, other: CaseTimes) -> float:
    """Lower bound of the median over rounds of one's latency over the other's."""
    pairs = zip(one.samples_s, other.samples_s, strict=True)
    return median_of([one_s / other_s for one_s, other_s in pairs]).low


def speed_in_words(timed: Timed, sizes: Sequence[int], *, unit: str, lead: str = "") -> list[str]:
    """Returns one sentence for each stretch of sizes with the same winners, if those are few.

    Args:
        timed: What was timed.
        sizes: At which sizes, ascending.
        unit: What a size counts.
        lead: Before every sentence.
    """
    grouped = groupby(sizes, key=lambda size: fastest(timed, size))
    stretches = [(winners, list(stretch)) for winners, stretch in grouped if winners]
    if len(stretches) > _MOST_STRETCHES:
        return _wins(timed, stretches, unit, lead)
    sentences = []
    for winners, stretch in stretches:
        first, last = stretch[0], stretch[-1]
        at = "at" if lead else "At"
        where = f"{at} {counted(first, unit)}"
        if first != last:
            where = f"{'from' if lead else 'From'} {first} to {counted(last, unit)}"
        what = f"{winners[0]} is fastest" if len(winners) == 1 else f"{enumerated(winners)} are level"
        sentences.append(f"{lead}{where} {what}{_ratios(timed, winners, stretch)}.")
    return sentences


def _wins(
    timed: Timed, stretches: list[tuple[tuple[str, ...], list[int]]], unit: str, lead: str
) -> list[str]:
    """One sentence for each: how often it wins, and between which sizes."""
    num_sizes = sum(len(stretch) for _, stretch in stretches)
    sentences = []
    for name in timed:
        won = [size for winners, stretch in stretches if name in winners for size in stretch]
        if won:
            where = f"at {won[0]}" if len(won) == 1 else f"between {won[0]} and {won[-1]}"
            sentences.append(
                f"{lead}{name} is fastest, or level with the fastest, at {len(won)} of {num_sizes} "
                f"{unit} counts, {where}{_ratios(timed, (name,), won)}."
            )
    return sentences


def _ratios(timed: Timed, winners: tuple[str, ...], sizes: list[int]) -> str:
    ratios = [
        entry.ratio_to_eager.value
        for name in winners
        for entry in timed[name]
        if entry.num_tokens in sizes and entry.ratio_to_eager is not None
    ]
    if not ratios:
        return ""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f" ({low if low == high else f'{low} to {high}'} of eager's latency)"
