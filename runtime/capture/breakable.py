"""``BreakableCUDAGraph`` and ``BreakableCUDAGraphCapture``: SGLang's names and call shapes.

For code that manages its own static buffers: what runs inside the ``with`` block is captured, and
tensors it made stay owned by whoever holds them. The same engine as ``capture``.
"""

from __future__ import annotations

from types import TracebackType
from typing import get_args

import torch

from ..errors import CaptureError, ConfigError, ReplayError, nearest
from .cuda_device import CaptureErrorMode, CudaDevice, CudaPool
from .device import GraphDevice, GraphPool
from .devices import graph_device_for, refuse_other_device
from .recording import Recording
from .session import CaptureSession
from .statics import StaticTensorMap, StaticTensors


class BreakableCUDAGraph:
    """A replayable sequence of graphs and eager calls; empty until captured into.

    Source: SGLang 0.5 ``BreakableCUDAGraph``; differs: ``reset``, ``describe``, and it refuses a
    second capture without a reset.
    """

    def __init__(self) -> None:
        self._recording: Recording | None = None

    @property
    def recording(self) -> Recording:
        """The recording.

        Raises:
            ReplayError: Nothing was captured yet.
        """
        if self._recording is None:
            raise ReplayError(
                "This BreakableCUDAGraph holds no capture. Capture into it first: "
                "`with BreakableCUDAGraphCapture(graph): ...`."
            )
        return self._recording

    def replay(self) -> None:
        """Executes the captured work on the current stream; see ``Recording.replay``."""
        self.recording.replay()

    def reset(self) -> None:
        """Frees the graphs, so that the object can be captured into again. Idempotent."""
        if self._recording is not None:
            self._recording.reset()
            self._recording = None

    def describe(self) -> str:
        """Returns the recording as text."""
        return self.recording.describe()

    def pool(self) -> GraphPool:
        """Returns the graph pool, to be shared with further captures."""
        return self.recording.pool


class BreakableCUDAGraphCapture:
    """Captures the block into a graph; every marked call in it becomes a break.

    Args:
        cuda_graph: Receives the capture.
        pool: A `GraphPool`, a handle from ``torch.cuda.graph_pool_handle()``, or None for a new pool.
        stream: Capture stream; the pool's own if None. One stream for all captures of a pool, or
            their memory is not shared.
        device: Graph device or PyTorch device; the pool's, or CUDA where there is one, else emulated.
        capture_error_mode: As in ``torch.cuda.CUDAGraph.capture_begin``, for a new pool on CUDA; the emulated
            device never minds other threads.
        launch_segments: Whether closed segments run while capturing (see `CaptureSession`).
        static_tensors: Tensors whose addresses are checked on the first replay, or callables that
            return them.

    Raises:
        ConfigError: Arguments that do not go together.

    Source: SGLang 0.5 ``BreakableCUDAGraphCapture(cuda_graph, pool, stream, capture_error_mode)``.
    """

    def __init__(
        self,
        cuda_graph: BreakableCUDAGraph,
        pool: GraphPool | tuple[int, int] | None = None,
        stream: torch.cuda.Stream | None = None,
        device: GraphDevice | torch.device | str | None = None,
        *,
        capture_error_mode: CaptureErrorMode = "thread_local",
        launch_segments: bool = True,
        static_tensors: StaticTensorMap | None = None,
    ) -> None:
        if not isinstance(cuda_graph, BreakableCUDAGraph):
            raise ConfigError(f"cuda_graph must be a BreakableCUDAGraph, got {type(cuda_graph).__name__}.")
        if capture_error_mode not in get_args(CaptureErrorMode):
            raise ConfigError(
                f"Unknown capture_error_mode {capture_error_mode!r}. "
                f"{nearest(str(capture_error_mode), get_args(CaptureErrorMode))}"
            )
        self._cuda_graph = cuda_graph
        self._is_open = False
        self._session = CaptureSession(
            _pool_for(pool, stream, device, capture_error_mode),
            launch_segments=launch_segments,
            statics=StaticTensors(static_tensors),
        )

    def __enter__(self) -> BreakableCUDAGraphCapture:
        if self._cuda_graph._recording is not None:
            raise CaptureError("This BreakableCUDAGraph already holds a capture; call reset() on it first.")
        self._session.__enter__()
        self._is_open = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if not self._is_open:
            raise CaptureError(
                "This capture is not open; use it as `with BreakableCUDAGraphCapture(graph): ...`."
            )
        self._is_open = False
        suppressed = self._session.__exit__(exc_type, exc, traceback)
        self._cuda_graph._recording = self._session.recording
        return suppressed


def _pool_for(
    pool: GraphPool | tuple[int, int] | None,
    stream: torch.cuda.Stream | None,
    device: GraphDevice | torch.device | str | None,
    error_mode: CaptureErrorMode,
) -> GraphPool:
    if isinstance(pool, GraphPool):
        if device is not None:
            refuse_other_device(pool, graph_device_for(device))
        found = pool
    else:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        found = _pool_on(graph_device_for(device), pool, stream, error_mode)
    if stream is None:
        return found
    if not isinstance(found, CudaPool):
        raise ConfigError(f"Capture streams belong to CUDA; on {found.device.name} leave stream out.")
    if found.stream != stream:
        raise ConfigError(
            "stream differs from the pool's capture stream. Blocks of a graph pool belong to a stream: "
            "leave stream out, or give the pool that stream."
        )
    return found


def _pool_on(
    device: GraphDevice,
    handle: tuple[int, int] | None,
    stream: torch.cuda.Stream | None,
    error_mode: CaptureErrorMode,
) -> GraphPool:
    if not isinstance(device, CudaDevice):
        if handle is not None:
            raise ConfigError(f"Pool handles belong to CUDA; on {device.name} pass a GraphPool or nothing.")
        return device.new_pool()
    if handle is not None:
        return device.pool_for(handle, stream, error_mode)
    return CudaPool(device, stream=stream, error_mode=error_mode)
