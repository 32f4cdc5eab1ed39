"""Workspaces of cuBLAS that graphs write to: they outlive that PyTorch forgets them, and are not made anew each time.

PyTorch's own CUDA graphs clear all workspaces of a process (`torch/_inductor/cudagraph_trees.py`).
"""

from __future__ import annotations

import gc

import pytest
import torch

from sgl_piecewise.runtime.capture.cuda_device import CudaDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.mark import eager_on_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
