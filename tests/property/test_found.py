"""Faults that random programs found, each reduced to what shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.emulated import EmulatedDevice
from sgl_piecewise.runtime.errors import BreakMismatchError


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(params=[False, True], ids=["copied", "copied by the graph"])
def copying_device(request: pytest.FixtureRequest, graph_device: GraphDevice) -> GraphDevice:
    """A device, and its emulation with boundary copies inside the graphs."""
    if request.param and graph_device.is_emulated:
        return EmulatedDevice(edits_graphs=True)
    return graph_device


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


def test_a_lazily_conjugated_result_is_read_as_such(copying_device: GraphDevice) -> None:
    """A stub gives plain memory, the body a lazy conjugate of the same form: bytes alone are not the value."""

    @eager_on_graph(capture_stub=torch.zeros_like)
    def conjugated(t: torch.Tensor) -> torch.Tensor:
        return (t * 2).conj()

    @eager_on_graph(capture_stub=lambda t: torch.zeros_like(t).conj())
    def plain(t: torch.Tensor) -> torch.Tensor:
        return t * 2

    @eager_on_graph(capture_stub=lambda t: (torch.zeros_like(t), torch.zeros_like(t.imag)))
    def both(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (t * 2).conj(), torch.complex(t.real, t.imag).conj().imag

    def forward(t: torch.Tensor) -> torch.Tensor:
        first, second = both(t)
        return conjugated(t) + plain(t) * 3 + first + second

    x = torch.randn(4, dtype=torch.complex64, device=copying_device.torch_device)
    captured = capture(forward, (x,), device=copying_device)
    assert torch.allclose(captured(x * 1j), forward(x * 1j))


@pytest.mark.parametrize("is_fresh", [False, True], ids=["alias", "one memory"])
def test_an_alias_that_is_suddenly_lazily_conjugated_raises(
    graph_device: GraphDevice, is_fresh: bool
) -> None:
    """Address and strides are those of capture, but captured code would read other values."""

    def pair(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = t * 2 if is_fresh else t
        return memory, memory[1:]

    @eager_on_graph(capture_stub=pair)
    def conjugated(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = pair(t)
        return first, second.conj()

    x = torch.randn(4, dtype=torch.complex64, device=graph_device.torch_device)
    captured = capture(lambda t: conjugated(t)[1] + 1, (x,), device=graph_device)
    with pytest.raises(BreakMismatchError, match=r"result\[1\].*conjugated"):
        captured(x)
