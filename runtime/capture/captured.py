"""The captured callable: replays graphs, and was built by warming up and capturing every size.

The callable copies its inputs into static buffers, replays the recording of the smallest capture
size that holds them, and cuts the outputs back. What no graph can serve runs eager, with a
reason that is counted. This module must not know of models or of compilers: it takes a callable.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import tree
from ..interrupts import HeldInterrupts
from ..mark import MarkedFunction, use_capture
from ..records import BuildRecord, PhaseClock, SizeBuild
from ..time_line import span
from .autocast import without_autocast_cache
from .autograd import refuse_history
from .device import GraphPool
from .extents import share_bytes
from .recording import Recording
from .session import CaptureMode, CaptureSession
from .sizes import ShapeKey, padded_size
from .static_inputs import StaticInputs
from .static_outputs import OutputCut
from .statics import StaticTensors

_logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, int, int], None]
"""Called with a phase's name, how many steps are done, and how many there are."""

# Why a call ran eager: the keys of ``CapturedCallable.fallbacks``.
SIZE_OVER_LARGEST = "size_over_largest"
SIZE_ZERO = "size_zero"
NO_GRAPH = "no_graph_for_size"  # its capture ran out of memory, or `reset` was called
UNCUTTABLE_OUTPUT = "output_cannot_be_cut"
ALIASED_INPUTS = "written_inputs_share_memory"
AUTOGRAD_INPUTS = "inputs_require_grad"


class _MarkObserver:
    """Stands in for a capture during warm-up, to see which marks a forward meets."""

    def __init__(self) -> None:
        self.marks: list[MarkedFunction] = []

    def call_marked(self, mark: MarkedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.marks.append(mark)
        with use_capture(None):
            return mark.fn(*args, **kwargs)


class CapturedCallable:
    """What ``capture`` returns; called like the function it was made from.

    Args:
        fn: The function, or a mark around it in debug mode.
        inputs: Its input buffers.
        strategy: The capture strategy, for reports: ``full``, ``breakable`` or ``debug``.
        mode: How sessions capture.
        copy_outputs: Whether calls return copies; else graph-owned tensors.
        sizes: Ascending capture sizes; None where all shapes are fixed.
        pool: The graph pool of all sizes.
        statics: Tensors whose addresses must hold.

    Attributes:
        pool: The graph pool of all sizes.
        recordings: One per captured size, largest first.
        build: What it took; None until `build_all` is done.
        fallbacks: Calls that ran eager, by reason.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: StaticInputs,
        *,
        strategy: str,
        mode: CaptureMode,
        copy_outputs: bool,
        sizes: tuple[int, ...] | None,
        pool: GraphPool,
        statics: StaticTensors,
    ) -> None:
        self._fn = fn
        self._inputs = inputs
        self._strategy = strategy
        self._mode: CaptureMode = mode
        self._copy_outputs = copy_outputs
        self._sizes = sizes
        self._statics = statics
        self._cut = OutputCut()
        # Nothing to check, copy in, or copy out: a runner's forward over its own buffers.
        self._is_closed = not inputs.leaves and sizes is None and not copy_outputs
        self.pool = pool
        self.recordings: dict[ShapeKey, Recording] = {}
        self._by_size: dict[int | None, Recording] = {}  # the same, without hashing a key per call
        self.fallbacks: collections.Counter[str] = collections.Counter()
        self.build: BuildRecord | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function: by replay where a graph fits, else eager.

        Returns:
            As the function does. Tensors are fresh copies, or with ``outputs="view"`` graph-owned:
            overwritten by the next replay on this pool.

        Raises:
            InputMismatchError: Arguments do not fit the captured ones.
            BreakMismatchError: A marked function returned something of another form.
            MovedAddressError: On the first replay of a size, a static tensor is not where it was.
            CaptureError: Called while this thread captures, or inside a replay on the same pool.
        """
        if self._is_closed and not args and not kwargs:
            only = self._by_size.get(None)
            if only is not None:
                only.replay()
                return self._cut.apply(only.outputs, None, None, copy=False)
        real, values = self._inputs.real_size(args, kwargs)
        padded = self.padded_size(real) if real is not None else None
        recording, reason = self._find(real, padded, values)
        if recording is None:
            return self._run_eager(reason, args, kwargs)
        recording.refuse_inside_capture()
        with self.pool.exclusive("replay"):
            self.pool.order_after_last_use()
            self._inputs.copy_in(values, real, padded)
            try:
                recording.run()
            finally:  # A marked function may raise: what was written before it stays written.
                if self._inputs.written:
                    self._inputs.copy_back(values, real, padded, self._ours_to_keep(recording, values))
            return self._cut.apply(recording.outputs, real, padded, copy=self._copy_outputs)

    def _ours_to_keep(self, recording: Recording, values: Sequence[Any]) -> frozenset[int]:
        """Tells which written inputs lie where this replay left its outputs.

        That is an earlier output of ``outputs="view"`` that came back as an input. It was valid until
        this replay; writing it back now would destroy the new outputs.
        """
        inputs = [index for index in self._inputs.written if self.pool.owns(values[index])]
        if not inputs:
            return frozenset()
        outputs = [leaf for leaf in tree.flatten(recording.outputs)[0] if isinstance(leaf, torch.Tensor)]
        return frozenset(
            index for index in inputs if any(share_bytes(values[index], output) for output in outputs)
        )

    @property
    def fn(self) -> Callable[..., Any]:
        """The function that was captured; calls without a graph run it."""
        return self._fn

    def padded_size(self, num_real: int) -> int | None:
        """Returns the capture size that serves ``num_real``, or None if none is large enough."""
        return padded_size(num_real, self._sizes) if self._sizes else None

    def _find(
        self, real: int | None, padded: int | None, values: Sequence[Any]
    ) -> tuple[Recording | None, str]:
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in values
        ):
            return None, AUTOGRAD_INPUTS
        if self._sizes is not None:
            if real == 0:
                return None, SIZE_ZERO
            if padded is None:
                return None, SIZE_OVER_LARGEST
            if real != padded and not self._cut.can_cut:
                return None, UNCUTTABLE_OUTPUT
        if self._inputs.written and self._inputs.share_memory(values):
            return None, ALIASED_INPUTS
        return self._by_size.get(padded), NO_GRAPH

    def _run_eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if reason not in self.fallbacks:
            _logger.warning("%s: ran without a graph, reason %s (counted in .fallbacks)", self, reason)
        self.fallbacks[reason] += 1
        # Copied as a replay's outputs are: the function may return state that a later call overwrites.
        return self._cut.apply(self._fn(*args, **kwargs), None, None, copy=self._copy_outputs)

    def check_static_addresses(self) -> None:
        """Checks that parameters and registered tensors are where the graphs read them.

        Raises:
            MovedAddressError: One moved; names it.
        """
        for recording in self.recordings.values():
            recording.check_static_addresses()

    def describe(self) -> str:
        """Returns every recording as text, largest first."""
        return "\n".join(recording.describe() for recording in self.recordings.values())

    def reset(self) -> None:
        """Frees graphs and pool memory; later calls run eager with a reason. Idempotent."""
        for recording in self.recordings.values():
            recording.reset()
        self.recordings.clear()
        self._by_size.clear()

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", type(self._fn).__qualname__)
        return f"<captured {name} strategy={self._strategy} sizes={list(self._sizes or ())}>"

    def build_all(
        self, *, launch_segments: bool | None, num_warm_ups: int, on_progress: ProgressCallback | None
    ) -> None:
        """Warms up and captures every size, largest first; called once, by ``capture``.

        A size whose capture runs out of memory is left out, and its record says so.

        Args:
            launch_segments: Whether closed segments run while capturing; None as `capture` says.
            num_warm_ups: Forwards per size before its capture.
            on_progress: Called with (phase, done, total).

        Raises:
            CaptureError: The function cannot be captured; graphs made so far are freed.
        """
        clock = PhaseClock()
        device = self.pool.device
        sizes: list[int | None] = [None] if self._sizes is None else list(reversed(self._sizes))
        report = on_progress or (lambda phase, done, total: None)
        built: list[SizeBuild] = []
        launched = bool(launch_segments)
        try:
            with HeldInterrupts() as interrupts:
                for index, size in enumerate(sizes):
                    report("capture", index, len(sizes))
                    entry, launched = self._build_size(size, clock, launch_segments, num_warm_ups)
                    built.append(entry)
                    interrupts.deliver()
            if self._sizes is not None:
                with clock.phase("learn_output_shapes"):
                    self._learn_from_one_more_size()
            with clock.phase("wait_for_device"):
                device.synchronize()
                self._inputs.settle_written()
        except BaseException:
            self.reset()
            raise
        report("capture", len(sizes), len(sizes))
        self.build = BuildRecord(
            strategy=self._strategy,
            device=device.name,
            is_emulated=device.is_emulated,
            segments_launched=launched,
            total_s=clock.total_s(),
            phases_s=dict(clock.phases_s),
            sizes=tuple(built),
        )

    def _build_size(
        self, size: int | None, clock: PhaseClock, launch_segments: bool | None, num_warm_ups: int
    ) -> tuple[SizeBuild, bool]:
        key = ShapeKey(size=size)
        warm_up_before = clock.phases_s.get("warm_up", 0.0)
        capture_before = clock.phases_s.get("capture", 0.0)
        used, reserved = self._used_and_reserved()
        recording: Recording | None = None
        error: str | None = None
        launched = bool(launch_segments)
        try:
            with clock.phase("warm_up", size=size):
                marks = self._warm_up(size, num_warm_ups)
            launched = self._needs_launching(marks) if launch_segments is None else launch_segments
            used, reserved = self._used_and_reserved()
            with clock.phase("capture", size=size):
                recording = self._capture(key, launched)
            self.recordings[key] = self._by_size[size] = recording
        except torch.OutOfMemoryError as out_of_memory:
            error = self._report_out_of_memory(key, out_of_memory)
        used_now, reserved_now = self._used_and_reserved()
        driver = None if used is None or used_now is None else (used_now - used) - (reserved_now - reserved)
        with span("measure_memory", "measure_memory"):
            reserved_bytes = self.pool.memory().reserved_bytes
        entry = SizeBuild(
            size=size,
            warm_up_s=clock.phases_s.get("warm_up", 0.0) - warm_up_before,
            capture_s=clock.phases_s.get("capture", 0.0) - capture_before,
            num_graph_segments=0 if recording is None else recording.num_graph_segments,
            num_breaks=0 if recording is None else recording.num_breaks,
            reserved_bytes=reserved_bytes,
            driver_bytes=driver,
            error=error,
        )
        return entry, launched

    def _used_and_reserved(self) -> tuple[int | None, int]:
        """Returns the device's memory in use, by its driver, and what the allocator holds of it."""
        with span("measure_memory", "measure_memory"):
            return self.pool.device.used_bytes(), self.pool.device.allocator_reserved_bytes()

    def _report_out_of_memory(self, key: ShapeKey, error: torch.OutOfMemoryError) -> str:
        reason = f"out of memory: {str(error).splitlines()[0]}"
        _logger.warning("%s: no graph for %s, it will run eager (%s)", self, key, reason)
        self.pool.device.release_cached_memory()
        return reason

    def _needs_launching(self, marks: list[MarkedFunction]) -> bool:
        """Whether a body will run while capturing, and so must find its inputs computed."""
        return self._mode == "breakable" and any(
            mark.capture_stub is None and mark.fake is None for mark in marks
        )

    def _warm_up(self, size: int | None, num_warm_ups: int) -> list[MarkedFunction]:
        """Runs the forward on the capture stream; returns the marks it met.

        Nothing waits for the device here: captured work runs later on the same stream, and meanwhile
        the device works while the host captures (`sglang#34286` needs a wait for its several streams).
        """
        observer = _MarkObserver()
        args, kwargs = self._inputs.views(size)
        with self.pool.exclusive("capture"):
            self.pool.order_after_last_use()
            with self.pool.on_capture_stream():
                for _ in range(num_warm_ups):
                    with self._inputs.writes_noted(size):
                        # As while capturing: Dynamo would compile again for another autocast state.
                        with use_capture(observer), without_autocast_cache():
                            outputs = self._fn(*args, **kwargs)
                        self._inputs.refuse_reshaped(size)
                    refuse_history(outputs, "an output of the captured function")
                    if size is not None:
                        self._cut.learn(size, outputs)
                    del outputs
        return observer.marks

    def _capture(self, key: ShapeKey, launch_segments: bool) -> Recording:
        args, kwargs = self._inputs.views(key.size)
        session = CaptureSession(
            self.pool,
            mode=self._mode,
            strategy=self._strategy,
            key=key,
            launch_segments=launch_segments,
            statics=self._statics,
        )
        with session:
            outputs = self._fn(*args, **kwargs)
            session.set_outputs(outputs)
            if not self._copy_outputs:
                self._inputs.note_views(outputs)
            del outputs
        assert session.recording is not None
        self._inputs.note_seen_by_marks(session.recording.argument_storages)
        return session.recording

    def _learn_from_one_more_size(self) -> None:
        """A single size cannot tell which output dimension follows it; a forward at another can."""
        assert self._sizes is not None
        largest = self._sizes[-1]
        if self._cut.num_sizes < 2 and largest > 1:
            args, kwargs = self._inputs.views(largest - 1)
            with self.pool.exclusive("capture"):
                self.pool.order_after_last_use()
                with self.pool.on_capture_stream(), without_autocast_cache():
                    self._cut.learn(largest - 1, self._fn(*args, **kwargs))
        self._cut.dims()
