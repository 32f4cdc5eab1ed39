"""Copies whose ends each launch sets: of inputs into a recording's buffers, and of outputs out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sgl_piecewise import eager_on_graph
from sgl_piecewise.runtime.capture.call_copies import CopiesIn, CopiesOut
from sgl_piecewise.runtime.capture.device import DEVICE_TO_DEVICE, GraphDevice, GraphPool, SettableCopy
from sgl_piecewise.runtime.capture.recording import Recording
from sgl_piecewise.runtime.capture.session import CaptureSession
from sgl_piecewise.runtime.errors import ReplayError


class FixedCopy(SettableCopy):
    """As of a device that recorded the copy as something else than a copy node."""

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source

    def setter(self) -> Callable[[torch.Tensor], None]:
        return self._source.copy_

    def ends_setter(self) -> None:
        return None


class Captured:
    """A function of two tensors and two results, captured with copies in and out."""

    def __init__(self, pool: GraphPool, shape: Sequence[int], fn: Callable[..., Any]) -> None:
        device = pool.device.torch_device
        self.buffers = [torch.zeros(shape, device=device) for _ in range(2)]
        session = CaptureSession(pool, launch_segments=False)
        self.copies_in = CopiesIn(list(enumerate(self.buffers)))
        with session:
            self.copies_in.record(session)
            outputs = fn(*self.buffers)
            session.set_outputs(outputs)
            self.copies_out = CopiesOut(session, outputs)
        assert session.recording is not None
        self.recording: Recording = session.recording
        self.set_sources = self.copies_in.setter()
        self.plan = self.copies_out.plan()

    def __call__(self, *args: torch.Tensor) -> list[torch.Tensor]:
        held = self.set_sources(args)
        assert self.plan is not None
        results = [torch.empty_like(output) for output in self.recording.outputs]
        for (source, num_bytes, set_ends), result in zip(self.plan, results, strict=True):
            assert not set_ends(result.data_ptr(), source, num_bytes, DEVICE_TO_DEVICE)
        self.recording.replay()
        del held
        return results


def sum_and_product(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x + y, (x * y).t().contiguous().t()


def test_each_launch_reads_its_own_inputs_and_leaves_its_own_outputs(graph_device: GraphDevice) -> None:
    captured = Captured(graph_device.new_pool(), (64, 32), sum_and_product)
    given, found = [], []
    for _ in range(20):
        # Made and dropped at once, so that later calls get the same memory.
        x, y = torch.randn(2, 64, 32).to(graph_device.torch_device)
        given.append((x.clone(), y.clone()))
        found.append(captured(x, y))
        x.zero_()
        y.fill_(float("nan"))
    for (x, y), results in zip(given, found, strict=True):
        for result, expected in zip(results, sum_and_product(x, y), strict=True):
            assert torch.equal(result, expected)
            assert result.stride() == expected.stride()
    # Launches write to what they were told, and to nothing else.
    assert torch.equal(captured(*given[3])[0], found[3][0])
    assert torch.equal(found[4][0], given[4][0] + given[4][1])


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.stack([t, t], dim=-1)[..., 1],
        lambda t: t[:1].expand(64, 32),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: torch.cat([t, t])[7:71],
    ],
    ids=["transposed", "strided", "expanded", "negated", "offset"],
)
def test_inputs_of_any_form_are_read_by_value(
    graph_device: GraphDevice, form: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    captured = Captured(graph_device.new_pool(), (64, 32), sum_and_product)
    for _ in range(3):
        x = form(torch.randn(64, 32, device=graph_device.torch_device))
        y = torch.randn(64, 32, device=graph_device.torch_device)
        for result, expected in zip(captured(x, y), sum_and_product(x, y), strict=True):
            assert torch.equal(result, expected)


def test_copies_are_part_of_the_first_and_the_last_graph_around_breaks(graph_device: GraphDevice) -> None:
    @eager_on_graph(fake=torch.empty_like)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        first = doubled(x)  # A mark first, and one last: the graphs around them hold the copies only.
        return doubled(first + y), doubled(y)

    captured = Captured(graph_device.new_pool(), (8, 4), fn)
    for _ in range(4):
        x, y = torch.randn(2, 8, 4).to(graph_device.torch_device)
        for result, expected in zip(captured(x, y), (4 * x + 2 * y, 2 * y), strict=True):
            torch.testing.assert_close(result, expected)


def test_a_copy_with_fixed_ends_is_fed_through_its_own_source(graph_device: GraphDevice) -> None:
    """Inputs are written to where the copy reads; outputs are left for the caller to copy."""
    captured = Captured(graph_device.new_pool(), (8, 4), sum_and_product)
    sources = [torch.empty(8 * 4 * 4, dtype=torch.uint8, device=graph_device.torch_device) for _ in range(2)]
    captured.copies_in._copies = [FixedCopy(source) for source in sources]
    x, y = torch.randn(2, 4, 8).to(graph_device.torch_device).transpose(1, 2)
    captured.copies_in.setter()((x, y))
    for source, value in zip(sources, (x, y), strict=True):
        assert torch.equal(source.view(torch.float32).view(8, 4), value)
    captured.copies_out._copies = [FixedCopy(sources[0]), *captured.copies_out._copies[1:]]
    assert captured.copies_out.plan() is None
    assert captured.copies_in.only() is None


def test_ends_that_the_device_refuses_are_an_error_and_nothing_is_launched(graph_device: GraphDevice) -> None:
    captured = Captured(graph_device.new_pool(), (8, 4), sum_and_product)

    def refuse(*ends: int) -> int:
        return 1

    class Refusing(FixedCopy):
        def ends_setter(self) -> Any:
            return refuse

    captured.copies_in._copies = [Refusing(buffer) for buffer in captured.buffers]
    x = torch.ones(8, 4, device=graph_device.torch_device)
    captured.set_sources = captured.copies_in.setter()
    with pytest.raises(ReplayError, match="refused to set where a copy"):
        captured(x, x)
    assert not any(buffer.any() for buffer in captured.buffers)


def test_a_refusal_names_what_was_to_be_done_and_leaves_nothing_for_the_next_kernel(
    graph_device: GraphDevice,
) -> None:
    """CUDA keeps its last error until somebody asks for it, and PyTorch asks after its next launch."""
    captured = Captured(graph_device.new_pool(), (8, 4), sum_and_product)
    assert captured.plan is not None
    source, num_bytes, set_ends = captured.plan[0]
    result = torch.empty(8, 4, device=graph_device.torch_device)
    host_to_host = 0
    error = set_ends(result.data_ptr(), source, num_bytes, host_to_host)
    assert error
    refusal = graph_device.refusal(error, "set the ends of a copy")
    assert "refused to set the ends of a copy" in str(refusal)
    assert f"error {error}" in str(refusal)
    x = torch.randn(8, 4, device=graph_device.torch_device)
    assert torch.equal(captured(x, x)[0], x + x)
