"""Point 6: a break body never reads memory that nobody wrote, while capturing either."""

from __future__ import annotations

import pytest
import torch

from contract.support import assert_equal, ramp
from sgl_piecewise.runtime.capture.breakable import BreakableCUDAGraph, BreakableCUDAGraphCapture
from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import CaptureError
from sgl_piecewise.runtime.mark import break_graph, eager_on_graph


def _launched(captured: CapturedCallable) -> bool:
    assert captured.build is not None
    return captured.build.segments_launched


@pytest.mark.parametrize("launch_segments", [True, None])
def test_body_sees_computed_values_while_capturing(
    graph_device: GraphDevice, launch_segments: bool | None
) -> None:
    """A body that caches what it saw, or uses it as an index, must not see garbage."""
    seen: list[torch.Tensor] = []

    @eager_on_graph
    def look(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.clone())
        return t * 2

    x = ramp(graph_device, 4)
    captured = capture(
        lambda t: look(look(t + 1) + 1), (x,), device=graph_device, launch_segments=launch_segments
    )
    assert _launched(captured)
    assert len(seen) == 4  # Two bodies, in warm-up and in capture.
    assert_equal(seen, [x + 1, (x + 1) * 2 + 1] * 2)


def test_capturing_pass_is_a_real_execution(graph_device: GraphDevice) -> None:
    double = eager_on_graph(lambda t: t * 2)
    x, graph = ramp(graph_device, 4), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, device=graph_device, launch_segments=True):
        y = double(x + 1) - 1
    assert_equal(y, (x + 1) * 2 - 1)


def test_stub_stands_in_for_the_body_while_capturing_only(graph_device: GraphDevice) -> None:
    ran: list[str] = []

    def stub(t: torch.Tensor) -> torch.Tensor:
        ran.append("stub")
        return torch.zeros_like(t)

    @eager_on_graph(capture_stub=stub)
    def body(t: torch.Tensor) -> torch.Tensor:
        ran.append("body")
        return t * 2

    x = ramp(graph_device, 4)
    captured = capture(lambda t: body(t + 1) - 1, (x,), device=graph_device)
    assert ran == ["body", "stub"]
    assert_equal(captured(x), (x + 1) * 2 - 1)
    assert ran == ["body", "stub", "body"]


def test_fake_stands_in_when_nothing_is_launched(graph_device: GraphDevice) -> None:
    ran: list[str] = []

    def fake(t: torch.Tensor) -> torch.Tensor:
        ran.append("fake")
        return torch.empty_like(t)

    @eager_on_graph(fake=fake)
    def body(t: torch.Tensor) -> torch.Tensor:
        ran.append("body")
        return t * 2

    x = ramp(graph_device, 4)
    unlaunched = capture(lambda t: body(t + 1) - 1, (x,), device=graph_device, launch_segments=False)
    assert ran == ["body", "fake"]
    assert not _launched(unlaunched)
    launched = capture(lambda t: body(t + 1) - 1, (x,), device=graph_device, launch_segments=True)
    assert ran == ["body", "fake", "body", "body"]
    for captured in (unlaunched, launched):
        assert_equal(captured(x), (x + 1) * 2 - 1)


def test_default_launches_only_if_some_mark_needs_it(graph_device: GraphDevice) -> None:
    stubbed = eager_on_graph(capture_stub=torch.zeros_like)(lambda t: t * 2)
    faked = eager_on_graph(fake=torch.empty_like)(lambda t: t * 3)
    plain = eager_on_graph(lambda t: t * 5)
    x = ramp(graph_device, 4)

    def both(t: torch.Tensor) -> torch.Tensor:
        break_graph()
        return faked(stubbed(t + 1))

    def with_plain(t: torch.Tensor) -> torch.Tensor:
        return plain(stubbed(t + 1))

    for fn, expected in ((both, False), (with_plain, True), (lambda t: t + 1, False)):
        captured = capture(fn, (x,), device=graph_device)
        assert _launched(captured) is expected
        assert_equal(captured(x), fn(x))


def test_no_launch_with_a_mark_that_has_no_stand_in_names_it(graph_device: GraphDevice) -> None:
    @eager_on_graph
    def bare(t: torch.Tensor) -> torch.Tensor:
        return t * 2

    with pytest.raises(CaptureError, match=r"bare.*capture_stub"):
        capture(lambda t: bare(t + 1), (ramp(graph_device, 4),), device=graph_device, launch_segments=False)


def test_no_body_runs_and_nothing_is_written_without_launching(graph_device: GraphDevice) -> None:
    """Recording executes nothing: memory from before is as it was."""
    log = torch.zeros(4, device=graph_device.torch_device)
    stubbed = eager_on_graph(capture_stub=torch.zeros_like)(lambda t: t * 2)
    x, graph = ramp(graph_device, 4), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, device=graph_device, launch_segments=False):
        log.add_(stubbed(x + 1))
    assert_equal(log, torch.zeros_like(log))
    graph.replay()
    assert_equal(log, (x + 1) * 2)


def test_stub_may_return_nested_results_and_aliases(graph_device: GraphDevice) -> None:
    def stub(out: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return out, {"sum": torch.zeros((), device=t.device)}

    @eager_on_graph(capture_stub=stub)
    def body(out: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return out.copy_(t * 2), {"sum": t.sum()}

    def forward(x: torch.Tensor) -> torch.Tensor:
        out, more = body(torch.empty_like(x), x + 1)
        return out + more["sum"]

    x = ramp(graph_device, 4)
    captured = capture(forward, (x,), device=graph_device)
    for start in (1.0, 7.0):
        y = ramp(graph_device, 4, start=start)
        assert_equal(captured(y), forward(y))
