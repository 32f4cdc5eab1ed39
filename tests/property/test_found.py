"""Faults that random programs found, each reduced to what shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.runtime.capture.device import GraphDevice


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def test_an_empty_view_of_an_argument_may_be_written(graph_device: GraphDevice) -> None:
    """It was taken for a copy of outside memory, though no write into it can be lost."""

    @eager_on_graph
    def no_rows(t: torch.Tensor) -> torch.Tensor:
        return t[:0]

    def forward(t: torch.Tensor) -> torch.Tensor:
        no_rows(t).mul_(2)
        return t + 1

    x = torch.randn(4, 2, device=graph_device.torch_device)
    assert torch.equal(capture(forward, (x,), device=graph_device)(x), x + 1)


def test_copied_outputs_are_copies_also_without_a_graph(graph_device: GraphDevice) -> None:
    """A call over the largest size returned the function's own state, which the next call overwrote."""
    state = torch.zeros(4, 2, device=graph_device.torch_device)

    def forward(t: torch.Tensor) -> torch.Tensor:
        return state[: t.shape[0]].copy_(t)

    x = torch.randn(4, 2, device=graph_device.torch_device)
    captured = capture(
        forward, (x[:2],), capture_sizes=[2], static_tensors={"state": state}, device=graph_device
    )
    result = captured(x)
    captured(-x)
    assert torch.equal(result, x)
