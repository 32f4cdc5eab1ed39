"""The report as one table: a column for each strategy, a row for each thing asked.

Strategies stand side by side so that the table grows downwards with the token counts and stays
readable at 80 columns; strategies that do not fit go into a second table with eager repeated.
This module must not compute anything that is not in the report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .end_to_end.table import plan_notes, rendered_plans
from .findings import difference_in_words
from .layout import Layout, agreement, error_ratio, largest_difference, status_cell
from .records import StrategyReport
from .report import ComparisonReport
from .words import counted, in_words_bytes, in_words_s

Cell = Callable[[StrategyReport], "str | Text"]


def rendered_report(report: ComparisonReport, width: int) -> RenderableType:
    """Returns title, table, notes and verdict for a console of ``width`` columns."""
    layout = Layout(width, len(report.strategies))
    others = report.strategies[1:]
    tables = [
        _table(report, (report.eager, *(others[index] for index in group)), layout)
        for group in layout.groups(len(others))
    ]
    parts: list[RenderableType] = [_title(report), *tables, _legend(report)]
    parts.append(Padding(rendered_plans(report.end_to_end, width), (1, 0, 0, 0)))
    notes = _notes(report)
    if notes:
        parts.append(Padding(notes, (1, 0, 0, 0)))
    parts.append(Padding(Text(report.verdict), (1, 0, 0, 0)))
    return Group(*parts)


def print_report(report: ComparisonReport, console: Console) -> None:
    """Prints the report on ``console`` at its width."""
    console.print(rendered_report(report, console.width))


def _title(report: ComparisonReport) -> Text:
    environment = report.environment
    title = Text()
    title.append(f"{report.model.description}; on {environment.device}", style="bold")
    if environment.is_emulated:
        title.append("\nemulated: times say nothing about a GPU", style="bold yellow")
    inputs = report.inputs
    title.append(f"\nInput: {inputs.source}")
    if inputs.num_tokens is not None:
        title.append(f"; {inputs.num_tokens} tokens")
    if inputs.is_repeated:
        title.append(", repeated to fill the largest size")
    sizes = report.capture_sizes
    shown = ", ".join(map(str, sizes)) if len(sizes) <= 8 else f"{len(sizes)} from {sizes[0]} to {sizes[-1]}"
    title.append(f"\nCapture sizes: {shown}")
    load = "" if report.model.load_s is None else f"loading the model {in_words_s(report.model.load_s)}, "
    title.append(
        f"\nNot in any build: {load}first eager forwards {in_words_s(report.eager_sweep.first_s)}, "
        f"first capture {in_words_s(report.first_capture_s)}. "
        f"One eager forward at each capture size: {in_words_s(report.eager_sweep.warm_s)}"
    )
    return title


def _table(report: ComparisonReport, strategies: Sequence[StrategyReport], layout: Layout) -> Table:
    table = layout.table("strategy", [(strategy.strategy, strategy.has_failed) for strategy in strategies])

    def add(label: str, cell: Cell, ends_section: bool = False) -> None:
        table.add_row(label, *(cell(strategy) for strategy in strategies), end_section=ends_section)

    add("values", lambda s: status_cell(s.status), True)
    add("build", lambda s: "-" if s.build is None else in_words_s(s.build.total_s))
    for phase in _phases(strategies):
        add(f" {phase.replace('_', ' ')}", functools.partial(_phase, phase=phase))
    add(" other", lambda s: "-" if s.build is None else in_words_s(s.build.unattributed_s))
    add(" compiler's share", _compile_share)
    add(" / eager forwards", lambda s: _build_ratio(report, s), True)
    if any(strategy.build is not None and strategy.build.import_s for strategy in strategies):
        add(
            "imports, not counted",
            lambda s: "-" if not (s.build and s.build.import_s) else in_words_s(s.build.import_s),
            True,
        )
    add("graph segments", lambda s: _segments(s, "num_graph_segments"))
    add("breaks", lambda s: _segments(s, "num_breaks"), True)
    add("graph memory", lambda s: "-" if s.memory is None else in_words_bytes(s.memory.allocator_bytes))
    add(" largest alone", lambda s: "-" if s.memory is None else in_words_bytes(s.memory.largest_alone_bytes))
    if any(strategy.memory is not None and strategy.memory.estimate for strategy in strategies):
        add(" estimated", _estimate)
    add(" driver's own", _driver, True)
    add("max difference", lambda s: largest_difference(s.values, "max_diff_to_padded_eager"))
    add(" unpadded", lambda s: largest_difference(s.values, "max_diff_to_eager"))
    if any(strategy.status == "close" for strategy in report.strategies):
        add("/ eager's error", lambda s: error_ratio(s.values))
    add("next token", lambda s: agreement(s.values), True)
    add("tokens", lambda s: layout.head("latency", s.status == "reference"))
    for case in report.cases:
        label = str(case.num_tokens)
        if case.num_tokens != case.capture_size:
            label += f" in {case.capture_size}"
        cell = functools.partial(_latency, num_tokens=case.num_tokens, layout=layout)
        add(label, cell)
    return table


def _phases(strategies: Sequence[StrategyReport]) -> list[str]:
    """Every phase of any build, in the order of the first build that has it."""
    return list(
        dict.fromkeys(
            phase
            for strategy in strategies
            if strategy.build is not None
            for phase in strategy.build.phases_s
        )
    )


def _phase(strategy: StrategyReport, phase: str) -> str:
    if strategy.build is None or phase not in strategy.build.phases_s:
        return "-"
    return in_words_s(strategy.build.phases_s[phase])


def _build_ratio(report: ComparisonReport, strategy: StrategyReport) -> str:
    sweep = report.eager_sweep
    if strategy.build is None or sweep.warm_s == 0 or sweep.num_forwards != len(report.capture_sizes):
        return "-"
    return f"{strategy.build.total_s / sweep.warm_s:.2f}"


def _compile_share(strategy: StrategyReport) -> str:
    share = None if strategy.build is None else strategy.build.compile_share
    return "-" if not share else f"{share:.0%}"


def _segments(strategy: StrategyReport, what: str) -> str:
    """One number where all sizes agree, else the range."""
    if strategy.build is None:
        return "-"
    numbers = {getattr(size, what) for size in strategy.build.sizes if size.error is None}
    if not numbers:
        return "-"
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _estimate(strategy: StrategyReport) -> str:
    if strategy.memory is None or strategy.memory.estimate is None:
        return "-"
    estimate, ratio = strategy.memory.estimate, strategy.memory.estimate_ratio
    if estimate.reserved_bytes is None or ratio is None:
        return "not possible"
    bound = "<= " if estimate.is_upper_bound else ""
    return f"{bound}{in_words_bytes(estimate.reserved_bytes)}\n{ratio:.2f} of it"


def _driver(strategy: StrategyReport) -> str:
    if strategy.memory is None or strategy.build is None:
        return "-"
    if strategy.memory.driver_bytes is None:
        return "not known"
    num_graphs = sum(size.num_graph_segments for size in strategy.build.sizes if size.error is None)
    each = strategy.memory.driver_bytes // max(1, num_graphs)
    return f"{in_words_bytes(strategy.memory.driver_bytes)}\n{in_words_bytes(each)} each"


def _latency(strategy: StrategyReport, num_tokens: int, layout: Layout) -> str:
    problem = strategy.problem_at(num_tokens)
    return layout.latency(strategy.times_at(num_tokens), None if problem is None else problem.reason)


def _legend(report: ComparisonReport) -> Text:
    levels = [times.latency_s.confidence for strategy in report.strategies for times in strategy.times]
    confidence = f"{100 * min(levels):.0f} %" if levels else "95 %"
    rounds = counted(report.options["num_rounds"], "round")
    return Text(
        "/ eager forwards: build time over one eager forward at each capture size. Max difference: to eager "
        "at the same padded size; unpadded: to eager on the real tokens alone. Next token: rows whose top-1 "
        f"is eager's. / eager's error: largest difference to the model in a wider dtype, over padded eager's own. "
        f"Latency: median of {rounds} ± half the distance between the quartiles. Ratio: median "
        f"over rounds of latency over eager's, with its interval of at least {confidence} confidence. "
        '"24 in 32": 24 tokens padded to 32.',
        style="dim",
    )


def _notes(report: ComparisonReport) -> Text | None:
    """What went wrong, in full."""
    lines = []
    for strategy in report.strategies:
        if strategy.failure is not None:
            lines.append(f"{strategy.strategy} FAILED: {strategy.failure}")
        if strategy.first_difference is not None:
            lines.append(f"{strategy.strategy} is WRONG {difference_in_words(strategy.first_difference)}.")
        sizes = strategy.build.sizes if strategy.build is not None else ()
        estimate = strategy.memory.estimate if strategy.memory is not None else None
        if estimate is not None and estimate.missing_because is not None:
            lines.append(f"{strategy.strategy}: no memory estimate: {estimate.missing_because}")
        lines.extend(
            f"{strategy.strategy}, capture size {size.size}: {size.error}"
            for size in sizes
            if size.error is not None
        )
        lines.extend(
            f"{strategy.strategy} at {problem.num_tokens} tokens: {problem.reason}"
            for problem in strategy.problems
        )
    lines.extend(plan_notes(report.end_to_end))
    return Text("\n".join(lines), style="red") if lines else None
