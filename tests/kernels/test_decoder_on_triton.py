"""The decoder on the Triton kernels: eager, in graphs and under Dynamo it gives what plain torch gives."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Iterator

import pytest
import torch

from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context
from sgl_piecewise.runtime.kernels.kernel_set import kernel_set

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    # Inductor's own imports.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
NUM_TOKENS = 6


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.compiler.reset()
    with torch.inference_mode(), use_forward_context(ForwardContext(attention=CausalAttention())):
        yield
    torch.compiler.reset()


@pytest.fixture
def device(graph_device: GraphDevice) -> torch.device:
    if graph_device.torch_device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("with a GPU Triton compiles instead of interpreting")
    return graph_device.torch_device


def pair(device: torch.device, *, has_qk_norm: bool) -> tuple[Decoder, Decoder]:
    """The same weights on plain torch and on Triton."""
    config = dataclasses.replace(named_shape("tiny"), has_qk_norm=has_qk_norm)
    models = [
        random_decoder(config, device=device, dtype=torch.float32, kernels=kernel_set(name, device))
        for name in ("torch", "triton")
    ]
    return models[0], models[1]


def inputs(device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))
    return ids.to(device), torch.arange(NUM_TOKENS, device=device)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_qk_norm", [False, True])
def test_eager(has_qk_norm: bool, device: torch.device) -> None:
    plain, fused = pair(device, has_qk_norm=has_qk_norm)
    given = inputs(device)
    close(fused(*given), plain(*given))
    close(copy.deepcopy(fused)(*given), plain(*given))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_a_gate_of_gelu_is_a_kernel_too(device: torch.device) -> None:
    """Gemma's feed-forward, beside norms on what a layer adds and windows."""
    config = named_shape("tiny-gemma3").with_num_layers(2)
    plain, fused = (
        random_decoder(config, device=device, dtype=torch.float32, kernels=kernel_set(name, device))
        for name in ("torch", "triton")
    )
    given = inputs(device)
    with torch.profiler.profile() as profile:
        close(fused(*given), plain(*given))
    called = {event.key for event in profile.key_averages()}
    assert "sgl_piecewise_kernels::gelu_tanh_mul" in called


@pytest.mark.parametrize("strategy", ["full", "breakable"])
def test_captured(strategy: str, device: torch.device, graph_device: GraphDevice) -> None:
    """In-place kernels on the residual stream, which lives across breaks."""
    plain, fused = pair(device, has_qk_norm=True)
    captured = capture(fused, inputs(device), strategy=strategy, device=graph_device)
    for seed in (1, 2):
        given = inputs(device, seed)
        close(captured(*given), plain(*given))


def test_compiled_by_fx_and_captured(device: torch.device, graph_device: GraphDevice) -> None:
    """Each kernel is one node to Dynamo."""
    plain, fused = pair(device, has_qk_norm=True)
    compiled = torch.compile(fused, backend="sgl_piecewise", options={"piece_compiler": "fx"})
    close(compiled(*inputs(device)), plain(*inputs(device)))
    captured = capture(compiled, inputs(device), device=graph_device)
    for seed in (1, 2):
        given = inputs(device, seed)
        close(captured(*given), plain(*given))
