"""Typed facts for reports, and the one clock that makes them.

Records in, reports out: nothing else in the library reads a clock, but for ``stopwatch``, which times calls on
a device, and ``time_line``, which times the steps of a build. A record is frozen and holds plain Python values,
so that it can be written as JSON as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from .time_line import Attribute, span

IMPORT, TRACE, COMPILE_PIECES, FIRST_RUN = "import", "trace", "compile_pieces", "first_run"
"""Phases of a compile: Dynamo; passes and piece compilers; the run that it was made for."""

COMPILE_PHASES = (TRACE, COMPILE_PIECES)


@dataclass(frozen=True, kw_only=True)
class SizeBuild:
    """What it took to capture one size.

    Attributes:
        size: The capture size (padded tokens or requests); None for a fixed shape.
        warm_up_s: Host seconds in warm-up forwards; the device may still be at work when they end.
        capture_s: Host seconds from the first graph's begin to the last graph's end.
        num_graph_segments: Graphs that one replay launches.
        num_breaks: Marked calls between them.
        reserved_bytes: The pool's size after this capture.
        driver_bytes: Driver memory that this capture took beyond the allocator's, or None where
            the device does not say.
        error: Why this size has no graph, or None when it has one.
    """

    size: int | None
    warm_up_s: float
    capture_s: float
    num_graph_segments: int
    num_breaks: int
    reserved_bytes: int
    driver_bytes: int | None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class BuildRecord:
    """What it took to make a captured callable ready.

    Attributes:
        strategy: The cell of the grid, for example ``breakable``.
        device: The graph device's name.
        is_emulated: True where the times say nothing about a GPU.
        segments_launched: Whether closed segments ran while capturing (of the size built last).
        total_s: Wall seconds from the call to all sizes ready.
        phases_s: Wall seconds by phase: ``trace`` (Dynamo), ``compile_pieces`` (passes and piece compilers) and
            ``first_run`` where something is compiled; ``warm_up``, ``capture``, ``learn_output_shapes``,
            ``wait_for_device``. A phase is named work; what is in none is ``unattributed_s``.
        sizes: One entry per capture size, in the order captured (largest first).
        import_s: Wall seconds before that, importing the compiler; not part of the build.
    """

    strategy: str
    device: str
    is_emulated: bool
    segments_launched: bool
    total_s: float
    phases_s: dict[str, float]
    sizes: tuple[SizeBuild, ...]
    import_s: float = 0.0

    @property
    def compile_share(self) -> float:
        """Part of the build that went into tracing and compiling."""
        compile_s = sum(self.phases_s.get(phase, 0.0) for phase in COMPILE_PHASES)
        return compile_s / self.total_s if self.total_s else 0.0

    @property
    def unattributed_s(self) -> float:
        """Wall seconds that no phase names."""
        return max(0.0, self.total_s - sum(self.phases_s.values()))


@dataclass(frozen=True, kw_only=True)
class CallStats:
    """What one compiled forward captured while it was called.

    Attributes:
        name: Which compile it is.
        strategy: The capture strategy: ``full`` or ``breakable``.
        device: The graph device's name.
        is_emulated: True where capture is imitated on a CPU.
        num_graphs: Recordings now.
        num_breaks: Marked calls in each.
        num_captures: Recordings made so far.
        num_replays: Calls that a recording served.
        num_padded: Those of them that ran at a larger size than their own.
        without_graph: Calls that none served, by reason.
        failures: Why shapes could not be captured, each message once.
    """

    name: str
    strategy: str
    device: str
    is_emulated: bool
    num_graphs: int
    num_breaks: int
    num_captures: int
    num_replays: int
    num_padded: int
    without_graph: dict[str, int]
    failures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PieceBuild:
    """What it took to compile one distinct piece.

    Attributes:
        key: Name of the piece, the same in every process; empty where it was not looked for on disk.
        piece: Name of the first piece of its kind in its trace, for example ``piece_1``.
        cache: ``hit`` (found on disk), ``miss`` (compiled), or ``uncached`` (no cache on disk was asked, or none
            can hold it).
        compile_s: Wall seconds in the piece compiler.
        num_operators: Operators and other nodes in the piece, inputs and output left out.
    """

    key: str
    piece: str
    cache: Literal["hit", "miss", "uncached"]
    compile_s: float
    num_operators: int


@dataclass(frozen=True, kw_only=True)
class PoolEstimate:
    """What a graph pool was estimated to reserve, before anything was captured.

    Attributes:
        reserved_bytes: With all sizes captured; None where there is no estimate.
        largest_alone_bytes: With the largest size captured; None likewise.
        is_upper_bound: Whether pieces are code of a compiler whose choices are not known, which may need less.
        missing_because: Why there is no estimate, or None.
    """

    reserved_bytes: int | None
    largest_alone_bytes: int | None
    is_upper_bound: bool
    missing_because: str | None = None


@dataclass(frozen=True, kw_only=True)
class PoolReservation:
    """What the graph pool of a build reserved, in bytes.

    Attributes:
        reserved_bytes: With all sizes captured.
        largest_alone_bytes: Once the largest size was captured.
        estimate: What was estimated beside; None where nobody asked.
    """

    reserved_bytes: int
    largest_alone_bytes: int
    estimate: PoolEstimate | None = None

    @property
    def estimate_ratio(self) -> float | None:
        """The estimate over what was reserved, all sizes captured; None where either is missing."""
        return estimate_ratio(self.estimate, self.reserved_bytes)


def estimate_ratio(estimate: PoolEstimate | None, reserved_bytes: int) -> float | None:
    """Returns an estimate over what was measured, all sizes captured; None where either is missing."""
    if estimate is None or estimate.reserved_bytes is None or not reserved_bytes:
        return None
    return estimate.reserved_bytes / reserved_bytes


@dataclass
class PhaseClock:
    """Adds up wall time by phase name. Phases do not nest.

    Attributes:
        phases_s: Wall seconds so far by phase.
        started_s: When the clock was made, in seconds of ``time.perf_counter``.
    """

    phases_s: dict[str, float] = field(default_factory=dict)
    started_s: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def phase(self, name: str, **attributes: Attribute) -> Iterator[None]:
        """Attributes the block's wall time to ``name``, and tells listeners of the build's time line.

        Args:
            name: The named work.
            **attributes: What it is about, for the time line.
        """
        begin = time.perf_counter()
        try:
            with span(name, name, **attributes):
                yield
        finally:
            self.phases_s[name] = self.phases_s.get(name, 0.0) + time.perf_counter() - begin

    def total_s(self) -> float:
        """Returns wall seconds since the clock was made."""
        return time.perf_counter() - self.started_s


@dataclass
class LapClock:
    """Adds up wall time by phase where phases nest: every moment belongs to the innermost one.

    Attributes:
        phases_s: Wall seconds so far by phase.
    """

    phases_s: dict[str, float] = field(default_factory=dict)
    _phase: str | None = None
    _since_s: float = field(default_factory=time.perf_counter)

    def enter(self, phase: str | None) -> str | None:
        """Lets the time from now on count as ``phase``, as nothing if None; returns the phase before."""
        now_s, before = time.perf_counter(), self._phase
        if before is not None:
            self.phases_s[before] = self.phases_s.get(before, 0.0) + now_s - self._since_s
        self._phase, self._since_s = phase, now_s
        return before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attributes the block's wall time to ``name``, but for phases inside it."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)
