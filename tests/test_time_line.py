"""Time lines: spans nest, every moment belongs to the innermost one, and nobody pays who does not listen."""

from __future__ import annotations

import threading
import time

import pytest

from sgl_piecewise.runtime.time_line import (
    CONTAINER,
    Span,
    TimeLine,
    listen,
    listening,
    seconds_by_phase,
    span,
)


def placed(name: str, phase: str | None, begin_s: float, end_s: float, parent: int | None) -> Span:
    return Span(name=name, phase=phase, begin_s=begin_s, end_s=end_s, parent=parent)


def test_spans_nest_and_keep_what_they_are_about() -> None:
    line = TimeLine()
    with listen(line), span("build", CONTAINER), span("capture", "capture", size=4) as noted:
        noted.note(num_breaks=2)
    outer, inner = line.spans
    assert (outer.name, outer.phase, outer.parent) == ("build", None, None)
    assert (inner.parent, inner.attributes) == (0, {"size": 4, "num_breaks": 2})
    assert outer.begin_s <= inner.begin_s <= inner.end_s <= outer.end_s


def test_own_time_goes_to_the_innermost_phase_and_containers_have_none() -> None:
    spans = (
        placed("build", None, 0.0, 10.0, None),
        placed("warm_up", "warm_up", 1.0, 8.0, 0),
        placed("dynamo", None, 2.0, 6.0, 1),
        placed("trace", "dynamo trace", 2.0, 5.0, 2),
    )
    seconds = seconds_by_phase(spans)
    assert seconds == {"warm_up": pytest.approx(3.0), "dynamo trace": pytest.approx(3.0)}


def test_an_inherited_phase_is_that_of_the_named_work_around_or_its_own_name() -> None:
    line = TimeLine()
    with listen(line):
        with span("capture", "capture"), span("detail"):
            pass
        with span("build", CONTAINER), span("detail"):
            pass
    assert [one.phase for one in line.spans] == ["capture", "capture", None, "detail"]


def test_nothing_is_kept_where_nobody_listens() -> None:
    with span("capture", "capture", size=4) as noted:
        noted.note(num_breaks=2)
        assert not noted.is_heard
    assert listening() == ()


def test_a_span_that_nobody_hears_costs_microseconds() -> None:
    """A generous limit: the point is that nothing is read, stored or formatted."""
    begin = time.perf_counter()
    for _ in range(10_000):
        with span("capture", "capture", size=4):
            pass
    assert (time.perf_counter() - begin) / 10_000 < 50e-6


def test_two_listeners_hear_the_same_and_one_may_stop_first() -> None:
    outer, inner = TimeLine(), TimeLine()
    with listen(outer):
        with listen(inner), span("one"):
            pass
        with span("two"):
            pass
    assert [one.name for one in outer.spans] == ["one", "two"]
    assert [one.name for one in inner.spans] == ["one"]


def test_other_threads_are_not_on_the_time_line() -> None:
    """Their spans would not nest in those of this one."""
    line = TimeLine()

    def work() -> None:
        with listen(line), span("elsewhere"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert line.spans == ()


def test_a_span_left_open_ends_with_the_one_around_it() -> None:
    line = TimeLine()
    outer = line.begin("outer", CONTAINER, {})
    line.begin("inner", "work", {})
    line.end(outer)
    assert line.spans[1].end_s == line.spans[0].end_s
    line.end(outer)  # again: nothing to do


def test_an_error_ends_the_span() -> None:
    line = TimeLine()
    with listen(line):
        with pytest.raises(KeyError), span("fails", "work"):
            raise KeyError
        with span("next", "work"):
            pass
    assert [one.parent for one in line.spans] == [None, None]


def test_what_is_back_dated_stays_inside_what_is_around_it() -> None:
    line = TimeLine()
    outer = line.begin("outer", CONTAINER, {})
    line.end(line.begin("early", "work", {}, at_s=0.0))
    line.end(outer)
    assert line.spans[1].begin_s >= line.spans[0].begin_s


def test_idle_is_told_when_the_last_open_span_has_ended() -> None:
    told: list[str] = []
    line = TimeLine(on_idle=lambda: told.append("idle"))
    with listen(line), span("outer"):
        with span("inner"):
            pass
        assert told == []
    assert told == ["idle"]
