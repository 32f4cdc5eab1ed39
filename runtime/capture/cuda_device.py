"""CUDA as a graph device: `torch.cuda.CUDAGraph` segments on one pool and one capture stream.

Blocks of a graph pool belong to the stream that allocated them, so one pool has one capture stream
for all sizes; a new stream a size multiplied the memory sevenfold.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from .. import torch_private
from ..errors import (
    CaptureError,
    CaptureForbiddenError,
    ConfigError,
    DeviceUnavailableError,
    ReplayError,
    UnjoinedStreamError,
)
from . import cuda_runtime
from .cuda_graph import CudaGraph, generators_in_use
from .cuda_graph_edit import load_editor, replace_memsets, zeros_on
from .cuda_pool_model import CudaPoolModel
from .cuda_streams import StreamTracker, watch_streams
from .cuda_workspaces import given_stream, take_stream
from .device import GraphDevice, GraphPool, PoolMemory
from .user_code import raising_user_line

CaptureErrorMode = Literal["global", "thread_local", "relaxed"]


class CudaPool(GraphPool):
    """A graph pool of PyTorch's caching allocator, with its capture stream.

    Args:
        device: The device.
        handle: A handle from ``torch.cuda.graph_pool_handle()``; a new one if None.
        stream: The capture stream; one that is this pool's alone if None.
        error_mode: What CUDA forbids to other threads while capturing; ``thread_local`` nothing.
        generators: Further random generators that captured code draws from (the default one is known).

    Attributes:
        handle: The allocator's handle; renewed when a pool that made its own is used again after its
            last graph was freed.
        num_graphs: Graphs that use its memory.
        stream: The capture stream.
        tracker: Follows forks and joins while capturing.
        runtime: CUDA calls without a Python name; None where the libraries are missing.
    """

    def __init__(
        self,
        device: CudaDevice,
        *,
        handle: tuple[int, int] | None = None,
        stream: torch.cuda.Stream | None = None,
        error_mode: CaptureErrorMode = "thread_local",
        generators: tuple[torch.Generator, ...] = (),
    ) -> None:
        index = device.torch_device.index
        super().__init__(device, functools.partial(torch_private.raw_stream_getter(), index))
        self.handle: tuple[int, int] = torch.cuda.graph_pool_handle() if handle is None else handle
        self._is_own_handle = handle is None
        self._hold: weakref.finalize[..., CudaPool] | None = None
        self._is_scope_open = False
        self.num_graphs = 0
        self._libraries = take_stream(device.torch_device) if stream is None else given_stream(stream)
        self.stream = self._libraries.stream
        if stream is None:
            weakref.finalize(self, self._libraries.give_back)
        self.error_mode: CaptureErrorMode = error_mode
        self.generators = generators
        self.tracker = StreamTracker(self.stream)
        self.runtime = cuda_runtime.load()
        self._edits_graphs = device.edits_graphs and self.runtime is not None
        self._editor = load_editor() if self._edits_graphs else None
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._outside: set[int] = set()

    @property
    def edits_graphs(self) -> bool:
        return self._edits_graphs

    def launcher(self, steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
        launch = super().launcher(steps)
        if torch.cuda.device_count() == 1:
            return launch  # It is always current.
        current_device, index = torch_private.current_device_getter(), self.device.torch_device.index

        def launch_on_device() -> None:
            if current_device() == index:
                launch()
            else:
                with torch.cuda.device(index):
                    launch()

        return launch_on_device

    def random_offsets(self) -> list[int]:
        """Returns how far every generator that captured code may draw from has advanced."""
        default = torch.cuda.default_generators[self.device.torch_device.index]
        return [generator.get_offset() for generator in (default, *self.generators)]

    def _wait_for_stream(self, last_stream: int) -> None:
        # The event is recorded here and not after each use: most uses follow on the same stream, and an event
        # per replay costs as much as two graph launches.
        device = self.device.torch_device
        torch.cuda.current_stream(device).wait_stream(torch.cuda.ExternalStream(last_stream, device=device))

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        device = self.device.torch_device
        with torch.cuda.device(device):
            caller = torch.cuda.current_stream()
            self.stream.wait_stream(caller)
            try:
                with torch.cuda.stream(self.stream):
                    self._libraries.make_workspaces()
                    yield
            finally:
                caller.wait_stream(self.stream)

    @contextlib.contextmanager
    def capture_scope(self) -> Iterator[None]:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "The current CUDA stream is being captured already (by torch.cuda.graph or another library). "
                "A capture inside it is not possible; capture only once, outside or inside."
            )
        self._outside.clear()
        with generators_in_use:
            if self._editor is not None:
                # While nothing is being captured, by other threads either.
                zeros_on(self.device.torch_device)
            self._hold_memory()
            self._is_scope_open = True
            try:
                with self.on_capture_stream(), watch_streams(self.tracker):
                    yield
            finally:
                self._is_scope_open = False
                self.release_if_unused()

    def _hold_memory(self) -> None:
        """Keeps the allocator's pool usable from now on, whatever graphs come and go."""
        if self._hold is not None:
            return
        if self._is_own_handle:
            self.handle = torch.cuda.graph_pool_handle()
            self._starts, self._ends = [], []
        index = self.device.torch_device.index
        torch_private.hold_pool(index, self.handle)
        self._hold = weakref.finalize(self, torch_private.release_pool, index, self.handle)

    def release_if_unused(self) -> None:
        """Lets the memory go once no graph uses it; the next capture begins with a new handle."""
        if (
            self.num_graphs == 0
            and self._hold is not None
            and self._is_own_handle
            and not self._is_scope_open
        ):
            self._hold()
            self._hold = None

    def new_graph(self) -> CudaGraph:
        return CudaGraph(self)

    def replace_memsets(self, graph: int) -> None:
        """Replaces memsets in a captured graph, where the libraries allow it; see `cuda_graph_edit`.

        Args:
            graph: Its address; not made launchable yet.
        """
        if self._editor is not None:
            replace_memsets(self._editor, graph, zeros_on(self.device.torch_device))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        index = self.device.torch_device.index
        torch_private.begin_allocating_to_pool(index, self.handle)
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device.torch_device)
        finally:
            torch_private.end_allocating_to_pool(index, self.handle)

    def owns(self, tensor: torch.Tensor) -> bool:
        if tensor.device != self.device.torch_device:
            return False
        address = tensor.untyped_storage().data_ptr()
        if not address or address in self._outside:
            return False
        if self._lies_in_known_segment(address):
            return True
        segments = sorted(
            (segment["address"], segment["total_size"])
            for segment in torch_private.pool_segments(self.handle)
        )
        self._starts = [start for start, _ in segments]
        self._ends = [start + size for start, size in segments]
        if self._lies_in_known_segment(address):
            return True
        self._outside.add(address)
        return False

    def _lies_in_known_segment(self, address: int) -> bool:
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]

    def memory(self) -> PoolMemory:
        segments = torch_private.pool_segments(self.handle)
        return PoolMemory(
            reserved_bytes=sum(segment["total_size"] for segment in segments),
            allocated_bytes=sum(segment["allocated_size"] for segment in segments),
        )

    def recover(self) -> None:
        """Restores allocator and random state after a capture that CUDA invalidated.

        ``capture_end`` raises before it stops routing allocations to the pool and before it tells
        the generators that capture is over; the first is undone directly, the second by a capture
        of nothing that ends well.
        """
        torch_private.stop_routing_to_pool(self.device.torch_device.index, self.handle)
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with torch.cuda.stream(self.stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph.capture_begin(capture_error_mode=self.error_mode)
            graph.capture_end()
        graph.reset()


class CudaDevice(GraphDevice):
    """One CUDA device.

    Args:
        device: ``cuda`` or ``cuda:N``; the current device if no index is given.
        edits_graphs: Whether boundary copies, and copies of a drop-in call's inputs and outputs, are nodes of the
            graphs whose ends replay sets, and memsets become copies. That costs the host less per break, call and
            launch, and more host memory (``docs/decisions/0007-copies-inside-graphs.md``,
            ``0030-memsets-become-copies.md`` and ``0031-copies-of-calls-inside-graphs.md`` there).

    Raises:
        ConfigError: ``device`` is not a CUDA device.
        DeviceUnavailableError: PyTorch sees no CUDA device, or not this one.
    """

    is_emulated = False

    def __init__(self, device: torch.device | str = "cuda", *, edits_graphs: bool = True) -> None:
        asked = torch.device(device)
        if asked.type != "cuda":
            raise ConfigError(
                f"CudaDevice needs a cuda device, got {asked}; graph_device_for({str(asked)!r}) finds what serves it."
            )
        if not torch.cuda.is_available():
            raise DeviceUnavailableError(
                f"{asked} was asked for, but PyTorch {torch.__version__} sees no CUDA device on this machine. "
                "Use the CPU (capture is emulated there), or install a CUDA build of PyTorch."
            )
        index = torch.cuda.current_device() if asked.index is None else asked.index
        if index >= torch.cuda.device_count():
            raise DeviceUnavailableError(
                f"cuda:{index} was asked for, but there are {torch.cuda.device_count()} CUDA devices; "
                "they count from cuda:0 (and CUDA_VISIBLE_DEVICES may hide some)."
            )
        self.torch_device = torch.device("cuda", index)
        self.edits_graphs = edits_graphs
        self._pools: weakref.WeakValueDictionary[tuple[int, int], CudaPool] = weakref.WeakValueDictionary()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def new_pool(self) -> CudaPool:
        return CudaPool(self)

    def new_pool_model(self) -> CudaPoolModel:
        return CudaPoolModel(edits_graphs=self.edits_graphs and cuda_runtime.load() is not None)

    def pool_for(
        self,
        handle: tuple[int, int],
        stream: torch.cuda.Stream | None = None,
        error_mode: CaptureErrorMode = "thread_local",
    ) -> CudaPool:
        """Returns the pool of a handle from ``torch.cuda.graph_pool_handle()``, the same each time.

        Args:
            handle: The handle.
            stream: Capture stream of a pool that is made now; an older one keeps its own.
            error_mode: As of `CudaPool`, likewise.
        """
        pool = self._pools.get(handle)
        if pool is None:
            pool = CudaPool(self, handle=handle, stream=stream, error_mode=error_mode)
            self._pools[handle] = pool
        return pool

    def explain_failure(self, error: BaseException) -> CaptureError | None:
        if isinstance(error, CaptureError) or not isinstance(error, RuntimeError):
            return None
        text = str(error)
        lowered = text.lower()
        if "unjoined" in lowered or "not joined" in lowered:
            return UnjoinedStreamError(
                "A stream forked from the capture was not joined before a break or the end, by code that uses CUDA "
                "events outside PyTorch's Python API, so its name is not known. Join it there. CUDA says: "
                + text.splitlines()[0]
            )
        if "captur" not in lowered:
            return None
        return CaptureForbiddenError(
            f"Captured code did what CUDA cannot record at {raising_user_line(error)}: {text.splitlines()[0]}. "
            "Usual causes are a host sync (.item(), .cpu(), a shape that depends on data) or a copy from pageable "
            "host memory. Put the call into a function marked @eager_on_graph, or do it before the forward."
        )

    def refusal(self, error: int, what: str) -> ReplayError:
        runtime = cuda_runtime.load()
        return super().refusal(error, what) if runtime is None else runtime.refusal(error, what)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def release_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    def used_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free

    def allocator_reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.torch_device)
