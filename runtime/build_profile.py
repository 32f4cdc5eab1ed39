"""The compile-time profile: a build's time line as one JSON document, every second of it named or shown as not.

Made from the spans of a `TimeLine` alone; what a table or a page shows is worked out here, once. The form has a
version: a reader refuses a newer one. This module must not know how a profile is shown.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .atomic_file import write_atomically
from .errors import ConfigError
from .records import PoolReservation
from .time_line import CONTAINER, Attribute, Span, TimeLine, listen, seconds_by_phase, span
from .torch_private_events import events_to_time_lines
from .versions import installed_versions

SCHEMA = "sgl-piecewise.build-profile"
SCHEMA_VERSION = 2

BUILD_SPAN = "build"
TRACE_SPAN = "dynamo"
PIECE_SPAN = "compile piece"
SPLIT_SPAN = "split"
WARM_UP_SPAN = "warm_up"
CAPTURE_SPAN = "capture"
REPLAY_SPAN = "first_replay"


@dataclass(frozen=True, kw_only=True)
class ProfiledTrace:
    """One trace of Dynamo.

    Attributes:
        function: What was traced, with its file and line.
        duration_s: Wall seconds from its begin to its end, compiling and guards included.
        trace_s: Wall seconds that Dynamo read code.
        num_operators: Operators in the pieces of the trace, equal ones counted each time.
        num_repeated_operators: Operators in pieces that were equal to an earlier one: traced for nothing.
        num_pieces: Pieces between marked calls.
        num_distinct_pieces: Pieces that were compiled.
        num_marked_calls: Marked calls.
        num_layer_calls: Calls of shared layers, whose traces are others.
        most_uses: How often the piece that repeats most is used: equal layers that were traced one by one.
    """

    function: str
    duration_s: float
    trace_s: float
    num_operators: int
    num_repeated_operators: int
    num_pieces: int
    num_distinct_pieces: int
    num_marked_calls: int
    num_layer_calls: int
    most_uses: int

    @property
    def repeated_trace_s(self) -> float:
        """Seconds of the trace that went into repeated operators, in proportion to their number."""
        return self.trace_s * self.num_repeated_operators / self.num_operators if self.num_operators else 0.0


@dataclass(frozen=True, kw_only=True)
class ProfiledPiece:
    """One compiled piece.

    Attributes:
        piece: Its name in its trace.
        key: Its name on disk; empty where it was not looked for there.
        cache: ``hit``, ``miss`` or ``uncached``.
        duration_s: Wall seconds.
        num_operators: Operators in it.
        num_uses: How often its trace calls it.
        kernels: What the generated code calls.
    """

    piece: str
    key: str
    cache: str
    duration_s: float
    num_operators: int
    num_uses: int
    kernels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ProfiledSize:
    """One capture size.

    Attributes:
        size: The size; None for a fixed shape.
        warm_up_s: Wall seconds in warm-up forwards, less what was compiled in them.
        capture_s: Wall seconds of the capture.
        first_replay_s: Wall seconds of the first replay, or None where none was profiled.
    """

    size: int | None
    warm_up_s: float
    capture_s: float
    first_replay_s: float | None


@dataclass(frozen=True, kw_only=True)
class BuildProfile:
    """What a build did with its time.

    Attributes:
        schema: Names the form.
        schema_version: Its version.
        facts: Model, strategy, device, versions, command: whatever a reader needs, by name.
        total_s: Wall seconds from the call to ready.
        phases_s: Own wall seconds by named work, in order of first appearance.
        unattributed_s: Wall seconds that no named work has.
        traces: Every trace of Dynamo.
        pieces: Every compiled piece.
        sizes: Every capture size, in the order of the captures.
        spans: The time line itself; `parent` is an index into it.
        memory: What the graph pool reserved; None where nobody asked, or nothing was captured.
    """

    schema: str
    schema_version: int
    facts: dict[str, str]
    total_s: float
    phases_s: dict[str, float]
    unattributed_s: float
    traces: tuple[ProfiledTrace, ...]
    pieces: tuple[ProfiledPiece, ...]
    sizes: tuple[ProfiledSize, ...]
    spans: tuple[Span, ...]
    memory: PoolReservation | None = None

    @property
    def attributed_share(self) -> float:
        """The part of the wall time that named work has, from 0 to 1."""
        return 1.0 - self.unattributed_s / self.total_s if self.total_s else 1.0

    @property
    def ready_s(self) -> float:
        """Wall seconds from the call to ready, without the first replays."""
        return self.total_s - sum(size.first_replay_s or 0.0 for size in self.sizes)

    @property
    def compile_s(self) -> float:
        """Wall seconds from begin to end of all traces: Dynamo, compilers and guards."""
        return sum(trace.duration_s for trace in self.traces)

    def num_pieces_with(self, cache: str) -> int:
        """Returns how many compiled pieces had this outcome: ``hit``, ``miss`` or ``uncached``."""
        return sum(piece.cache == cache for piece in self.pieces)


def profile_of(
    lines: list[TimeLine], facts: dict[str, str], memory: PoolReservation | None = None
) -> BuildProfile:
    """Makes the profile of finished time lines, one after the other.

    Args:
        lines: In order. Time between them is left out.
        facts: What a reader needs to know beside.
        memory: What the graph pool reserved.
    """
    spans: list[Span] = []
    total_s = 0.0
    for line in lines:
        first = len(spans)
        spans += [_moved(one, first, total_s) for one in line.spans]
        total_s += line.total_s
    phases_s = seconds_by_phase(tuple(spans))
    return BuildProfile(
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        facts={**installed_versions(), **facts},
        total_s=total_s,
        phases_s=phases_s,
        unattributed_s=max(0.0, total_s - sum(phases_s.values())),
        traces=_traces(spans),
        pieces=_pieces(spans),
        sizes=_sizes(spans),
        spans=tuple(spans),
        memory=memory,
    )


def _moved(one: Span, first: int, later_s: float) -> Span:
    return Span(
        name=one.name,
        phase=one.phase,
        begin_s=one.begin_s + later_s,
        end_s=one.end_s + later_s,
        parent=None if one.parent is None else one.parent + first,
        attributes=one.attributes,
    )


def _inside(spans: list[Span], outer: int) -> list[int]:
    """Returns the spans inside one, at any depth. A span comes after the one around it."""
    inside = {outer}
    for index in range(outer + 1, len(spans)):
        if spans[index].parent in inside:
            inside.add(index)
    return sorted(inside - {outer})


def _traces(spans: list[Span]) -> tuple[ProfiledTrace, ...]:
    traces = []
    for index, one in enumerate(spans):
        if one.name != TRACE_SPAN:
            continue
        inside = [spans[number] for number in _inside(spans, index)]
        splits = [other for other in inside if other.name == SPLIT_SPAN]
        own = seconds_by_phase(tuple(_alone(spans, index)))
        traces.append(
            ProfiledTrace(
                function=_function_of(one.attributes),
                duration_s=one.duration_s,
                trace_s=own.get("dynamo trace", 0.0),
                num_operators=_sum(splits, "num_operators"),
                num_repeated_operators=_sum(splits, "num_repeated_operators"),
                num_pieces=_sum(splits, "num_pieces"),
                num_distinct_pieces=_sum(splits, "num_distinct_pieces"),
                num_marked_calls=_sum(splits, "num_marked_calls"),
                num_layer_calls=_sum(splits, "num_layer_calls"),
                most_uses=max((_int(split, "most_uses") for split in splits), default=0),
            )
        )
    return tuple(traces)


def _alone(spans: list[Span], outer: int) -> list[Span]:
    """Returns a span and what is in it as a time line of their own."""
    numbers = [outer, *_inside(spans, outer)]
    place = {number: index for index, number in enumerate(numbers)}
    return [
        Span(
            name=spans[number].name,
            phase=spans[number].phase,
            begin_s=spans[number].begin_s,
            end_s=spans[number].end_s,
            parent=place.get(spans[number].parent) if number != outer else None,  # type: ignore[arg-type]
            attributes=spans[number].attributes,
        )
        for number in numbers
    ]


def _function_of(attributes: dict[str, Attribute]) -> str:
    name, file, line = (attributes.get(key) for key in ("co_name", "co_filename", "co_firstlineno"))
    if not name:
        return "unknown"
    # What our entries compile is traced from a frame of theirs, which has the function's name and not its place.
    is_entry = Path(str(file)).parent == Path(__file__).parent.parent / "compiler"
    return str(name) if is_entry else f"{name} ({Path(str(file)).name}:{line})"


def _pieces(spans: list[Span]) -> tuple[ProfiledPiece, ...]:
    uses: dict[int | None, dict[str, int]] = {}
    for one in spans:
        if one.name == SPLIT_SPAN:
            uses[one.parent] = dict(_use(text) for text in _strings(one, "uses"))
    pieces = []
    for one in spans:
        if one.name != PIECE_SPAN:
            continue
        around, name = one.parent, str(one.attributes.get("piece"))
        while around is not None and around not in uses:
            around = spans[around].parent
        pieces.append(
            ProfiledPiece(
                piece=name,
                key=str(one.attributes.get("key", "")),
                cache=str(one.attributes.get("cache", "uncached")),
                duration_s=one.duration_s,
                num_operators=_int(one, "num_operators"),
                num_uses=uses.get(around, {}).get(name, 1),
                kernels=tuple(_strings(one, "kernels")),
            )
        )
    return tuple(pieces)


def _use(text: str) -> tuple[str, int]:
    name, _, count = text.rpartition("=")
    return name, int(count)


def _sizes(spans: list[Span]) -> tuple[ProfiledSize, ...]:
    found: dict[int | None, dict[str, float]] = {}
    for index, one in enumerate(spans):
        if one.name in (WARM_UP_SPAN, CAPTURE_SPAN, REPLAY_SPAN) and "size" in one.attributes:
            size = one.attributes["size"]
            compiled_s = sum(
                spans[number].duration_s
                for number in _inside(spans, index)
                if spans[number].name == TRACE_SPAN
            )
            times = found.setdefault(size if isinstance(size, int) else None, {})
            times[one.name] = times.get(one.name, 0.0) + one.duration_s - compiled_s
    return tuple(
        ProfiledSize(
            size=size,
            warm_up_s=times.get(WARM_UP_SPAN, 0.0),
            capture_s=times.get(CAPTURE_SPAN, 0.0),
            first_replay_s=times.get(REPLAY_SPAN),
        )
        for size, times in found.items()
    )


def _sum(spans: list[Span], name: str) -> int:
    return sum(_int(one, name) for one in spans)


def _int(one: Span, name: str) -> int:
    value = one.attributes.get(name)
    return value if isinstance(value, int) else 0


def _strings(one: Span, name: str) -> list[str]:
    value = one.attributes.get(name)
    return value if isinstance(value, list) else []


def check_profile_path(path: Path) -> None:
    """Raises ConfigError where a profile could not be written, before anything is built."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(
            f"The profile cannot be written to {path}: "
            + ("that is a folder." if path.is_dir() else f"there is no folder {path.parent}. Make it first.")
        )


def write_profile(profile: BuildProfile, path: Path) -> None:
    """Writes a profile as JSON; the file is there whole or not at all.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        write_atomically(path, json.dumps(asdict(profile), indent=1) + "\n")
    except OSError as err:
        raise ConfigError(f"The profile cannot be written to {path}: {err}") from err


@contextlib.contextmanager
def heard_build(what: str) -> Iterator[TimeLine]:
    """Puts the block's work on a new time line, with what PyTorch says of its compiling.

    Args:
        what: Name of the span around all of it.
    """
    line = TimeLine()
    with listen(line), events_to_time_lines(), span(what, CONTAINER):
        yield line
    line.finish()


@contextlib.contextmanager
def profiled(path: str | os.PathLike[str] | None, what: str, **facts: str) -> Iterator[dict[str, str]]:
    """Writes the profile of the block to a file, where one is given and the block ends well.

    Args:
        path: The file, or None to do nothing.
        what: Name of the span around the block.
        **facts: What a reader needs to know beside.

    Yields:
        The facts, for more that are known later.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path is None:
        yield facts
        return
    check_profile_path(Path(path))
    with heard_build(what) as line:
        yield facts
    write_profile(profile_of([line], facts), Path(path))
