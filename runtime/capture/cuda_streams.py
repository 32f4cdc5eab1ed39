"""Forks and joins of CUDA streams during a capture.

A stream enters a capture by waiting for an event recorded in it (a fork) and has to be waited for
before the graph ends (a join). The streams of a capture cannot be listed, so the events are
watched: while a capture scope is open, ``torch.cuda.Event.record`` and ``wait`` of the capturing
thread go through a `StreamTracker`. ``Stream.wait_stream``, ``wait_event`` and ``record_event`` end
up there. A fork made in C++ is not seen here; CUDA itself then refuses to end the capture. The
contract is point 7 of ``docs/capture-semantics.md``. This module must not know of graphs or pools.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from ..errors import UnjoinedStreamError


@dataclass(frozen=True)
class _Origin:
    """Where an event was last recorded: which tracker, which graph of it, on which stream."""

    tracker: StreamTracker
    graph_serial: int
    stream: torch.cuda.Stream
    was_captured: bool


class StreamTracker:
    """Follows forks and joins of one capture scope."""

    def __init__(self, capture_stream: torch.cuda.Stream) -> None:
        self._capture_stream = capture_stream
        self._serial = 0
        self._is_recording = False
        # Streams that took part in the graph being recorded, and those of them not joined yet.
        self._participants: dict[int, torch.cuda.Stream] = {}
        self._open: dict[int, torch.cuda.Stream] = {}
        self._to_fork_again: list[torch.cuda.Stream] = []

    def begin_graph(self) -> None:
        """Call after the device began recording: forks again what was open when the last graph ended."""
        self._serial += 1
        self._is_recording = True
        self._participants, self._open = {}, {}
        again, self._to_fork_again = self._to_fork_again, []
        for stream in again:
            stream.wait_stream(self._capture_stream)

    def end_graph(self) -> None:
        """Call before the device stops recording: joins every stream that took part.

        Raises:
            UnjoinedStreamError: A stream cannot be joined.
        """
        self._to_fork_again = list(self._open.values())
        for stream in list(self._participants.values()):
            try:
                self._capture_stream.wait_stream(stream)
            except RuntimeError as error:
                raise UnjoinedStreamError(
                    f"{_name(stream)} was forked from the capture and cannot be joined at its end ({error}). "
                    "Join it (`torch.cuda.current_stream().wait_stream(side)`) before the break or the end."
                ) from error
        self.stop()

    def stop(self) -> None:
        """Stops watching until the next ``begin_graph``."""
        self._is_recording = False

    def on_record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Notes where an event was recorded."""
        captured = self._is_recording and self._is_in_capture(stream)
        event._sgl_piecewise_origin = _Origin(self, self._serial, stream, captured)  # type: ignore[attr-defined]

    def on_wait(self, event: torch.cuda.Event, stream: torch.cuda.Stream, wait: Callable[[], None]) -> None:
        """Handles ``stream`` waiting for ``event``; ``wait`` is the wait itself."""
        if not self._is_recording:
            wait()
            return
        origin: _Origin | None = getattr(event, "_sgl_piecewise_origin", None)
        ours = origin if origin is not None and origin.tracker is self else None
        in_this_graph = ours is not None and ours.was_captured and ours.graph_serial == self._serial
        # Earlier graphs of the scope, and breaks on the capture stream, come before this graph as a whole.
        is_ordered = ours is not None and (ours.was_captured or ours.stream == self._capture_stream)
        if self._is_in_capture(stream):
            if in_this_graph:
                assert ours is not None
                wait()
                if stream == self._capture_stream:
                    self._open.pop(ours.stream.cuda_stream, None)
            elif not is_ordered:
                where = "a stream outside this capture" if origin is None else _name(origin.stream)
                raise UnjoinedStreamError(
                    f"Captured code on {_name(stream)} waits for work on {where} that is not part of the capture. "
                    "A graph cannot wait for it, and without the wait replays would read unfinished data. Move the "
                    "wait into a function marked @eager_on_graph, or fork that stream from the capture first."
                )
        elif in_this_graph:
            wait()
            self._fork(stream)
        elif is_ordered:
            stream.wait_stream(self._capture_stream)
        else:
            wait()

    def _fork(self, stream: torch.cuda.Stream) -> None:
        self._participants[stream.cuda_stream] = stream
        self._open[stream.cuda_stream] = stream

    def _is_in_capture(self, stream: torch.cuda.Stream) -> bool:
        return stream == self._capture_stream or stream.cuda_stream in self._participants


def _name(stream: torch.cuda.Stream) -> str:
    return f"CUDA stream 0x{stream.cuda_stream:x} of {stream.device}"


_TRACKER: ContextVar[StreamTracker | None] = ContextVar("sgl_piecewise_stream_tracker", default=None)
_install_lock = threading.Lock()
_open_watches: list[StreamTracker] = []
_original_record = torch.cuda.Event.record
_original_wait = torch.cuda.Event.wait


def _record(self: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
    tracker = _TRACKER.get()
    if tracker is None:
        _original_record(self, stream)
        return
    stream = torch.cuda.current_stream() if stream is None else stream
    _original_record(self, stream)
    tracker.on_record(self, stream)


def _wait(self: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
    tracker = _TRACKER.get()
    if tracker is None:
        _original_wait(self, stream)
        return
    target = torch.cuda.current_stream() if stream is None else stream
    tracker.on_wait(self, target, lambda: _original_wait(self, target))


@contextlib.contextmanager
def watch_streams(tracker: StreamTracker) -> Iterator[None]:
    """Sends this thread's event records and waits through ``tracker`` for the block."""
    with _install_lock:
        if not _open_watches:
            torch.cuda.Event.record = _record  # type: ignore[method-assign,assignment]
            torch.cuda.Event.wait = _wait  # type: ignore[method-assign,assignment]
        _open_watches.append(tracker)
    token = _TRACKER.set(tracker)
    try:
        yield
    finally:
        _TRACKER.reset(token)
        with _install_lock:
            _open_watches.remove(tracker)
            if not _open_watches:
                torch.cuda.Event.record = _original_record  # type: ignore[method-assign]
                torch.cuda.Event.wait = _original_wait  # type: ignore[method-assign]
