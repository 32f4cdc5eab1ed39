"""Point 3: arguments keep capture-time identity; what changes is read when the body runs."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch

from contract.support import assert_equal, assert_like_eager, ramp
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.context import ForwardContext, forward_context, use_forward_context
from sgl_piecewise.runtime.errors import CaptureError
from sgl_piecewise.runtime.mark import eager_on_graph

Named = collections.namedtuple("Named", ["one", "two"])


@dataclasses.dataclass
class Holder:
    tensor: torch.Tensor


def test_objects_are_the_same_objects_at_replay(graph_device: GraphDevice) -> None:
    marker, seen = object(), []

    @eager_on_graph
    def look(t: torch.Tensor, thing: object, *, named: object) -> torch.Tensor:
        seen.append(thing is marker and named is marker)
        return t * 2

    captured = capture(
        lambda x: look(x + 1, marker, named=marker), (ramp(graph_device, 4),), device=graph_device
    )
    captured(ramp(graph_device, 4))
    assert seen == [True] * 3


def test_tensors_lie_where_they_lay_at_capture(graph_device: GraphDevice) -> None:
    addresses: list[int] = []

    @eager_on_graph
    def look(t: torch.Tensor) -> torch.Tensor:
        addresses.append(t.data_ptr())
        return t * 2

    captured = capture(lambda x: look(x + 1), (ramp(graph_device, 4),), device=graph_device)
    del addresses[0]  # The warm-up's.
    for _ in range(3):
        captured(ramp(graph_device, 4))
    assert len(set(addresses)) == 1


def test_nested_arguments_hold_new_contents(graph_device: GraphDevice) -> None:
    @eager_on_graph
    def total(values: Any, named: Named, options: dict[str, Any], *, holder: Holder) -> torch.Tensor:
        one, (two, three) = values
        return one + two * 2 + three * 3 + named.one + options["deep"][0] + holder.tensor

    def forward(x: torch.Tensor) -> torch.Tensor:
        values = [x + 1, (x + 2, x + 3)]
        return total(values, Named(x * 2, None), {"deep": [x - 1], "n": 3}, holder=Holder(x * 5)) + 1

    calls = [(ramp(graph_device, 4),), (ramp(graph_device, 4, start=40.0),)]
    assert_like_eager(graph_device, forward, calls)


def test_containers_are_handed_out_as_they_were_at_the_call(graph_device: GraphDevice) -> None:
    """A body may use a list as scratch, if it leaves it as it was; replays start from the same contents."""
    lengths: list[int] = []

    @eager_on_graph
    def scratch(items: list[torch.Tensor]) -> torch.Tensor:
        lengths.append(len(items))
        items.append(items[0])
        result = items[0] + items[1]
        items.pop()
        return result

    captured = capture(lambda x: scratch([x + 1, x + 2]), (ramp(graph_device, 4),), device=graph_device)
    captured(ramp(graph_device, 4))
    assert set(lengths) == {2}


@pytest.mark.parametrize("container", [[], {}], ids=["list", "dict"])
def test_body_that_answers_through_a_container_is_refused(graph_device: GraphDevice, container: Any) -> None:
    """Captured code would keep for ever what it found in the container while capturing."""

    @eager_on_graph
    def fill(out: Any, t: torch.Tensor) -> None:
        if isinstance(out, list):
            out.append(t * 2)
        else:
            out["answer"] = t * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = type(container)()
        fill(out, x + 1)
        return out[0] if isinstance(out, list) else out["answer"]

    with pytest.raises(CaptureError, match=rf"fill.*{type(container).__name__}"):
        capture(forward, (ramp(graph_device, 4),), device=graph_device)


class _Scaling:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def run(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: Any) -> torch.Tensor:
        return (q_THD + k_TKD + v_TKD) * self.scale


def test_forward_context_is_read_at_call_time(graph_device: GraphDevice) -> None:
    @eager_on_graph
    def attend(t: torch.Tensor) -> torch.Tensor:
        return forward_context().attention.run(t, t, t, None)

    x = ramp(graph_device, 4)
    with use_forward_context(ForwardContext(attention=_Scaling(1.0))):
        captured = capture(lambda t: attend(t + 1), (x,), device=graph_device)
    for scale in (2.0, 3.0):
        with use_forward_context(ForwardContext(attention=_Scaling(scale))):
            assert_equal(captured(x), (x + 1) * 3 * scale)


def test_argument_from_an_earlier_break_is_this_replays(graph_device: GraphDevice) -> None:
    """A break's result as the argument of the next break is read from boundary memory."""
    factor = {"value": 1.0}

    @eager_on_graph
    def first(t: torch.Tensor) -> torch.Tensor:
        return t * factor["value"]

    @eager_on_graph
    def second(t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return t - u

    def forward(x: torch.Tensor) -> torch.Tensor:
        a = first(x)
        return second(a, first(a))

    x = ramp(graph_device, 4)
    captured = capture(forward, (x,), device=graph_device)
    factor["value"] = 10.0
    assert_equal(captured(x), forward(x))
