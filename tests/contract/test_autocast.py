"""Autocast is no argument, and a replay computes as if it stood where it stood at capture."""

from __future__ import annotations

import copy

import pytest
import torch

from contract.support import WAYS, assert_equal, churn, ramp
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.mark import eager_on_graph


class Projection(torch.nn.Module):
    """A layer in captured code and in a body; the results are float32 whatever autocast does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    @eager_on_graph
    def body(self, t: torch.Tensor) -> torch.Tensor:
        return self.inner(t).float()

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.inner(self.body(t)).float() + self.inner(t).float()


class Autocasting(Projection):
    """The same with autocast in the forward, as many models have it."""

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        with torch.autocast(t.device.type, dtype=torch.bfloat16):
            return super().forward(t)


@pytest.mark.parametrize("way", WAYS)
def test_autocast_in_the_forward_holds_in_a_break_at_replay(graph_device: GraphDevice, way: str) -> None:
    model = Autocasting().to(graph_device.torch_device)
    x = ramp(graph_device, 4, 64) / 64
    captured = capture(model, (x,), device=graph_device, **WAYS[way])
    for step in (1, 2):
        assert_equal(captured(x * step), model(x * step))


@pytest.mark.parametrize("way", WAYS)
def test_autocast_around_capture_holds_wherever_the_replay_is(graph_device: GraphDevice, way: str) -> None:
    model = Projection().to(graph_device.torch_device)
    x, kind = ramp(graph_device, 4, 64) / 64, graph_device.torch_device.type
    with torch.autocast(kind, dtype=torch.bfloat16):
        captured = capture(model, (x,), device=graph_device, **WAYS[way])
        expected = model(x)
        assert_equal(captured(x), expected)
    assert_equal(captured(x), expected)


def test_autocast_around_a_replay_does_not_reach_a_body(graph_device: GraphDevice) -> None:
    model = Projection().to(graph_device.torch_device)
    x = ramp(graph_device, 4, 64) / 64
    captured = capture(model, (x,), device=graph_device)
    expected = model(x)
    with torch.autocast(graph_device.torch_device.type, dtype=torch.bfloat16):
        assert_equal(captured(x), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_cast_weight_is_not_kept_from_before_the_graph(graph_device: GraphDevice, way: str) -> None:
    """Autocast's cache holds casts of the warm-up and of bodies; the graph must cast for itself."""
    model = Projection().to(graph_device.torch_device)
    x, kind = ramp(graph_device, 4, 64) / 64, graph_device.torch_device.type
    with torch.autocast(kind, dtype=torch.bfloat16):
        captured = capture(model, (x,), device=graph_device, **WAYS[way])
    churn(graph_device, (64, 64))
    model.inner.weight.copy_(copy.deepcopy(model.inner.weight) * 2)
    with torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False):
        expected = model(x)
    assert_equal(captured(x), expected)


def test_capture_leaves_autocasts_cache_on(graph_device: GraphDevice) -> None:
    assert torch.is_autocast_cache_enabled()
    capture(lambda t: t + 1, (ramp(graph_device, 4),), device=graph_device)
    assert torch.is_autocast_cache_enabled()
