"""Workspaces of cuBLAS that graphs write to: they outlive that PyTorch forgets them, and are not made anew each time.

PyTorch's own CUDA graphs clear all workspaces of a process (`torch/_inductor/cudagraph_trees.py`).
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_piecewise.runtime import torch_private
from sgl_piecewise.runtime.capture import cuda_workspaces
from sgl_piecewise.runtime.capture.breakable import BreakableCUDAGraph, BreakableCUDAGraphCapture
from sgl_piecewise.runtime.capture.cuda_device import CudaDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.mark import eager_on_graph

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@eager_on_graph
def passes_on(t: torch.Tensor) -> torch.Tensor:
    return t.clone()


class Products(torch.nn.Module):
    """Products of shapes for which cuBLAS splits the reduction, which needs a workspace."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8192, 64, device="cuda", dtype=dtype)
        self.second = torch.nn.Linear(64, 256, bias=False, device="cuda", dtype=dtype)
        self.third = torch.nn.Linear(256, 256, device="cuda", dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(passes_on(self.first(x)))))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["full", "breakable"])
def test_a_replay_writes_to_no_workspace_that_was_forgotten(dtype: torch.dtype, strategy: str) -> None:
    model = Products(dtype)
    x = torch.randn(16, 8192, device="cuda", dtype=dtype)
    captured = capture(model, (x,), strategy=strategy)
    want = captured(x).clone()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [
        torch.zeros(1 << 22, dtype=torch.uint8, device="cuda") for _ in range(64)
    ]  # Takes what was freed.
    for _ in range(3):
        assert torch.equal(captured(x), want)
    assert not any(bool(other.any()) for other in others)


@pytest.mark.gpu
@needs_gpu
def test_streams_and_their_workspaces_are_used_again() -> None:
    """A pool of its own for each of many captures, as compiled models that come and go have."""
    model, x = Products(torch.float32), torch.randn(16, 8192, device="cuda")
    used: list[int] = []
    for _ in range(12):
        captured = capture(model, (x,), strategy="full", device=CudaDevice())
        captured(x)
        del captured
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_reserved())
    assert used[-1] == used[1]


def test_captures_on_a_given_stream_hold_one_pool_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never let go, so one for each capture would be lost memory."""
    held: list[int] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, len(held) + 1))
    monkeypatch.setattr(torch_private, "hold_pool", lambda index, pool_id: held.append(index))
    monkeypatch.setattr(cuda_workspaces, "_GIVEN", {})

    def stream(index: int, handle: int) -> Any:
        return SimpleNamespace(device=torch.device("cuda", index), cuda_stream=handle)

    first = cuda_workspaces.given_stream(stream(0, 7))
    assert cuda_workspaces.given_stream(stream(0, 7)) is first
    assert cuda_workspaces.given_stream(stream(0, 8)) is not first
    assert cuda_workspaces.given_stream(stream(1, 7)) is not first
    assert held == [0, 0, 1]


@pytest.mark.gpu
@needs_gpu
def test_many_captures_on_a_given_stream_reserve_what_one_does() -> None:
    model, x, stream = Products(torch.float32), torch.randn(16, 8192, device="cuda"), torch.cuda.Stream()
    used: list[int] = []
    with torch.no_grad():
        model(x)
    for _ in range(6):
        graph = BreakableCUDAGraph()
        with torch.no_grad(), BreakableCUDAGraphCapture(graph, stream=stream):
            model(x)
        graph.replay()
        torch.cuda.synchronize()
        del graph
        gc.collect()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_reserved())
    assert used[-1] == used[1]
