"""Gives PyTorch's CPU streams and events, which do nothing, the meaning that CUDA's have in capture.

Code written for any device uses ``torch.cpu.Stream``, ``Event`` and ``stream(...)`` on the CPU.
While a capture scope is open they act on the recording's DAG. This module must not know of
operators.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ... import torch_private
from ...errors import UnjoinedStreamError
from ..user_code import current_user_line
from .patching import Patch, ThreadPatches
from .recording import Recording
from .rules import forbidden
from .streams import CAPTURE_STREAM


class StreamNames:
    """Numbers and names for stream objects; one for a pool, so numbers last from scope to scope.

    Attributes:
        capture_stream: What is current when a scope begins.
    """

    def __init__(self) -> None:
        self.capture_stream = torch.cpu.Stream()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers[self.capture_stream] = CAPTURE_STREAM
        self._next = CAPTURE_STREAM + 1

    def number(self, stream: Any) -> int:
        """Returns the stream's number, a new one for a stream not seen before."""
        if stream not in self._numbers:
            self._numbers[stream] = self._next
            self._next += 1
        return self._numbers[stream]

    def name(self, stream: Any) -> str:
        """Returns the stream's name for errors."""
        number = self.number(stream)
        if number == CAPTURE_STREAM:
            return "the capture stream"
        kind = "default stream" if torch_private.is_default_cpu_stream(stream) else "side stream"
        return f"{kind} {number} ({type(stream).__name__} at {id(stream):#x})"


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """Where an event was recorded.

    Attributes:
        epoch: The recording, or 0 outside of one (in a break).
        stream: The stream.
        operations: What the event waits for.
    """

    epoch: int
    stream: int
    operations: frozenset[int]


class StreamWatch:
    """The streams of one capture scope.

    Attributes:
        current: The stream that the thread has selected.
        recording: The recording in the making, or None in a break.
    """

    def __init__(self, names: StreamNames) -> None:
        self._names = names
        self.current: Any = names.capture_stream
        self.recording: Recording | None = None
        self._epochs: set[int] = set()
        self._marks: weakref.WeakKeyDictionary[Any, _Mark] = weakref.WeakKeyDictionary()

    def number(self, stream: Any) -> int:
        """Returns the number of a stream object."""
        return self._names.number(stream)

    def begin(self, recording: Recording) -> None:
        """Follows a recording from now on."""
        self.recording = recording
        self._epochs.add(recording.epoch)

    def end(self) -> None:
        """Follows no recording any more."""
        self.recording = None

    def stream_of_work(self, recording: Recording) -> int:
        """Returns the number of the stream that work is issued to.

        Raises:
            UnjoinedStreamError: The stream is not part of the recording.
        """
        number = self._names.number(self.current)
        if not recording.order.is_member(number):
            raise recording.invalidate(
                UnjoinedStreamError(
                    f"Work was issued to {self._names.name(self.current)} at {current_user_line()} while a graph "
                    "was being recorded on the capture stream. It was not forked from it, so on CUDA the work "
                    "would run now and be missing at replay. Fork it in this graph: "
                    "side.wait_stream(current_stream())."
                )
            )
        return number

    def record(self, event: Any, stream: Any) -> None:
        """Records an event on a stream."""
        number, recording = self._names.number(stream), self.recording
        if recording is not None and recording.order.is_member(number):
            operations = recording.order.position(number)
            self._marks[event] = _Mark(epoch=recording.epoch, stream=number, operations=operations)
        else:
            self._marks[event] = _Mark(epoch=0, stream=number, operations=frozenset())

    def wait_stream(self, waiting: Any, awaited: Any) -> None:
        """Makes a stream wait for all work of another."""
        if self.recording is None:
            return
        number = self._names.number(awaited)
        if self.recording.order.is_member(number):
            self.recording.order.wait(
                self._names.number(waiting), self.recording.order.position(number), awaited=number
            )
        else:
            self._refuse_foreign(waiting, self._names.name(awaited))

    def wait_event(self, waiting: Any, event: Any) -> None:
        """Makes a stream wait for an event."""
        if self.recording is None:
            return
        mark = self._marks.get(event)
        number = self._names.number(waiting)
        if mark is not None and mark.epoch == self.recording.epoch:
            self.recording.order.wait(number, mark.operations, awaited=mark.stream)
        elif mark is not None and mark.epoch in self._epochs:
            # That graph is over before this one starts; a side stream still joins this recording.
            self.recording.order.wait(number, frozenset(), awaited=None)
        else:
            self._refuse_foreign(waiting, f"an event ({type(event).__name__} at {id(event):#x})")

    def _refuse_foreign(self, waiting: Any, what: str) -> None:
        """Raises if a stream of the recording would wait for work that is not in it."""
        if self.recording is not None and self.recording.order.is_member(self._names.number(waiting)):
            raise self.recording.invalidate(
                UnjoinedStreamError(
                    f"At {current_user_line()} {self._names.name(waiting)} waits for {what}, whose work is not part of "
                    "the graph that is being recorded; a replay could not wait for it (CUDA error 905). Fork the "
                    "side stream inside the captured code, or do the wait in a function marked @eager_on_graph."
                )
            )


def _stream(watch: StreamWatch, stream: Any) -> Any:
    return watch.current if stream is None else stream


def _wait_stream(watch: StreamWatch, original: Any, self: Any, stream: Any) -> None:
    watch.wait_stream(self, stream)


def _wait_event(watch: StreamWatch, original: Any, self: Any, event: Any) -> None:
    watch.wait_event(self, event)


def _record_event(watch: StreamWatch, original: Any, self: Any, event: Any = None) -> Any:
    event = torch.cpu.Event() if event is None else event
    watch.record(event, self)
    return event


def _event_record(watch: StreamWatch, original: Any, self: Any, stream: Any = None) -> None:
    watch.record(self, _stream(watch, stream))


def _event_wait(watch: StreamWatch, original: Any, self: Any, stream: Any = None) -> None:
    watch.wait_event(_stream(watch, stream), self)


def _host_wait(watch: StreamWatch, original: Any, *args: Any, **kwargs: Any) -> Any:
    if watch.recording is not None:
        raise watch.recording.invalidate(
            forbidden(
                f"{original.__qualname__}()",
                "the host would wait for work that is only written down, not running",
            )
        )
    return original(*args, **kwargs)


def _current_stream(watch: StreamWatch, original: Any, device: Any = None) -> Any:
    return watch.current


def _enter(watch: StreamWatch, original: Any, self: Any) -> None:
    if self.stream is not None:
        self.prev_stream, watch.current = watch.current, self.stream


def _exit(watch: StreamWatch, original: Any, self: Any, *error: Any) -> None:
    if self.stream is not None:
        watch.current = self.prev_stream


def _record_stream(watch: StreamWatch, original: Any, self: Any, stream: Any) -> None:
    if watch.recording is not None:
        watch.recording.share(self, watch.number(stream))


STREAM_PATCHES = ThreadPatches(
    (
        Patch(owner=torch.cpu.Stream, name="wait_stream", replacement=_wait_stream),
        Patch(owner=torch.cpu.Stream, name="wait_event", replacement=_wait_event),
        Patch(owner=torch.cpu.Stream, name="record_event", replacement=_record_event),
        Patch(owner=torch.cpu.Event, name="record", replacement=_event_record),
        Patch(owner=torch.cpu.Event, name="wait", replacement=_event_wait),
        Patch(owner=torch.cpu.Event, name="query", replacement=_host_wait),
        Patch(owner=torch.cpu.Event, name="synchronize", replacement=_host_wait),
        Patch(owner=torch.cpu, name="synchronize", replacement=_host_wait),
        Patch(owner=torch.cpu, name="current_stream", replacement=_current_stream),
        Patch(owner=torch.cpu.StreamContext, name="__enter__", replacement=_enter),
        Patch(owner=torch.cpu.StreamContext, name="__exit__", replacement=_exit),
        Patch(owner=torch.Tensor, name="record_stream", replacement=_record_stream),
    )
)
"""CUDA's stream semantics for a thread with an open capture scope; the watcher is a StreamWatch."""
