"""The capture session: turns one run of a forward into a recording.

While a session is open its thread records into one graph segment after another. A marked call
ends the segment, runs once, gets its results placed in boundary memory, and the next segment
begins. Whatever goes wrong, the session leaves the stream, the pool, the garbage collector and the
random state as they were and lets the first exception through.

This module must not know of static inputs or capture sizes beyond the key that it passes on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal

import torch

from .. import tree
from ..errors import CaptureError, CaptureForbiddenError
from ..garbage import collection_paused
from ..interrupts import HeldInterrupts
from ..mark import MarkedFunction, active_capture, use_capture
from ..object_state import unchanged_objects
from .autocast import AutocastState, without_autocast_cache
from .autograd import refuse_history
from .device import DeviceGraph, GraphPool, SettableCopy
from .guard import OutsideWriteGuard
from .placement import BAKED_TYPES, PlacedResult, place_result
from .recording import Recording
from .segments import ContainerWatch, EagerSegment, FrozenArguments, GraphSegment, Segment
from .sizes import ShapeKey
from .statics import StaticTensors

CaptureMode = Literal["full", "breakable"]

_nothing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class CaptureSession:
    """One capture, as a context manager.

    Args:
        pool: Where graphs and boundary buffers get their memory.
        mode: ``breakable`` ends a segment at every mark; ``full`` captures marked code as well.
        strategy: Name for reports; the mode unless told otherwise.
        key: Shape being captured.
        launch_segments: Whether a closed segment is launched at once, so that the capturing pass is
            a real execution. Without it nothing runs, and every mark met needs a ``capture_stub``
            or ``fake``, because its body would read memory that was never written.
        statics: Tensors whose addresses must hold.
        is_borrowed: Tells which object arguments of marked calls the recording must not keep alive; None
            for none.
        restores_objects: Whether Python objects that marked code changes while it is captured (in full mode)
            are put back, because the call has had its effects already.

    Raises:
        CaptureError: On entry, capture inside capture.

    Attributes:
        recording: The result, after a block that ended without an exception.
        is_launching: Whether closed segments are launched.
    """

    def __init__(
        self,
        pool: GraphPool,
        *,
        mode: CaptureMode = "breakable",
        strategy: str | None = None,
        key: ShapeKey | None = None,
        launch_segments: bool = True,
        statics: StaticTensors | None = None,
        is_borrowed: Callable[[Any], bool] | None = None,
        restores_objects: bool = False,
    ) -> None:
        self.pool = pool
        self.mode = mode
        self.strategy = strategy or mode
        self.key = key or ShapeKey(size=None)
        self.is_launching = launch_segments
        self.statics = statics or StaticTensors()
        self.recording: Recording | None = None
        self._is_borrowed = is_borrowed
        self._restores_objects = restores_objects
        self._segments: list[Segment] = []
        self._graph: DeviceGraph | None = None
        self._outputs: Any = None
        self._guard: OutsideWriteGuard | None = None
        self._failed_in: str | None = None
        self._interrupts = HeldInterrupts()
        self._stack = contextlib.ExitStack()

    def set_outputs(self, outputs: Any) -> None:
        """Hands over what the forward returned; call it inside the block.

        Raises:
            CaptureError: A tensor among them records autograd history, or something is neither a
                tensor nor a plain value.
            OutsideWriteError: One is a copy whose original was written since it was made.
        """
        refuse_history(outputs, "an output of the captured function")
        leaves, spec = tree.flatten(outputs)
        for path, leaf in zip(tree.paths(spec, "output"), leaves, strict=True):
            if not isinstance(leaf, (torch.Tensor, *BAKED_TYPES)):
                raise CaptureError(
                    f"The captured function returned a {type(leaf).__name__} at {path}. A replay would return the "
                    "object that was made while capturing, with what it holds. Return tensors, None, plain scalars "
                    "and strings, and tuples, lists, dicts or dataclasses of those."
                )
        if self._guard is not None:
            for leaf in leaves:
                self._guard.check_read("The result of the captured function", leaf)
        self._outputs = outputs

    def record_copy(self, target: torch.Tensor, source: torch.Tensor) -> SettableCopy:
        """Records a copy as work of the graph that is open; call it inside the block.

        Nothing may be launched while capturing, and the pool must edit graphs.

        Args:
            target: Dense; see `DeviceGraph.record_copy` for how long it must live.
            source: Of the same shape and type; likewise.

        Returns:
            What sets one end or both, once the block has ended.
        """
        assert self._graph is not None, "between segments"
        assert not self.is_launching, "the copy would run with these ends"
        return self._graph.record_copy(target, source)

    def __enter__(self) -> CaptureSession:
        refuse_nested_capture()
        with contextlib.ExitStack() as stack:
            # Outermost, so that an interrupt waits for all that the others put back.
            stack.enter_context(self._interrupts)
            stack.enter_context(self.pool.exclusive("capture"))
            stack.enter_context(_counted_as_open())
            self.pool.order_after_last_use()
            stack.enter_context(_translated(self))
            stack.enter_context(collection_paused())
            stack.enter_context(without_autocast_cache())
            stack.enter_context(self.pool.capture_scope())
            self.statics.note_addresses()
            stack.push(self._drop_if_failed)
            self._begin_segment()
            stack.enter_context(use_capture(self))
            self._interrupts.deliver()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if exc_type is not None:
            return self._stack.__exit__(exc_type, exc, traceback)
        with self._stack:
            self._end_segment()
            self.statics.forget_bound_attributes()
            self.recording = Recording(
                key=self.key,
                strategy=self.strategy,
                pool=self.pool,
                segments=tuple(self._segments),
                outputs=self._outputs,
                statics=self.statics,
            )
            self._outputs = None
        return None

    def call_marked(self, mark: MarkedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Breaks the capture for one marked call; in full mode captures it.

        Args:
            mark: The marked function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            The body's (or its stand-in's) result as captured code may use it: copied leaves own
            boundary memory, others are the body's own.

        Raises:
            CaptureError: The call cannot be a break: its result, an argument it changed, autograd,
                or a mark without a stand-in where nothing is launched. Names the mark.
        """
        self._interrupts.deliver()
        if self.mode == "full":
            undo = unchanged_objects((args, kwargs), mark.body()) if self._restores_objects else _nothing
            try:
                with undo:
                    return mark.fn(*args, **kwargs)
            except CaptureForbiddenError:
                self._failed_in = self._failed_in or mark.name
                raise
        # Graph and eager segments alternate, and a graph segment is open.
        where = f"{self.key}, break {len(self._segments) // 2}"
        refuse_history((args, kwargs), f"an argument of break {mark.name!r} ({where})")
        self._end_segment()
        frozen = FrozenArguments(args, kwargs, self.pool, self._is_borrowed)
        watch = ContainerWatch(args, kwargs)
        autocast = AutocastState.now(self.pool.device.torch_device.type)
        stand_in, body = self._body_for(mark, where)
        with use_capture(None), _stand_in_told(stand_in, mark, where):
            placed = place_result(
                body(*args, **kwargs),
                mark_name=mark.name,
                where=where,
                pool=self.pool,
                argument_storages=frozenset(frozen.storages),
                statics=self.statics,
                device=self.pool.device.torch_device,
                is_launched=self.is_launching,
                stand_in=stand_in,
            )
        watch.check(mark.name, where)
        self._segments.append(
            EagerSegment(mark=mark, arguments=frozen, outputs=placed.outputs, autocast=autocast)
        )
        # The body's own result is gone now unless someone else holds it: then captured code only has a copy.
        only_copies = [
            (copy, f"{path} of break {mark.name!r} ({where})", source)
            for path, copy, source in placed.copied
            if not source.expired()
        ]
        self._begin_segment()
        self._record_copies(placed)
        for copy, origin, source in only_copies:
            self._guard_copy(copy, origin, source)
        return placed.result

    def _record_copies(self, placed: PlacedResult) -> None:
        """Makes boundary copies the first work of the segment that reads them."""
        assert self._graph is not None
        while placed.staged:
            staged = placed.staged.pop()
            placed.outputs.use_copy(staged.leaf_index, self._graph.record_copy(staged.target, staged.source))

    def _body_for(self, mark: MarkedFunction, where: str) -> tuple[str | None, Callable[..., Any]]:
        """The marked function's stand-in while capturing and what it is, or its body where memory is real."""
        if mark.capture_stub is not None:
            return "capture_stub", mark.capture_stub
        if self.is_launching:
            return None, mark.fn
        if mark.fake is not None:
            return "fake", mark.fake
        raise CaptureError(
            f"Break {mark.name!r} ({where}) has neither capture_stub nor fake, and segments are not launched while "
            "capturing: its body would read memory that was never written. Give the mark a capture_stub "
            "(`@eager_on_graph(capture_stub=...)`), or capture with launch_segments=True."
        )

    def _begin_segment(self) -> None:
        graph = self.pool.new_graph()
        self._graph = graph
        graph.begin()

    def _end_segment(self) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None, "a segment ended twice"
        try:
            graph.end()
        except BaseException:
            graph.abort()
            raise
        self._segments.append(GraphSegment(graph=graph))
        if self.is_launching and graph.num_ops != 0:
            graph.replay()

    def _guard_copy(self, copy: torch.Tensor, origin: str, original: Any) -> None:
        if self._guard is None:
            self._guard = OutsideWriteGuard()
            self._stack.enter_context(self._guard)
        self._guard.add(copy, origin, original)

    def _drop_if_failed(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if exc_type is not None:
            graph, self._graph = self._graph, None
            if graph is not None:
                graph.abort()
            for segment in self._segments:
                if isinstance(segment, GraphSegment):
                    segment.graph.reset()
        self._segments = []
        self._outputs = None
        return False


class _OpenSessions(threading.local):
    """How many sessions this thread has open; a break's body runs inside one too."""

    count = 0


_OPEN = _OpenSessions()


@contextlib.contextmanager
def _counted_as_open() -> Iterator[None]:
    _OPEN.count += 1
    try:
        yield
    finally:
        _OPEN.count -= 1


def is_session_open() -> bool:
    """Tells whether this thread is inside a capture, in the body of a break or not."""
    return _OPEN.count > 0


@contextlib.contextmanager
def _stand_in_told(stand_in: str | None, mark: MarkedFunction, where: str) -> Iterator[None]:
    """Adds to an error of the block what ran in place of a marked function's body, if something did."""
    try:
        yield
    except Exception as error:
        if stand_in is not None:
            error.add_note(f"Break {mark.name!r} ({where}): its {stand_in} ran here in place of the body.")
        raise


def refuse_nested_capture() -> None:
    """Call before a capture, warm-up included.

    Raises:
        CaptureError: This thread is capturing already.
    """
    if active_capture() is not None:
        raise CaptureError(
            "Capture inside capture: this thread is already capturing. Capture the outer function only, "
            "or put the inner one into a function marked @eager_on_graph."
        )


@contextlib.contextmanager
def _translated(session: CaptureSession) -> Iterator[None]:
    """Raises what the reader can use, from what the device raised."""
    try:
        yield
    except Exception as error:
        better = session.pool.device.explain_failure(error)
        if session._failed_in is not None and isinstance(error, CaptureForbiddenError):
            better = type(error)(
                f"{error} It is inside the marked function {session._failed_in!r}, which strategy 'full' captures "
                "as well: with strategy='breakable' it stays outside the graph."
            )
        if better is None:
            raise
        raise better from error
