"""Point 1: what a marked call does outside capture, while capturing, and at replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from contract.support import WAYS, assert_equal, assert_like_eager, ramp
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.mark import break_graph, eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def mark_first(x: torch.Tensor) -> torch.Tensor:
    return double(x) + 1


def mark_last(x: torch.Tensor) -> torch.Tensor:
    return double(x + 1)


def marks_back_to_back(x: torch.Tensor) -> torch.Tensor:
    return double(double(double(x + 1))) - 3


def only_a_mark(x: torch.Tensor) -> torch.Tensor:
    return double(x)


def no_mark(x: torch.Tensor) -> torch.Tensor:
    return (x + 1) * 3


def nothing_at_all(x: torch.Tensor) -> torch.Tensor:
    return x


def marks_with_work_between(x: torch.Tensor) -> torch.Tensor:
    y = double(x + 1)
    z = double(y - x) + y
    return double(z) * y


def bare_breaks(x: torch.Tensor) -> torch.Tensor:
    break_graph()
    y = x + 1
    break_graph()
    break_graph()
    return y * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fn", "num_breaks"),
    [
        (mark_first, 1),
        (mark_last, 1),
        (marks_back_to_back, 3),
        (only_a_mark, 1),
        (no_mark, 0),
        (nothing_at_all, 0),
        (marks_with_work_between, 3),
        (bare_breaks, 3),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_marks_in_every_place_give_eager_values(
    graph_device: GraphDevice, fn: Callable[..., Any], num_breaks: int, way: str
) -> None:
    calls = [(ramp(graph_device, 4, 3),), (ramp(graph_device, 4, 3, start=-20.0),)]
    captured = assert_like_eager(graph_device, fn, calls, **WAYS[way])
    (recording,) = captured.recordings.values()
    assert recording.num_breaks == {"full": 0, "breakable": num_breaks, "debug": 1}[way]
    # A segment before, between and after the breaks, empty ones included.
    assert recording.num_graph_segments == recording.num_breaks + 1


def test_body_runs_once_while_capturing_and_once_per_replay(graph_device: GraphDevice) -> None:
    calls: list[str] = []

    @eager_on_graph
    def seen(t: torch.Tensor) -> torch.Tensor:
        calls.append("body")
        return t * 2

    captured = capture(lambda x: seen(x + 1), (ramp(graph_device, 4),), device=graph_device)
    assert len(calls) == 2  # One warm-up, one capture.
    captured(ramp(graph_device, 4))
    captured(ramp(graph_device, 4))
    assert len(calls) == 4


def test_forward_itself_does_not_run_at_replay(graph_device: GraphDevice) -> None:
    runs: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return double(x + 1) * 2

    captured = capture(forward, (ramp(graph_device, 4),), device=graph_device)
    after_capture = len(runs)
    captured(ramp(graph_device, 4))
    assert len(runs) == after_capture


def test_body_reads_live_state_under_breakable_and_is_baked_under_full(graph_device: GraphDevice) -> None:
    scale = {"value": 2.0}

    @eager_on_graph
    def scaled(t: torch.Tensor) -> torch.Tensor:
        return t * scale["value"]

    x = ramp(graph_device, 4)
    breakable = capture(lambda t: scaled(t + 1), (x,), device=graph_device)
    full = capture(lambda t: scaled(t + 1), (x,), device=graph_device, strategy="full")
    scale["value"] = 5.0
    assert_equal(breakable(x), (x + 1) * 5)
    assert_equal(full(x), (x + 1) * 2)


def test_marked_method_with_its_own_state(graph_device: GraphDevice) -> None:
    class Layer:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        @eager_on_graph
        def run(self, t: torch.Tensor, *, offset: float = 0.0) -> torch.Tensor:
            return t * self.scale + offset

    layers = [Layer(2.0), Layer(3.0)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(layers):
            x = layer.run(x + 1, offset=float(index)) - 1
        return x

    captured = assert_like_eager(graph_device, forward, [(ramp(graph_device, 4),)])
    layers[1].scale = 7.0
    x = ramp(graph_device, 4, start=5.0)
    assert_equal(captured(x), forward(x))
    (recording,) = captured.recordings.values()
    assert all(name.endswith("Layer.run") for name in recording.break_names)


def test_run_eager_does_not_break(graph_device: GraphDevice) -> None:
    captured = assert_like_eager(
        graph_device, lambda x: double.run_eager(x + 1) - 1, [(ramp(graph_device, 4),)]
    )
    assert next(iter(captured.recordings.values())).num_breaks == 0


def test_older_spelling_breaks_and_disabled_mark_does_not(graph_device: GraphDevice) -> None:
    old = eager_on_graph(True)(lambda t: t * 2)
    off = eager_on_graph(enable=False)(lambda t: t * 3)
    old_off = eager_on_graph(False)(lambda t: t * 5)
    captured = assert_like_eager(graph_device, lambda x: old_off(off(old(x + 1))), [(ramp(graph_device, 4),)])
    assert next(iter(captured.recordings.values())).num_breaks == 1


@pytest.mark.parametrize("way", WAYS)
def test_mark_inside_an_eager_segment_is_an_ordinary_call(graph_device: GraphDevice, way: str) -> None:
    @eager_on_graph
    def outer(t: torch.Tensor) -> torch.Tensor:
        return double(double(t) + 1)

    captured = assert_like_eager(
        graph_device, lambda x: outer(x + 1) - 1, [(ramp(graph_device, 4),)], **WAYS[way]
    )
    names = next(iter(captured.recordings.values())).break_names
    assert double.name not in names
    assert len(names) == {"full": 0, "breakable": 1, "debug": 1}[way]


def test_body_that_writes_through_its_argument_needs_no_copy(graph_device: GraphDevice) -> None:
    """A given output buffer: the result is the argument, so replay has nothing to move."""

    @eager_on_graph
    def into(out: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return out.copy_(t * 2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        return into(out, x + 1) + out

    captured = assert_like_eager(
        graph_device, forward, [(ramp(graph_device, 4),), (ramp(graph_device, 4, start=9.0),)]
    )
    (outputs,) = next(iter(captured.recordings.values())).break_outputs
    assert outputs.num_copied_bytes() == 0


def test_result_already_in_the_boundary_buffer_is_not_copied_again(graph_device: GraphDevice) -> None:
    """A body that keeps the buffer it was once given (by address) and fills it."""
    held: list[torch.Tensor] = []

    @eager_on_graph
    def fill(t: torch.Tensor) -> torch.Tensor:
        if held:
            return held[0].copy_(t * 2)
        return t * 2

    captured = capture(lambda x: fill(x + 1) - 1, (ramp(graph_device, 4),), device=graph_device)
    (outputs,) = next(iter(captured.recordings.values())).break_outputs
    held.append(outputs.leaves[0].target)
    x = ramp(graph_device, 4, start=3.0)
    assert_equal(captured(x), (x + 1) * 2 - 1)


def test_captured_code_may_write_into_a_fresh_result(graph_device: GraphDevice) -> None:
    """Its owner is captured code; the next replay starts from a fresh result again."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = double(x + 1)
        y.add_(5)
        z = double(y)
        y.mul_(3)
        return y + z

    assert_like_eager(graph_device, forward, [(ramp(graph_device, 4),), (ramp(graph_device, 4, start=-5.0),)])
