"""SGLang's names and call shapes: code that manages its own buffers moves over as it is."""

from __future__ import annotations

import pytest
import torch

from contract.support import assert_equal, churn, ramp, record
from sgl_piecewise.runtime.capture.breakable import BreakableCUDAGraph, BreakableCUDAGraphCapture
from sgl_piecewise.runtime.capture.cuda_device import CudaPool
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.devices import graph_device_for
from sgl_piecewise.runtime.errors import CaptureError, ConfigError, ReplayError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def test_replay_reads_static_inputs_and_writes_outputs_in_place(graph_device: GraphDevice) -> None:
    x, graph = ramp(graph_device, 4), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, device=graph_device):
        y = double(x + 1) - 1
    for start in (3.0, 30.0):
        x.copy_(ramp(graph_device, 4, start=start))
        graph.replay()
        assert_equal(y, (x + 1) * 2 - 1)


def test_tensor_held_by_the_user_outlives_later_captures_of_the_pool(graph_device: GraphDevice) -> None:
    x, first, second = ramp(graph_device, 64), BreakableCUDAGraph(), BreakableCUDAGraph()
    pool = graph_device.new_pool()
    with BreakableCUDAGraphCapture(first, pool=pool):
        y = double(x + 1) - 1
    with BreakableCUDAGraphCapture(second, pool=pool):
        z = double(x * 3) + torch.full_like(x, 100.0)
    first.replay()
    kept = y.clone()
    second.replay()
    churn(graph_device, (64,))
    assert_equal(y, kept)
    assert_equal(y, (x + 1) * 2 - 1)
    assert_equal(z, x * 6 + 100)


def test_pool_of_one_graph_serves_the_next(graph_device: GraphDevice) -> None:
    x, first, second = ramp(graph_device, 64), BreakableCUDAGraph(), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(first, device=graph_device):
        y = double(x + 1)
    with BreakableCUDAGraphCapture(second, pool=first.pool()):
        z = double(x + 2)
    first.replay()
    second.replay()
    assert_equal([y, z], [(x + 1) * 2, (x + 2) * 2])
    assert first.pool() is second.pool()


def test_empty_graph_says_so(graph_device: GraphDevice) -> None:
    graph = BreakableCUDAGraph()
    for use in (graph.replay, graph.describe, graph.pool):
        with pytest.raises(ReplayError, match="no capture"):
            use()
    graph.reset()


def test_second_capture_needs_a_reset(graph_device: GraphDevice) -> None:
    x, graph = ramp(graph_device, 4), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, device=graph_device):
        x + 1
    with pytest.raises(CaptureError, match="reset"):
        record(lambda: x + 1, graph=graph, device=graph_device)
    graph.reset()
    graph.reset()
    with BreakableCUDAGraphCapture(graph, device=graph_device):
        y = x + 2
    graph.replay()
    assert_equal(y, x + 2)


def test_describe_lists_segments(graph_device: GraphDevice) -> None:
    x, graph = ramp(graph_device, 4), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, device=graph_device):
        double(x + 1)
    text = graph.describe()
    assert "graphs=2 breaks=1" in text
    assert f"break {double.name}" in text


def test_without_launching_needs_stand_ins(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    with pytest.raises(CaptureError, match="capture_stub"):
        record(lambda: double(x + 1), device=graph_device, launch_segments=False)


def test_wrong_arguments_are_refused(graph_device: GraphDevice) -> None:
    with pytest.raises(ConfigError, match="BreakableCUDAGraph"):
        BreakableCUDAGraphCapture(object(), device=graph_device)  # type: ignore[arg-type]
    if graph_device.is_emulated:
        with pytest.raises(ConfigError, match="CUDA"):
            BreakableCUDAGraphCapture(BreakableCUDAGraph(), pool=(0, 1), device=graph_device)


@pytest.mark.gpu
def test_positional_call_shape_with_a_pool_handle_and_a_stream() -> None:
    """``BreakableCUDAGraphCapture(graph, pool, stream)`` as SGLang calls it."""
    handle, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    x = torch.arange(4.0, device="cuda")
    first, second = BreakableCUDAGraph(), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(first, handle, stream):
        y = double(x + 1)
    with BreakableCUDAGraphCapture(second, handle, stream):
        z = double(x + 2)
    first.replay()
    second.replay()
    assert_equal([y, z], [(x + 1) * 2, (x + 2) * 2])
    for pool in (first.pool(), handle):
        with pytest.raises(ConfigError, match="stream"):
            BreakableCUDAGraphCapture(BreakableCUDAGraph(), pool, torch.cuda.Stream())


@pytest.mark.gpu
def test_pool_and_device_must_agree() -> None:
    pool = graph_device_for("cpu").new_pool()
    with pytest.raises(ConfigError, match=r"pool is on cpu.*on cuda"):
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), pool, device="cuda")


@pytest.mark.gpu
def test_error_mode_reaches_the_pool_that_is_made_for_a_handle() -> None:
    """It went into new pools without a handle only."""
    x, graph = torch.arange(4.0, device="cuda"), BreakableCUDAGraph()
    handle = torch.cuda.graph_pool_handle()
    with BreakableCUDAGraphCapture(graph, handle, capture_error_mode="relaxed"):
        double(x + 1)
    pool = graph.pool()
    assert isinstance(pool, CudaPool)
    assert pool.error_mode == "relaxed"


def test_capture_left_without_being_entered_is_an_error(graph_device: GraphDevice) -> None:
    block = BreakableCUDAGraphCapture(BreakableCUDAGraph(), device=graph_device)
    with pytest.raises(CaptureError, match="not open"):
        block.__exit__(None, None, None)


def test_unknown_error_mode_names_the_nearest(graph_device: GraphDevice) -> None:
    with pytest.raises(ConfigError, match="thread_local"):
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), device=graph_device, capture_error_mode="threadlocal")  # type: ignore[arg-type]
