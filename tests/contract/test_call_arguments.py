"""What a captured callable is called with: values that are baked, structures, arguments reshaped in place."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from contract.support import WAYS, assert_equal, ramp
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import CaptureError, InputMismatchError


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: np.zeros(3), id="array"),
        pytest.param(lambda: SimpleNamespace(t=torch.zeros(3)), id="object_with_tensor"),
        pytest.param(lambda: {torch.zeros(3)}, id="set"),
    ],
)
def test_baked_value_that_does_not_compare_is_accepted_only_as_itself(
    graph_device: GraphDevice, make: Callable[[], Any]
) -> None:
    x, value = ramp(graph_device, 3), make()
    captured = capture(lambda x, value: x + 1, (x, value), device=graph_device)
    assert_equal(captured(x, value), x + 1)
    with pytest.raises(InputMismatchError, match=r"Argument value is .* baked into the graphs"):
        captured(x, make())


def test_nan_is_the_nan_of_capture(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 3)
    captured = capture(lambda x, fill: x.masked_fill(x > 1, fill), (x, float("nan")), device=graph_device)
    assert_equal(captured(x, float("nan")), x.masked_fill(x > 1, float("nan")))


def _optional(x: Any, mask: Any = None, **more: Any) -> Any:
    return x["a"] + 1


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (2, {}, "mask was left out at capture, and is given now"),
        (1, {"bias": 1}, "bias was left out at capture, and is given now"),
        (0, {}, "missing a required argument: 'x'"),
    ],
)
def test_argument_left_out_at_capture_is_named(
    graph_device: GraphDevice, args: int, kwargs: dict[str, Any], message: str
) -> None:
    x = {"a": ramp(graph_device, 3)}
    captured = capture(_optional, (x,), device=graph_device)
    with pytest.raises(InputMismatchError, match=message):
        captured(*(x, None)[:args], **kwargs)


def test_argument_given_at_capture_and_left_out_is_named(graph_device: GraphDevice) -> None:
    x = {"a": ramp(graph_device, 3)}
    captured = capture(_optional, (x, None), {"bias": 1}, device=graph_device)
    with pytest.raises(InputMismatchError, match="bias was given at capture, and is left out now"):
        captured(x, None)
    with pytest.raises(InputMismatchError, match="mask was given at capture, and is left out now"):
        captured(x, bias=1)


def test_changed_structure_names_the_argument_and_the_cure(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 3)
    captured = capture(_optional, ({"a": x, "b": x},), device=graph_device)
    with pytest.raises(
        InputMismatchError, match=r"x: captured keys \['a', 'b'\], now \['a'\].* capture again"
    ):
        captured({"a": x})


RESHAPED: dict[str, Callable[[torch.Tensor], Any]] = {
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "transpose_": lambda x: x.transpose_(0, 1),
    "squeeze_": lambda x: x.squeeze_(),
    "resize_": lambda x: x.resize_(2, 2),
    "data": lambda x: setattr(x, "data", x * 2),
    "set_": lambda x: x.set_(torch.zeros(4, 1, device=x.device)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", RESHAPED)
def test_argument_reshaped_in_place_is_named(graph_device: GraphDevice, how: str, way: str) -> None:
    """A replay cannot do it to the caller's tensor; the static buffer was reshaped instead, and went stale."""
    x = ramp(graph_device, 4, 1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        RESHAPED[how](x)
        return x + 1

    with pytest.raises(CaptureError, match=r"changed the shape or the memory of argument x in place"):
        capture(forward, (x,), device=graph_device, **WAYS[way])
    assert x.shape == (4, 1)
