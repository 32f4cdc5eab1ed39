"""The emulated device and its pools: CUDA-graph capture imitated on the CPU."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch

from ... import torch_private
from ...errors import CaptureError
from ..device import DeviceGraph, GraphDevice, GraphPool, PoolMemory
from . import arena as arena_module
from .arena import Arena, rounded_bytes
from .graph import EmulatedGraph
from .opaque import compiled_code_patches
from .pool_model import EmulatedPoolModel
from .recorder import Recorder
from .streams import CAPTURE_STREAM
from .torch_streams import STREAM_PATCHES, StreamNames, StreamWatch


class _Scopes(threading.local):
    """Whether this thread has a capture scope open, on whatever pool."""

    is_open = False


_SCOPES = _Scopes()


class EmulatedPool(GraphPool):
    """An arena and the recorder that fills it.

    Attributes:
        arena: The pool's memory.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__(device, int)  # One stream: number 0.
        self.arena = Arena(device.reserve)
        self._edits_graphs = device.edits_graphs
        self._recorder: Recorder | None = None
        self._thread: int | None = None
        self._stream_names = StreamNames()

    @property
    def edits_graphs(self) -> bool:
        return self._edits_graphs

    def _wait_for_stream(self, last_stream: int) -> None:
        raise AssertionError("the emulated device replays on one stream")

    @contextlib.contextmanager
    def capture_scope(self) -> Iterator[None]:
        if _SCOPES.is_open or self._recorder is not None:
            raise CaptureError(
                "Capture inside capture: this thread, or this pool, is capturing already. Finish the outer "
                "capture first, or call the inner callable without capturing it."
            )
        streams = StreamWatch(self._stream_names)
        recorder = Recorder(self.arena, streams)
        recorder.forget_frees()
        _SCOPES.is_open = True
        self._recorder, self._thread = recorder, threading.get_ident()
        try:
            STREAM_PATCHES.watch(streams)
            compiled_code_patches().watch(recorder)
            with recorder:
                yield
        finally:
            try:
                recorder.abort()
                recorder.forget_frees()
            finally:
                compiled_code_patches().unwatch()
                STREAM_PATCHES.unwatch()
                self._recorder = self._thread = None
                _SCOPES.is_open = False

    def open_recorder(self) -> Recorder:
        """Returns the recorder of the scope that this thread has open on the pool.

        Raises:
            CaptureError: There is none, or it is another thread's.
        """
        if self._recorder is None or self._thread != threading.get_ident():
            raise CaptureError(
                "No capture_scope of this pool is open in this thread; a recording begins, ends and "
                "allocates inside one."
            )
        return self._recorder

    def abort_recording(self) -> None:
        """Drops what is being recorded, if anything is."""
        if self._recorder is not None and self._thread == threading.get_ident():
            self._recorder.abort()

    def new_graph(self) -> DeviceGraph:
        return EmulatedGraph(self)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        recorder = self.open_recorder()
        recorder.drain()
        with torch_private.without_dispatch_modes():
            storage = self.arena.allocate(num_bytes, stream=CAPTURE_STREAM)
            memory = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))
            arena_module.poison_range(memory.data_ptr(), rounded_bytes(num_bytes), False)
        return memory

    def owns(self, tensor: torch.Tensor) -> bool:
        return self.arena.contains(tensor.untyped_storage().data_ptr())

    def memory(self) -> PoolMemory:
        return PoolMemory(
            reserved_bytes=self.arena.reserved_bytes, allocated_bytes=self.arena.allocated_bytes
        )


class EmulatedDevice(GraphDevice):
    """The CPU under CUDA's rules.

    Args:
        limit_bytes: What all its pools together may reserve; None for no limit.
        edits_graphs: Whether boundary copies, and copies of a drop-in call's inputs and outputs, are part of the
            graphs, as with this option of `CudaDevice`; there are no memsets here.
    """

    is_emulated = True

    def __init__(self, *, limit_bytes: int | None = None, edits_graphs: bool = True) -> None:
        self.torch_device = torch.device("cpu")
        self.edits_graphs = edits_graphs
        self._limit_bytes = limit_bytes
        self._pools: weakref.WeakSet[EmulatedPool] = weakref.WeakSet()

    @property
    def name(self) -> str:
        return "emulated"

    def new_pool(self) -> EmulatedPool:
        pool = EmulatedPool(self)
        self._pools.add(pool)
        return pool

    def new_pool_model(self) -> EmulatedPoolModel:
        return EmulatedPoolModel(edits_graphs=self.edits_graphs)

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def used_bytes(self) -> int | None:
        return None

    def allocator_reserved_bytes(self) -> int:
        return sum(pool.arena.reserved_bytes for pool in self._pools)

    def reserve(self, num_bytes: int) -> None:
        """Lets a pool grow.

        Raises:
            torch.OutOfMemoryError: The device's limit would be passed.
        """
        reserved = self.allocator_reserved_bytes()
        if self._limit_bytes is not None and reserved + num_bytes > self._limit_bytes:
            raise torch.OutOfMemoryError(
                f"Emulated device out of memory: tried to reserve {num_bytes} bytes more, {reserved} of "
                f"{self._limit_bytes} are reserved. Capture fewer or smaller sizes, or raise limit_bytes."
            )
