"""The end-to-end arms as a table: a column for each plan, rows for first tokens and for decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..findings import difference_in_words
from ..layout import Layout, agreement, error_ratio, largest_difference, status_cell
from ..records import CaseValues
from ..words import in_words_bytes, in_words_s, three_digits
from .report import EndToEndReport, PlanReport

Cell = Callable[[PlanReport], "str | Text"]


def rendered_plans(report: EndToEndReport, width: int) -> RenderableType:
    """Returns the table for a console of ``width`` columns, or one line that says why there is none."""
    if report.why_none is not None:
        return Text(f"No end-to-end arms: {report.why_none}.", style="dim")
    layout = Layout(width, len(report.plans))
    others = report.plans[1:]
    tables = [
        _table(report, (report.plans[0], *(others[index] for index in group)), layout)
        for group in layout.groups(len(others))
    ]
    title = Text("End to end, through the engine", style="bold")
    legend = Text(
        "A plan is DECODE+EXTEND, how decoding and how prompts run; one alone is both. First token: from scheduling a "
        f"prompt to its token and text. Decode: tokens of all requests a second, each with {report.context_tokens} "
        "tokens before; below it the ratio of a step to eager's. Values: logits with given tokens, as above.",
        style="dim",
    )
    return Group(title, *tables, legend)


def plan_notes(report: EndToEndReport) -> list[str]:
    """Returns what went wrong, in full; a line each."""
    return [line for plan in report.plans for line in _notes_of(plan)]


def _notes_of(plan: PlanReport) -> Iterator[str]:
    if plan.failure is not None:
        yield f"{plan.plan} end to end: {plan.failure}"
    for shape, reason in (plan.build.failures if plan.build is not None else {}).items():
        yield f"{plan.plan} end to end, {shape}: {reason}"
    for phase, what, unit in zip(plan.phases, ("prompts", "decoding"), ("token", "request"), strict=True):
        if phase.first_difference is not None:
            yield f"{plan.plan} is WRONG end to end {difference_in_words(phase.first_difference, unit)}."
        for problem in phase.problems:
            yield f"{plan.plan} end to end, {what} at {problem.num_tokens}: {problem.reason}"


def _table(report: EndToEndReport, plans: Sequence[PlanReport], layout: Layout) -> Table:
    table = layout.table("plan", [(plan.plan, plan.has_failed) for plan in plans])

    def add(label: str, cell: Cell, ends_section: bool = False) -> None:
        table.add_row(label, *(cell(plan) for plan in plans), end_section=ends_section)

    add("values", lambda plan: status_cell(plan.status))
    add("attention", _attention, True)
    add("build", lambda plan: "-" if plan.build is None else in_words_s(plan.build.total_s))
    add(" graphs", lambda plan: "-" if plan.build is None else in_words_s(plan.build.graphs_s))
    add("shapes with a graph", lambda plan: "-" if plan.build is None else str(plan.build.num_graphs))
    add("graph memory", _graph_memory, True)
    add("max difference", lambda plan: largest_difference(_values(plan), "max_diff_to_padded_eager"))
    add(" unpadded", lambda plan: largest_difference(_values(plan), "max_diff_to_eager"))
    if any(plan.status == "close" for plan in report.plans):
        add("/ eager's error", lambda plan: error_ratio(_values(plan)))
    add("next token", lambda plan: agreement(_values(plan)), True)
    add("first token", lambda plan: layout.head("latency", plan.status == "reference"))
    for index, length in enumerate(report.prompt_lengths):
        is_last = index == len(report.prompt_lengths) - 1
        add(f"{length} tokens", functools.partial(_first_token, size=length, layout=layout), is_last)
    add("decode", lambda plan: layout.head("tokens/s", plan.status == "reference"))
    for batch_size in report.batch_sizes:
        label = f"{batch_size} request{'' if batch_size == 1 else 's'}"
        add(label, functools.partial(_decode, size=batch_size, layout=layout))
    return table


def _values(plan: PlanReport) -> list[CaseValues]:
    return [entry for phase in plan.phases for entry in phase.values]


def _attention(plan: PlanReport) -> str:
    """One name where both phases have the same, else as plans are named: that of decoding first."""
    decode, prompts = plan.attention.decode, plan.attention.prompts
    return decode if decode == prompts else f"{decode}+{prompts}"


def _graph_memory(plan: PlanReport) -> str:
    if plan.build is None or not plan.build.num_graphs:
        return "-"
    return in_words_bytes(plan.build.pool_bytes)


def _first_token(plan: PlanReport, size: int, layout: Layout) -> str:
    problem = plan.first_token.problem_at(size)
    return layout.latency(plan.first_token.times_at(size), None if problem is None else problem.reason)


def _decode(plan: PlanReport, size: int, layout: Layout) -> str:
    problem, rate, times = plan.decode.problem_at(size), plan.rate_at(size), plan.decode.times_at(size)
    if problem is not None or rate is None or times is None:
        return layout.latency(None, None if problem is None else problem.reason)
    text = f"{three_digits(rate.tokens_per_s.value)} ±{three_digits(rate.tokens_per_s.spread)}"
    return layout.beside(text, times.ratio_to_eager)
