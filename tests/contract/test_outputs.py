"""Outputs are cut back to the real size, whatever dimension follows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract.support import WAYS, assert_equal, ramp
from sgl_piecewise.runtime.capture.captured import UNCUTTABLE_OUTPUT
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import CaptureError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def forward(x: torch.Tensor) -> dict[str, Any]:
    y = double(x + 1)
    return {
        "rows": y,
        "columns": y.t().contiguous(),
        "middle": y[None, :, None, :] + 1,
        "constant": torch.arange(5, device=x.device) * 2,
        "first": y[0],
        "nested": [(y[:, 0], None), 3, "word"],
    }


@pytest.mark.parametrize("outputs", ["copy", "view"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [[4], [2, 4], [1, 3, 4]])
def test_outputs_are_cut_where_they_follow_the_size(
    graph_device: GraphDevice, sizes: list[int], way: str, outputs: str
) -> None:
    captured = capture(
        forward,
        (ramp(graph_device, 4, 4),),
        capture_sizes=sizes,
        device=graph_device,
        outputs=outputs,
        **WAYS[way],
    )
    for real in (4, 3, 2, 1):
        x = ramp(graph_device, real, 4, start=float(real))
        assert_equal(captured(x), forward(x))
    assert not captured.fallbacks


def test_extent_that_only_happens_to_be_the_size_is_not_cut(graph_device: GraphDevice) -> None:
    """A constant of 4 beside a size of 4: one size alone cannot tell them apart."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return double(x), torch.ones(4, device=x.device) + 1

    captured = capture(fn, (ramp(graph_device, 4),), capture_sizes=[4], device=graph_device)
    x = ramp(graph_device, 2)
    assert_equal(captured(x), fn(x))


def test_output_that_cannot_be_cut_runs_eager_off_its_sizes(graph_device: GraphDevice) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return double(x).repeat(2)

    captured = capture(fn, (ramp(graph_device, 4),), capture_sizes=[2, 4], device=graph_device)
    for real in (4, 2):
        x = ramp(graph_device, real)
        assert_equal(captured(x), fn(x))
    assert not captured.fallbacks
    x = ramp(graph_device, 3)
    assert_equal(captured(x), fn(x))
    assert captured.fallbacks == {UNCUTTABLE_OUTPUT: 1}


def test_square_output_runs_eager_off_its_sizes(graph_device: GraphDevice) -> None:
    """Both dimensions follow the size: a cut of one would leave padding in the other."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = double(x)
        return y[:, None] * y[None, :]

    captured = capture(fn, (ramp(graph_device, 4),), capture_sizes=[2, 4], device=graph_device)
    x = ramp(graph_device, 3)
    assert_equal(captured(x), fn(x))


def test_structure_that_depends_on_the_size_is_refused(graph_device: GraphDevice) -> None:
    def fn(x: torch.Tensor) -> Any:
        return [x + 1] * x.shape[0]

    with pytest.raises(CaptureError, match=r"structure depends on the capture size.*keys"):
        capture(fn, (ramp(graph_device, 4),), capture_sizes=[2, 4], device=graph_device)


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_output_may_be_the_input_or_a_break_result_or_outside_memory(
    graph_device: GraphDevice, outputs: str
) -> None:
    outside = ramp(graph_device, 4, start=70.0)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, double(x), x[1:], outside

    captured = capture(fn, (ramp(graph_device, 4),), device=graph_device, outputs=outputs)
    for start in (1.0, 8.0):
        x = ramp(graph_device, 4, start=start)
        assert_equal(captured(x), fn(x))


def test_views_survive_dropping_everything_but_the_callable(graph_device: GraphDevice) -> None:
    captured = capture(
        lambda x: double(x + 1), (ramp(graph_device, 64),), device=graph_device, outputs="view"
    )
    x = ramp(graph_device, 64)
    view = captured(x)
    kept = view.clone()
    for _ in range(4):
        torch.full((64,), -5.0, device=graph_device.torch_device)
    assert_equal(view, kept)


class Holder:
    """An object that is no dataclass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


async def _later(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda x: {"kept": Holder(x + 1)}, "Holder at .*kept"),
        (lambda x: {x + 1}, "set"),
        (lambda x: iter([x + 1]), "list_iterator"),
        (lambda x: (t + 1 for t in [x]), "generator"),
        (lambda x: lambda: x + 1, "function"),
        (_later, "coroutine"),
    ],
    ids=["object", "set", "iterator", "generator", "closure", "coroutine"],
)
def test_output_that_a_replay_could_not_renew_is_refused(
    graph_device: GraphDevice, make: Any, kind: str, way: str
) -> None:
    """It came back as it was made while capturing: whatever it held was stale, or graph memory."""
    with pytest.raises(CaptureError, match=f"returned a {kind}"):
        capture(make, (ramp(graph_device, 3),), device=graph_device, **WAYS[way])
