"""Short hands for tests of the emulated device through the graph interface alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sgl_piecewise.runtime.capture.device import DeviceGraph
from sgl_piecewise.runtime.capture.emulated import EmulatedDevice, EmulatedPool

POISONED_INT64 = 0x7FFFFFFF_7FFFFFFF


@contextlib.contextmanager
def recording(pool: EmulatedPool) -> Iterator[DeviceGraph]:
    """Records one graph inside an open scope; aborts on an error."""
    graph = pool.new_graph()
    graph.begin()
    try:
        yield graph
    except BaseException:
        graph.abort()
        raise
    graph.end()


def capture(code: Callable[[], Any], pool: EmulatedPool | None = None) -> tuple[DeviceGraph, Any]:
    """Captures ``code`` as one graph; returns it with what ``code`` returned."""
    pool = pool or EmulatedDevice().new_pool()
    with torch.no_grad(), pool.capture_scope(), recording(pool) as graph:
        result = code()
    return graph, result


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality of values, with equal shapes, strides and types; NaN equals NaN."""
    if (left.shape, left.stride(), left.dtype) != (right.shape, right.stride(), right.dtype):
        return False
    if left.is_floating_point() or left.is_complex():
        return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
    return torch.equal(left, right)


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Tells whether every element is what undefined memory reads as."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    assert tensor.dtype is torch.int64
    return bool((tensor == POISONED_INT64).all())
