"""A profile in the trace format that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json

from sgl_piecewise.runtime.build_profile import BuildProfile
from sgl_piecewise.runtime.time_line import Span

_US_PER_S = 1e6


def chrome_trace(profiles: dict[str, BuildProfile]) -> str:
    """Returns profiles as one trace: a process each, spans nested by time.

    Args:
        profiles: By the name that their process gets.

    Source: the Trace Event Format, "X" (complete) and "M" (metadata) events.
    """
    events: list[dict[str, object]] = []
    for process, (title, profile) in enumerate(profiles.items(), start=1):
        events.append({"name": "process_name", "ph": "M", "pid": process, "tid": 1, "args": {"name": title}})
        events += [
            {
                "name": _title(one),
                "cat": one.phase or "unattributed",
                "ph": "X",
                "ts": one.begin_s * _US_PER_S,
                "dur": one.duration_s * _US_PER_S,
                "pid": process,
                "tid": 1,
                "args": {"phase": one.phase or "unattributed", **one.attributes},
            }
            for one in profile.spans
        ]
    facts = {title: profile.facts for title, profile in profiles.items()}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}) + "\n"


def _title(one: Span) -> str:
    """Returns a span's name with what tells it from its like."""
    for key in ("piece", "size"):
        if one.attributes.get(key) is not None:
            return f"{one.name} {one.attributes[key]}"
    return one.name
