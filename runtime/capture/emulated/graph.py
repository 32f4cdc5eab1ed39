"""One graph of the emulated device: records through the pool's recorder, replays a list of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ... import torch_private
from ...errors import CaptureError, ReplayError
from ..device import DEVICE_TO_DEVICE, DeviceGraph, EndsSetter, SettableCopy
from ..user_code import current_user_line
from .recording import Operation
from .refusals import REFUSALS
from .streams import CAPTURE_STREAM

if TYPE_CHECKING:
    from .device import EmulatedPool


_INVALID_VALUE = 1  # As CUDA.


class EmulatedCopy(SettableCopy):
    """A copy of bytes, as a memcpy node is: of lazy conjugation and strides it knows nothing."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # Addresses, as in a memcpy node. The graph keeps the arena mapped; who recorded the copy keeps other memory.
        self._ends: tuple[int, int, int] | None = (target.data_ptr(), source.data_ptr(), target.nbytes)
        self._target, self._num_bytes = target.data_ptr(), target.nbytes
        self._source: torch.Tensor | None = None

    def setter(self) -> Callable[[torch.Tensor], None]:
        return self._set_source

    def _set_source(self, source: torch.Tensor) -> None:
        self._source = source
        self._ends = self._target, source.data_ptr(), self._num_bytes

    def ends_setter(self) -> EndsSetter:
        return self._set_ends

    def _set_ends(self, target: int, source: int, num_bytes: int, kind: int) -> int:
        if kind != DEVICE_TO_DEVICE or num_bytes != self._num_bytes:
            return _INVALID_VALUE
        self._ends = target, source, num_bytes
        return 0

    def run(self) -> None:
        """Copies, and lets go of the source if it holds it."""
        if self._ends is None:
            raise ReplayError(
                "A graph was launched twice for one source of one of its copies, which is gone by now. Set the source "
                "before each launch."
            )
        ctypes.memmove(*self._ends)
        if self._source is not None:
            self._ends = self._source = None


class EmulatedGraph(DeviceGraph):
    """A recorded stretch of operators."""

    def __init__(self, pool: EmulatedPool) -> None:
        self._pool = pool
        # Operations point into the arena without owning it: this keeps it mapped.
        self._arena = pool.arena
        self._operations: list[Operation] | None = None
        self._orders: list[list[int]] = []
        self._num_replays = 0
        self._is_recording = False

    def begin(self) -> None:
        recorder = self._pool.open_recorder()
        if recorder.recording is not None:
            raise CaptureError("begin() while another graph of this pool is being recorded; end it first.")
        recorder.begin()
        self._is_recording = True

    def record_copy(self, target: torch.Tensor, source: torch.Tensor) -> SettableCopy:
        recording = self._pool.open_recorder().recording
        if recording is None:
            raise CaptureError("record_copy() of a graph that is not being recorded.")
        copy = EmulatedCopy(target, source)
        recording.add("boundary_copy", copy.run, CAPTURE_STREAM)
        return copy

    def end(self) -> None:
        recorder = self._pool.open_recorder()
        if not self._is_recording:
            raise CaptureError("end() of a graph that is not being recorded.")
        self._is_recording = False
        recording = recorder.end()
        self._operations = recording.operations
        self._orders = recording.order.orders()

    def abort(self) -> None:
        self._is_recording = False
        self._pool.abort_recording()

    def replay(self) -> None:
        if self._operations is None:
            raise ReplayError("This graph holds nothing to replay: it was never ended, or it was reset.")
        outer = REFUSALS.watcher()
        if outer is not None:
            raise outer.invalidate(
                CaptureError(
                    f"A graph was replayed at {current_user_line()} while another one is being recorded. They cannot "
                    "nest; call the captured function's original, or replay in a function marked "
                    "@eager_on_graph on a pool of its own."
                )
            )
        order = self._orders[self._num_replays % len(self._orders)]
        self._num_replays += 1
        # A launch is seen by no mode, and neither grad mode nor autocast of the caller matters.
        with torch_private.without_dispatch_modes(), torch_private.without_autocast(), torch.inference_mode():
            for index in order:
                self._operations[index].run()

    def reset(self) -> None:
        self._operations = None
        self._orders = []

    @property
    def num_ops(self) -> int | None:
        return len(self.op_names())

    def op_names(self) -> list[str]:
        return [operation.name for operation in self._operations or () if operation.name is not None]
