"""Attention tests run without autograd, from one seed, on each kind of device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

# The interpreter of Triton computes with numpy, which warns of what IEEE arithmetic defines.
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton (CPU: its interpreter)"
)


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where tensors live. With a GPU, Triton is not interpreted and its tests run there only."""
    return torch.device(request.param)


@pytest.fixture(params=["torch", pytest.param("triton", marks=needs_triton)])
def backend_name(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "triton" and device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("with a GPU Triton compiles instead of interpreting")
    return str(request.param)
