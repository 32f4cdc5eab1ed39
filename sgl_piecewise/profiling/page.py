"""Profiles as one HTML page: a time line of what was done when, without anything from outside.

The page's style and script stand in ``data/build_profile.html``; here its rows are made. A row is a strip of
segments, each the own time of a phase; where nothing is named the strip says so.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from sgl_piecewise.runtime.build_profile import (
    CAPTURE_SPAN,
    PIECE_SPAN,
    REPLAY_SPAN,
    TRACE_SPAN,
    WARM_UP_SPAN,
    BuildProfile,
)
from sgl_piecewise.runtime.time_line import Span

from ..comparison.words import counted, in_words_s
from .groups import GROUPS, UNATTRIBUTED, group_of, in_words, ordered
from .table import summary

_TEMPLATE = "build_profile.html"
_SIZE_SPANS = (WARM_UP_SPAN, CAPTURE_SPAN, REPLAY_SPAN, "first_call")
# Attributes that a row's label already says, or that only other code reads.
_NOT_SHOWN = ("piece", "size", "uses", "fn_name", "compile_id")

_Interval = tuple[float, float, str | None, Span | None]
"""Begin, end, phase, and the span whose own time it is (None outside of all)."""


def profile_page(profiles: Mapping[str, BuildProfile]) -> str:
    """Returns a self-contained page.

    Args:
        profiles: By title, in the order in which they are shown.
    """
    template = resources.files("sgl_piecewise").joinpath("data", _TEMPLATE).read_text(encoding="utf-8")
    first = next(iter(profiles.values()))
    title = f"{first.facts.get('description', 'Build')}, {first.facts.get('strategy', '')}"
    data = {
        "groups": list(GROUPS),
        "phases": [
            *map(in_words, ordered({name: 0.0 for one in profiles.values() for name in one.phases_s})),
            UNATTRIBUTED,
        ],
        "is_emulated": first.facts.get("emulated") == "True",
        "profiles": [_shown(name, profile) for name, profile in profiles.items()],
    }
    # A script element ends at the first "</", wherever it stands.
    text = json.dumps(data).replace("<", "\\u003c")
    return template.replace("{{title}}", html.escape(title)).replace("{{data}}", text)


def _shown(name: str, profile: BuildProfile) -> dict[str, Any]:
    phases = {**profile.phases_s, UNATTRIBUTED: profile.unattributed_s}
    return {
        "name": name,
        "total_s": profile.total_s,
        "total": in_words_s(profile.total_s),
        "facts": profile.facts,
        "summary": summary(profile),
        "phases": [
            {
                "name": in_words(phase),
                "group": group_of(None if phase == UNATTRIBUTED else phase),
                "seconds": phases[phase],
                "time": in_words_s(phases[phase]),
                "share": phases[phase] / profile.total_s if profile.total_s else 0.0,
            }
            for phase in (*ordered(profile.phases_s), UNATTRIBUTED)
        ],
        "rows": rows_of(profile),
    }


def rows_of(profile: BuildProfile) -> list[dict[str, Any]]:
    """Returns the rows of a time line: the whole build, each trace, each piece, each capture size."""
    spans = profile.spans
    own = _own_intervals(spans, profile.total_s)
    rows = [_row("all", "whole build", "", {}, own)]
    traces = [index for index, one in enumerate(spans) if one.name == TRACE_SPAN]
    functions = {index: one.function for index, one in zip(traces, profile.traces, strict=True)}
    for index, trace in zip(traces, profile.traces, strict=True):
        note = f"{counted(trace.num_pieces, 'piece')}, {trace.num_distinct_pieces} distinct"
        rows.append(_row("trace", trace.function, note, _details(spans[index]), _within(own, spans, index)))
    pieces = [index for index, one in enumerate(spans) if one.name == PIECE_SPAN]
    for index, piece in zip(pieces, profile.pieces, strict=True):
        details = {
            "key": piece.key,
            "cache": piece.cache,
            "operators": piece.num_operators,
            "used": counted(piece.num_uses, "time"),
            "kernels": list(piece.kernels),
        }
        label = (
            piece.piece if len(traces) < 2 else f"{piece.piece} of {functions[_trace_around(spans, index)]}"
        )
        rows.append(_row("piece", label, piece.cache, details, _within(own, spans, index)))
    for size in profile.sizes:
        inside = [
            index
            for index, one in enumerate(spans)
            if one.name in _SIZE_SPANS and one.attributes.get("size", "") == size.size
        ]
        segments = [segment for index in inside for segment in _within(own, spans, index)]
        label = "fixed shape" if size.size is None else f"size {size.size}"
        replay = {} if size.first_replay_s is None else {"first replay": in_words_s(size.first_replay_s)}
        details = {"warm-up": in_words_s(size.warm_up_s), "capture": in_words_s(size.capture_s), **replay}
        rows.append(_row("size", label, "", details, segments))
    return rows


def _trace_around(spans: tuple[Span, ...], index: int) -> int:
    around: int | None = index
    while around is not None and spans[around].name != TRACE_SPAN:
        around = spans[around].parent
    assert around is not None, "a piece is compiled in a trace"
    return around


def _own_intervals(spans: tuple[Span, ...], total_s: float) -> list[_Interval]:
    """Cuts time into the pieces in which one span is the innermost, in order."""
    intervals: list[_Interval] = []
    open_spans: list[Span] = []
    now_s = 0.0

    def advance(to_s: float) -> None:
        nonlocal now_s
        if to_s > now_s:
            innermost = open_spans[-1] if open_spans else None
            intervals.append((now_s, to_s, innermost.phase if innermost else None, innermost))
            now_s = to_s

    for one in spans:
        while open_spans and open_spans[-1].end_s <= one.begin_s:
            advance(open_spans[-1].end_s)
            open_spans.pop()
        advance(one.begin_s)
        open_spans.append(one)
    while open_spans:
        advance(open_spans[-1].end_s)
        open_spans.pop()
    advance(total_s)
    return intervals


def _within(intervals: list[_Interval], spans: tuple[Span, ...], index: int) -> list[_Interval]:
    begin_s, end_s = spans[index].begin_s, spans[index].end_s
    return [one for one in intervals if one[0] >= begin_s and one[1] <= end_s]


def _row(
    kind: str,
    label: str,
    note: str,
    details: Mapping[str, Any],
    intervals: list[_Interval],
) -> dict[str, Any]:
    """Makes a row; neighbours of one phase and one span become one segment."""
    segments: list[dict[str, Any]] = []
    for begin_s, end_s, phase, one in intervals:
        name = one.name if one is not None else ""
        shown = in_words(phase) if phase is not None else UNATTRIBUTED
        last = segments[-1] if segments else None
        if last is not None and last["phase"] == shown and abs(last["end"] - begin_s) < 1e-9:
            last["end"] = end_s
            if name and name not in last["names"]:
                last["names"].append(name)
            continue
        segments.append(
            {
                "begin": begin_s,
                "end": end_s,
                "phase": shown,
                "group": group_of(phase),
                "names": [name] if name else [],
                "details": {} if one is None else _details(one),
            }
        )
    shown_details = {key: value for key, value in details.items() if value not in ("", [], None)}
    return {"kind": kind, "label": label, "note": note, "details": shown_details, "segments": segments}


def _details(one: Span) -> dict[str, Any]:
    return {key: value for key, value in one.attributes.items() if key not in _NOT_SHOWN}
