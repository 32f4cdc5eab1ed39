"""Changes to a captured CUDA graph before it is made launchable: memsets become copies of zeros.

Libraries clear counters and partial sums with ``cudaMemsetAsync`` (cuBLAS where it splits a product, cuDNN's
attention). A launch of a graph takes the host 1.3 us more for each memset in it, while copies and kernels cost it next
to nothing, and the device 0.7 us more than for a copy (measured on an H200 with CUDA 13;
``docs/decisions/0030-memsets-become-copies.md``). A graph that cannot be changed stays as it was captured.
This module must not know who captured the graph.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .cuda_runtime import libraries, typed
from .device import DEVICE_TO_DEVICE

NODE_TYPE_MEMSET = 2
# More than this is left as a memset, which does not read what it writes.
MAX_ZEROED_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Memset:
    """What a memset node does.

    Attributes:
        address: Where it writes.
        num_bytes: How much.
        is_zeros: Whether it writes one row of zeros and nothing else.
    """

    address: int
    num_bytes: int
    is_zeros: bool


class GraphEditor(Protocol):
    """What is asked of CUDA about a graph; graphs and nodes are addresses. None or False: it refused."""

    def memset_nodes(self, graph: int) -> list[int]:
        """Returns the memset nodes of a graph."""

    def memset_of(self, node: int) -> Memset | None:
        """Returns what a memset node does."""

    def neighbours(self, node: int) -> tuple[list[int], list[int]] | None:
        """Returns what a node depends on, and what depends on it, where these edges are plain ones."""

    def add_copy(
        self, graph: int, dependencies: Sequence[int], target: int, source: int, num_bytes: int
    ) -> int | None:
        """Adds a copy on the device and returns its node."""

    def connect(self, graph: int, node: int, dependents: Sequence[int]) -> bool:
        """Makes nodes depend on another."""

    def remove(self, node: int) -> bool:
        """Removes a node and its edges."""


def replace_memsets(editor: GraphEditor, graph: int, zeros: torch.Tensor) -> int:
    """Replaces memsets of zeros by copies; returns how many.

    Args:
        editor: Reaches the graph.
        graph: Address of a captured graph that was not made launchable yet.
        zeros: What is copied (uint8[n]); must stay as it is while the graph lives. Longer memsets are left.
    """
    num_replaced = 0
    for node in editor.memset_nodes(graph):
        memset = editor.memset_of(node)
        if memset is None or not memset.is_zeros or memset.num_bytes > zeros.nbytes:
            continue
        neighbours = editor.neighbours(node)
        if neighbours is None:
            continue
        before, after = neighbours
        copy = editor.add_copy(graph, before, memset.address, zeros.data_ptr(), memset.num_bytes)
        if copy is None:
            continue
        if not editor.connect(graph, copy, after):
            editor.remove(copy)
            continue
        # Both write the same zeros in the same place of the order, so one that stays does no harm.
        num_replaced += editor.remove(node)
    return num_replaced


@functools.cache
def zeros_on(device: torch.device) -> torch.Tensor:
    """Returns zeros for `replace_memsets` (uint8[65536]), the same for all graphs of a device.

    They are there when this returns, for every stream. Call it outside of captures.
    """
    with torch.inference_mode(False):
        zeros = torch.zeros(MAX_ZEROED_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.current_stream(device).synchronize()
    return zeros


class _MemsetParams(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS`` of the driver's API."""

    _fields_ = (
        ("dst", ctypes.c_ulonglong),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("elementSize", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class CudaGraphEditor(GraphEditor):
    """`GraphEditor` through the libraries that this process uses already."""

    def __init__(self, runtime: Any, driver: Any) -> None:
        pointer, size, out = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        self._nodes = typed(driver.cuGraphGetNodes, pointer, pointer, out)
        self._type = typed(driver.cuGraphNodeGetType, pointer, out)
        self._memset = typed(driver.cuGraphMemsetNodeGetParams, pointer, out)
        # Without a version: these refuse to answer where an edge carries data, which a plain one would lose.
        self._dependencies = typed(driver.cuGraphNodeGetDependencies, pointer, pointer, out)
        self._dependents = typed(driver.cuGraphNodeGetDependentNodes, pointer, pointer, out)
        self._connect = typed(driver.cuGraphAddDependencies, pointer, pointer, pointer, size)
        self._remove = typed(driver.cuGraphDestroyNode, pointer)
        self._forget_error = typed(runtime.cudaGetLastError)
        self._add_copy = typed(
            runtime.cudaGraphAddMemcpyNode1D,
            out,
            pointer,
            pointer,
            size,
            pointer,
            pointer,
            size,
            ctypes.c_int,
        )

    def memset_nodes(self, graph: int) -> list[int]:
        found, kind = [], ctypes.c_int()
        node_type, where = self._type, ctypes.byref(kind)
        for node in _listed(self._nodes, graph) or ():
            if node_type(node, where) == 0 and kind.value == NODE_TYPE_MEMSET:
                found.append(node)
        return found

    def memset_of(self, node: int) -> Memset | None:
        params = _MemsetParams()
        if self._memset(node, ctypes.byref(params)):
            return None
        return Memset(
            address=params.dst,
            num_bytes=params.width * params.elementSize,
            is_zeros=params.value == 0 and params.height == 1,
        )

    def neighbours(self, node: int) -> tuple[list[int], list[int]] | None:
        before, after = _listed(self._dependencies, node), _listed(self._dependents, node)
        return None if before is None or after is None else (before, after)

    def add_copy(
        self, graph: int, dependencies: Sequence[int], target: int, source: int, num_bytes: int
    ) -> int | None:
        node = ctypes.c_void_p()
        error = self._add_copy(
            ctypes.byref(node),
            graph,
            _array(dependencies),
            len(dependencies),
            target,
            source,
            num_bytes,
            DEVICE_TO_DEVICE,
        )
        if error:
            self._forget_error()  # PyTorch would take it for that of its next kernel.
            return None
        return node.value

    def connect(self, graph: int, node: int, dependents: Sequence[int]) -> bool:
        return not self._connect(graph, _array([node] * len(dependents)), _array(dependents), len(dependents))

    def remove(self, node: int) -> bool:
        return not self._remove(node)


@functools.cache
def load_editor() -> CudaGraphEditor | None:
    """Returns the editor of this process's graphs; None where a library, or a function of one, is missing."""
    found = libraries()
    if found is None:
        return None
    try:
        return CudaGraphEditor(*found)
    except AttributeError:
        return None


def _array(nodes: Sequence[int]) -> Any:
    return (ctypes.c_void_p * max(len(nodes), 1))(*nodes)


def _listed(function: Any, of: int) -> list[int] | None:
    """Returns what one of CUDA's functions lists of a graph or a node; None where it refuses."""
    count = ctypes.c_size_t()
    if function(of, None, ctypes.byref(count)):
        return None
    nodes = (ctypes.c_void_p * max(count.value, 1))()
    if count.value and function(of, nodes, ctypes.byref(count)):
        return None
    return [node for node in nodes[: count.value] if node is not None]
