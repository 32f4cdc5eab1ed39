"""The time line of a build: nested, named spans of work, and who listens to them.

Code that does a step of a build says so with `span`; a step costs one look-up where nobody listens. One
invariant: spans of a line nest, so that every moment belongs to the innermost span that is open. This module
must not know what the steps are.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

Attribute = str | int | float | bool | None | list[str]

CONTAINER = None
"""The phase of a span that only holds others: its own time is nobody's."""

INHERITED = ""
"""The phase of a span that is part of the named work around it, or is named by itself."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One step of a build.

    Attributes:
        name: What was done, for example ``compile piece``.
        phase: The named work that its own time counts as, or None where it only holds others.
        begin_s: Seconds from the begin of the time line.
        end_s: Likewise.
        parent: Index of the span around it in the time line, or None.
        attributes: What it was about: piece key, cache hit, kernel names, capture size.
    """

    name: str
    phase: str | None
    begin_s: float
    end_s: float
    parent: int | None
    attributes: dict[str, Attribute] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Seconds from begin to end."""
        return self.end_s - self.begin_s


@dataclass
class _OpenSpan:
    name: str
    phase: str | None
    begin_s: float
    parent: int | None
    attributes: dict[str, Attribute]
    end_s: float | None = None


class TimeLine:
    """Collects the spans of one thread.

    Args:
        started_s: When it began, in seconds of ``time.perf_counter``; now if None.
        on_idle: Called when the last open span has ended.
    """

    def __init__(self, started_s: float | None = None, on_idle: Callable[[], None] | None = None) -> None:
        self._on_idle = on_idle
        self._started_s = time.perf_counter() if started_s is None else started_s
        self._thread = threading.get_ident()
        self._spans: list[_OpenSpan] = []
        self._open: list[int] = []
        self._end_s: float | None = None

    def begin(
        self, name: str, phase: str | None, attributes: Mapping[str, Attribute], *, at_s: float | None = None
    ) -> int | None:
        """Opens a span inside the innermost open one.

        Args:
            name: What is done.
            phase: A name, `CONTAINER` or `INHERITED`.
            attributes: What it is about.
            at_s: When it began, in seconds of ``time.perf_counter``; now if None.

        Returns:
            A number for `end`, or None on another thread than the time line's.
        """
        if threading.get_ident() != self._thread:
            return None
        now_s = self._since_start(at_s)
        parent = self._open[-1] if self._open else None
        if phase == INHERITED:
            around = None if parent is None else self._spans[parent].phase
            phase = name if around is None else around
        self._spans.append(_OpenSpan(name, phase, now_s, parent, dict(attributes)))
        self._open.append(len(self._spans) - 1)
        return self._open[-1]

    def end(
        self,
        index: int | None,
        attributes: Mapping[str, Attribute] | None = None,
        *,
        at_s: float | None = None,
    ) -> None:
        """Closes a span, and what is still open inside it."""
        if index is None or index not in self._open:
            return
        now_s = self._since_start(at_s)
        self._spans[index].attributes.update(attributes or {})
        while True:
            innermost = self._open.pop()
            self._spans[innermost].end_s = now_s
            if innermost == index:
                break
        if not self._open and self._on_idle is not None:
            self._on_idle()

    def note(self, index: int | None, attributes: Mapping[str, Attribute]) -> None:
        """Adds attributes to a span, open or not."""
        if index is not None:
            self._spans[index].attributes.update(attributes)

    def innermost(self, name: str) -> int | None:
        """Returns the innermost open span of a name, or None."""
        return next((index for index in reversed(self._open) if self._spans[index].name == name), None)

    def finish(self) -> None:
        """Ends the time line and what is open on it; later calls change nothing."""
        if self._end_s is None:
            self._end_s = self._since_start(None)
            for index in self._open:
                self._spans[index].end_s = self._end_s
            self._open.clear()

    @property
    def total_s(self) -> float:
        """Seconds from its begin to its end, or to now."""
        return self._since_start(None) if self._end_s is None else self._end_s

    @property
    def spans(self) -> tuple[Span, ...]:
        """Every span in order of its begin; one still open ends now."""
        now_s = self.total_s
        return tuple(
            Span(
                name=one.name,
                phase=one.phase,
                begin_s=one.begin_s,
                end_s=now_s if one.end_s is None else one.end_s,
                parent=one.parent,
                attributes=dict(one.attributes),
            )
            for one in self._spans
        )

    def _since_start(self, at_s: float | None) -> float:
        now_s = (time.perf_counter() if at_s is None else at_s) - self._started_s
        # What is back-dated must not begin before what is around it, nor before what came before it.
        earliest_s = self._spans[self._open[-1]].begin_s if self._open else 0.0
        return max(now_s, earliest_s)


class NotedSpan:
    """What `span` gives: takes attributes that are known only while or after the step runs."""

    def __init__(self, places: tuple[tuple[TimeLine, int | None], ...]) -> None:
        self._places = places

    def note(self, **attributes: Attribute) -> None:
        """Adds attributes to the span, on every time line that has it."""
        for line, index in self._places:
            line.note(index, attributes)

    @property
    def is_heard(self) -> bool:
        """Whether anyone listens: what only they want to know need not be found out otherwise."""
        return bool(self._places)


_NOBODY_LISTENS = NotedSpan(())
_lines: contextvars.ContextVar[tuple[TimeLine, ...]] = contextvars.ContextVar(
    "sgl_piecewise_time_lines", default=()
)


def listening() -> tuple[TimeLine, ...]:
    """Returns the time lines that hear spans of this context."""
    return _lines.get()


def start_listening(line: TimeLine) -> None:
    """Puts the spans of this context on a time line from now on, besides those that hear them already."""
    _lines.set((*_lines.get(), line))


def stop_listening(line: TimeLine) -> None:
    """Undoes `start_listening`."""
    _lines.set(tuple(other for other in _lines.get() if other is not line))


@contextlib.contextmanager
def listen(line: TimeLine) -> Iterator[TimeLine]:
    """Puts the spans of the block on a time line, besides those that hear them already."""
    start_listening(line)
    try:
        yield line
    finally:
        stop_listening(line)


@contextlib.contextmanager
def span(name: str, phase: str | None = INHERITED, **attributes: Attribute) -> Iterator[NotedSpan]:
    """Names the block's work, for whoever listens.

    Args:
        name: What is done.
        phase: The named work that the block's own time counts as: a name, `CONTAINER`, or `INHERITED`.
        **attributes: What it is about.

    Yields:
        Where to add attributes.
    """
    lines = _lines.get()
    if not lines:
        yield _NOBODY_LISTENS
        return
    places = tuple((line, line.begin(name, phase, attributes)) for line in lines)
    try:
        yield NotedSpan(places)
    finally:
        for line, index in places:
            line.end(index)


def seconds_by_phase(spans: tuple[Span, ...]) -> dict[str, float]:
    """Adds up each span's own time (its time less that of the spans in it) by phase.

    Returns:
        Seconds by phase, in order of first appearance. What is in no phase is left out.
    """
    own_s = [one.duration_s for one in spans]
    for one in spans:
        if one.parent is not None:
            own_s[one.parent] -= one.duration_s
    totals: dict[str, float] = {}
    for one, seconds in zip(spans, own_s, strict=True):
        if one.phase is not None:
            totals[one.phase] = totals.get(one.phase, 0.0) + max(0.0, seconds)
    return totals
