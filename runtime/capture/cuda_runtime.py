"""CUDA calls that PyTorch has no Python name for, through ctypes.

They cut the host's cost of a break: setting the source of a copy node costs less than a ``copy_``,
and launching a graph here skips PyTorch's look at random generators, which only graphs that draw
random numbers need. Everything is optional: without the libraries `load` returns None and the
callers use PyTorch's own calls. This module must not know what is copied or launched.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ReplayError
from .device import DEVICE_TO_DEVICE

_NODE_TYPE_MEMCPY = 1
_CAPTURE_ACTIVE = 1
_STREAM_NON_BLOCKING = 1


@dataclass(frozen=True, kw_only=True)
class CudaRuntime:
    """Entry points of the CUDA runtime and driver that this process uses already.

    Attributes:
        launch: ``cudaGraphLaunch(exec, stream) -> error``.
        set_copy: ``cudaGraphExecMemcpyNodeSetParams1D(exec, node, target, source, bytes, kind) -> error``.
        capture_info: ``cuStreamGetCaptureInfo_v2``.
        node_type: ``cudaGraphNodeGetType``.
        create_stream: ``cudaStreamCreateWithFlags(&stream, flags) -> error``.
        error_name: ``cudaGetErrorName``.
        forget_error: ``cudaGetLastError``, which forgets the last error.
    """

    launch: Any
    set_copy: Any
    capture_info: Any
    node_type: Any
    create_stream: Any
    error_name: Any
    forget_error: Any

    def last_copy_node(self, stream: int) -> int | None:
        """Returns the node that the capture on ``stream`` recorded last, if it is a copy, else None."""
        status, capture_id, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
        nodes, num_nodes = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        error = self.capture_info(
            stream,
            ctypes.byref(status),
            ctypes.byref(capture_id),
            ctypes.byref(graph),
            ctypes.byref(nodes),
            ctypes.byref(num_nodes),
        )
        if error or status.value != _CAPTURE_ACTIVE or num_nodes.value != 1:
            return None
        kind = ctypes.c_int()
        if self.node_type(nodes[0], ctypes.byref(kind)) or kind.value != _NODE_TYPE_MEMCPY:
            return None
        return nodes[0]

    def new_stream(self) -> int:
        """Returns a new stream of the current device, which does not wait for the default stream.

        Raises:
            ReplayError: CUDA refused.
        """
        stream = ctypes.c_void_p()
        self.check(self.create_stream(ctypes.byref(stream), _STREAM_NON_BLOCKING), "create a capture stream")
        assert stream.value is not None, "CUDA reported success"
        return stream.value

    def check(self, error: int, what: str) -> None:
        """Raises if a call failed.

        Args:
            error: What the call returned; 0 is success.
            what: What it was to do, completing "CUDA refused to ...".

        Raises:
            ReplayError: Names the call and CUDA's error.
        """
        if error:
            raise self.refusal(error, what)

    def refusal(self, error: int, what: str) -> ReplayError:
        """Makes the error for a failed call. CUDA forgets it: PyTorch would take it for that of its next kernel."""
        self.forget_error()
        name = (self.error_name(error) or b"unknown").decode()
        return ReplayError(
            f"CUDA refused to {what}: {name} (error {error}). CUDA reports errors late: to see which work failed, run "
            "again with CUDA_LAUNCH_BLOCKING=1, or without graphs (capture(debug=True), or options={'capture': 'none'} "
            "of torch.compile)."
        )


@functools.cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """Finds the CUDA runtime and driver libraries of this process; None where one is missing."""
    version = torch.version.cuda
    if version is None:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}"), ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@functools.cache
def load() -> CudaRuntime | None:
    """Returns the entry points; None where a library is missing."""
    found = libraries()
    if found is None:
        return None
    runtime, driver = found
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    error_name = typed(runtime.cudaGetErrorName, number)
    error_name.restype = ctypes.c_char_p
    return CudaRuntime(
        launch=typed(runtime.cudaGraphLaunch, pointer, pointer),
        set_copy=typed(
            runtime.cudaGraphExecMemcpyNodeSetParams1D, pointer, pointer, pointer, pointer, size, number
        ),
        capture_info=typed(driver.cuStreamGetCaptureInfo_v2, *[pointer] * 6),
        node_type=typed(runtime.cudaGraphNodeGetType, pointer, pointer),
        create_stream=typed(runtime.cudaStreamCreateWithFlags, pointer, ctypes.c_uint),
        error_name=error_name,
        forget_error=typed(runtime.cudaGetLastError),
    )


def typed(function: Any, *types: Any) -> Any:
    """Returns a function of a library, told what it takes; it returns an integer."""
    function.argtypes = list(types)
    return function


def copy_setter(
    runtime: CudaRuntime, executable: int, node: int, target: torch.Tensor, held: list[torch.Tensor]
) -> Callable[[torch.Tensor], None]:
    """Returns a function that makes a copy node read from a given tensor at the next launches.

    Launches under way are not affected (CUDA: updates of an executable graph hold for future ones). It remembers what
    it set and leaves the node alone where nothing changed, so a node has one such function and no other way to be set.

    Args:
        runtime: The entry points.
        executable: Address of the executable graph.
        node: Address of the node in the graph that it was made from.
        target: Where the node writes; dense.
        held: Receives the tensor, so that it lives until whoever launches the graph clears it.

    Returns:
        ``set_source(tensor) -> None``; the tensor is dense, of the target's shape and type.
    """
    set_copy, address, num_bytes = runtime.set_copy, target.data_ptr(), target.nbytes
    hold, check = held.append, runtime.check
    last_source = 0

    def set_source(source: torch.Tensor) -> None:
        nonlocal last_source
        hold(source)
        now = source.data_ptr()
        # Results of a break mostly lie where those of the last replay lay. A graph whose node was set anew takes
        # longer to launch, beside what setting it takes.
        if now != last_source:
            last_source = 0  # Unknown, should an interrupt come out of the call.
            error = set_copy(executable, node, address, now, num_bytes, DEVICE_TO_DEVICE)
            if error:
                check(error, "set the source of a boundary copy")
            last_source = now

    return set_source
