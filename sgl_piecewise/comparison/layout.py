"""How a comparison is laid out at a terminal: a column for each thing compared, several tables where they do not fit.

Knows widths and cells, not what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from .intervals import Median
from .records import CaseTimes, CaseValues
from .words import three_digits, time_scale

_LABEL_WIDTH = 20
_NARROW_CELL_WIDTH = 18
_WIDE_CELL_WIDTH = 36
_COLUMN_GAP = 1
_EDGES = 2


class Layout:
    """Columns that fit a console.

    Args:
        width: Of the console.
        num_columns: Things compared, the reference among them.

    Attributes:
        has_wide_cells: Whether a latency and its ratio stand side by side.
    """

    def __init__(self, width: int, num_columns: int) -> None:
        room = width - _LABEL_WIDTH - _EDGES
        self.has_wide_cells = room >= num_columns * (_WIDE_CELL_WIDTH + _COLUMN_GAP)
        cell_width = _WIDE_CELL_WIDTH if self.has_wide_cells else _NARROW_CELL_WIDTH
        self._num_others = max(1, room // (cell_width + _COLUMN_GAP) - 1)

    def groups(self, num_others: int) -> list[range]:
        """Returns which of the others stand in each table, beside the reference."""
        starts = range(0, num_others, self._num_others)
        return [range(start, min(start + self._num_others, num_others)) for start in starts] or [range(0)]

    def table(self, label: str, columns: Sequence[tuple[str, bool]]) -> Table:
        """Returns an empty table.

        Args:
            label: Head of the first column.
            columns: Name of each thing, and whether it has failed.
        """
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))
        table.add_column(label, width=_LABEL_WIDTH, no_wrap=False)
        for name, has_failed in columns:
            table.add_column(
                name,
                justify="right",
                min_width=_NARROW_CELL_WIDTH,
                style="red" if has_failed else "",
                header_style="bold red" if has_failed else "bold",
            )
        return table

    def head(self, what: str, is_reference: bool) -> Text:
        """Returns the cell over values that have a ratio to the reference's."""
        if is_reference:
            return Text(what, style="bold")
        return Text(f"{what}{'   ' if self.has_wide_cells else chr(10)}ratio to eager", style="bold")

    def latency(self, times: CaseTimes | None, problem: str | None) -> str:
        """Returns the cell of one latency, or what stands in its place."""
        if problem is not None:
            # What fits a cell; the notes have the rest.
            return "out of memory" if "out of memory" in problem.lower() else "no graph"
        if times is None:
            return "no speed"
        scale, unit = time_scale(times.latency_s.value)
        value, spread = times.latency_s.value * scale, times.latency_s.spread * scale
        latency = f"{three_digits(value)} ±{three_digits(spread)} {unit}"
        return self.beside(latency, times.ratio_to_eager)

    def beside(self, text: str, ratio: Median | None) -> str:
        """Returns a cell's text with its ratio to eager beside or below it."""
        if ratio is None:
            return text
        interval = f"{three_digits(ratio.value)} [{three_digits(ratio.low)}, {three_digits(ratio.high)}]"
        return f"{text:>16} {interval:>19}" if self.has_wide_cells else f"{text}\n{interval}"


def status_cell(status: str) -> Text:
    """Returns the cell of a status."""
    words = {
        "reference": Text("reference"),
        "equal": Text("bit-equal", style="green"),
        "close": Text("within tolerance", style="green"),
        "wrong": Text("WRONG", style="bold red"),
        "failed": Text("FAILED", style="bold red"),
        "left_out": Text("left out"),
    }
    return words[status]


def largest_difference(values: Sequence[CaseValues], what: str) -> str:
    """Returns the cell of the largest of one kind of difference."""
    differences = [getattr(entry, what) for entry in values]
    if not differences:
        return "-"
    if None in differences:
        return "not finite"
    largest = max(differences)
    return "0" if largest == 0 else f"{largest:.2g}"


def error_ratio(values: Sequence[CaseValues]) -> str:
    """Returns how many times eager's own error against the wide model something's is, at the worst size."""
    ratios = [
        entry.max_error / entry.eager_error
        for entry in values
        if entry.max_error is not None and entry.eager_error
    ]
    return f"{max(ratios):.2f}" if ratios else "-"


def agreement(values: Sequence[CaseValues]) -> str:
    """Returns the least part of next tokens that are eager's."""
    shares = [entry.next_token_agreement for entry in values if entry.next_token_agreement is not None]
    if not shares:
        return "-"
    least = min(shares)
    return "100 %" if least == 1.0 else f">= {100 * least:.2f} %"
