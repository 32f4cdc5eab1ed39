"""Profiles as a table: a column for each, a row for each named work; then traces, pieces and sizes in a line each.

This module must not compute anything that is not in the profile.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sgl_piecewise.runtime.build_profile import BuildProfile
from sgl_piecewise.runtime.records import PoolReservation

from ..comparison.words import counted, in_words_bytes, in_words_s, three_digits
from .groups import group_of, in_words, ordered


def print_profiles(profiles: Mapping[str, BuildProfile], console: Console) -> None:
    """Prints profiles side by side.

    Args:
        profiles: By title; the title of a single one is not shown.
        console: Where.
    """
    console.print(rendered_profiles(profiles))


def rendered_profiles(profiles: Mapping[str, BuildProfile]) -> RenderableType:
    """Returns title, table, and what was traced, compiled and captured."""
    first = next(iter(profiles.values()))
    parts: list[RenderableType] = [_title(first), _phases(profiles)]
    for title, profile in profiles.items():
        prefix = f"{title}: " if len(profiles) > 1 else ""
        parts.append(Padding(Text("\n".join(prefix + line for line in summary(profile))), (1, 0, 0, 0)))
    return Group(*parts)


def _title(profile: BuildProfile) -> Text:
    facts = profile.facts
    title = Text(f"{facts.get('description', 'A build')}; {facts.get('strategy', '')}", style="bold")
    if "device" in facts:
        title.append(f" on {facts['device']}")
    if facts.get("emulated") == "True":
        title.append("\nemulated: times say nothing about a GPU", style="bold yellow")
    return title


def _phases(profiles: Mapping[str, BuildProfile]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("named work")
    for title in profiles:
        table.add_column(title if len(profiles) > 1 else "seconds", justify="right")
        table.add_column("share", justify="right")
    group = ""
    names = {phase: 0.0 for profile in profiles.values() for phase in profile.phases_s}
    for phase in ordered(names):
        if group and group_of(phase) != group:
            table.add_section()
        group = group_of(phase)
        table.add_row(
            in_words(phase), *_cells(profiles, {t: p.phases_s.get(phase) for t, p in profiles.items()})
        )
    table.add_section()
    table.add_row("unattributed", *_cells(profiles, {t: p.unattributed_s for t, p in profiles.items()}))
    table.add_row(
        Text("from call to ready, and first replays", style="bold"),
        *_cells(profiles, {t: p.total_s for t, p in profiles.items()}),
    )
    return table


def _cells(profiles: Mapping[str, BuildProfile], seconds: Mapping[str, float | None]) -> list[str]:
    cells = []
    for title, profile in profiles.items():
        value = seconds[title]
        if value is None:
            cells += ["-", ""]
        else:
            share = value / profile.total_s if profile.total_s else 0.0
            cells += [in_words_s(value), f"{share * 100:.1f}%"]
    return cells


def summary(profile: BuildProfile) -> list[str]:
    """Returns what was built in a few lines."""
    compiling = _share(profile.compile_s, profile.ready_s)
    named = three_digits(profile.attributed_share * 100)
    lines = [
        f"ready after {in_words_s(profile.ready_s)}, of which compiling {compiling}; {named}% of the wall time is named"
    ]
    if profile.traces:
        lines.append(traces_in_words(profile))
    if profile.pieces:
        outcomes = {word: profile.num_pieces_with(word) for word in ("hit", "miss", "uncached")}
        found = ", ".join(f"{count} {word}" for word, count in outcomes.items() if count)
        lines.append(f"{counted(len(profile.pieces), 'piece')} compiled: {found}")
    if profile.sizes:
        warm_up_s = sum(size.warm_up_s for size in profile.sizes)
        capture_s = sum(size.capture_s for size in profile.sizes)
        lines.append(
            f"{counted(len(profile.sizes), 'size')}: {in_words_s(warm_up_s)} of warm-up, {in_words_s(capture_s)} of "
            "capture"
        )
    if profile.memory is not None:
        lines.append(memory_in_words(profile.memory))
    return lines


def memory_in_words(memory: PoolReservation) -> str:
    """Says what the graph pool reserved, and what was estimated."""
    text = (
        f"graph pool: {in_words_bytes(memory.reserved_bytes)} reserved, "
        f"{in_words_bytes(memory.largest_alone_bytes)} with the largest size alone"
    )
    estimate, ratio = memory.estimate, memory.estimate_ratio
    if estimate is None:
        return text
    if estimate.reserved_bytes is None or ratio is None:
        return f"{text}; no estimate: {estimate.missing_because}"
    bound = "at most " if estimate.is_upper_bound else ""
    return f"{text}; estimated {bound}{in_words_bytes(estimate.reserved_bytes)}, {ratio:.2f} of it"


def traces_in_words(profile: BuildProfile) -> str:
    """Says what Dynamo traced, how much of it was equal to what it had traced before, and what that cost."""
    traces = profile.traces
    trace_s = sum(trace.trace_s for trace in traces)
    num_pieces = sum(trace.num_pieces for trace in traces)
    text = f"{counted(len(traces), 'trace')} with {counted(num_pieces, 'piece')}, in {in_words_s(trace_s)} of Dynamo"
    most_uses = max(trace.most_uses for trace in traces)
    num_layer_calls = sum(trace.num_layer_calls for trace in traces)
    if num_layer_calls:
        text += f"; {counted(num_layer_calls, 'layer')} run through shared traces"
    if most_uses > 1:
        repeated_s = sum(trace.repeated_trace_s for trace in traces)
        text += (
            f"; one piece is used {most_uses} times: equal layers were traced one by one, which cost about "
            f"{in_words_s(repeated_s)} of it"
        )
    return text


def _share(part_s: float, whole_s: float) -> str:
    return f"{in_words_s(part_s)} ({part_s / whole_s * 100:.0f}%)" if whole_s else in_words_s(part_s)
