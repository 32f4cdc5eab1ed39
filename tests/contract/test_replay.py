"""Points 9 and 11: what replay does, and debug mode's same path without graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contract.support import assert_equal, ramp
from sgl_piecewise.runtime.capture.captured import AUTOGRAD_INPUTS
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import ReplayError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def forward(x: torch.Tensor) -> torch.Tensor:
    return double(x + 1) - x


class _Operators(TorchDispatchMode):
    """Writes down what a replay dispatches; graph launches dispatch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


_VIEWS = {"view", "slice", "alias", "detach", "as_strided", "narrow"}


def _work(names: list[str]) -> list[str]:
    return [name.replace("_foreach_copy_", "copy_") for name in names if name not in _VIEWS]


@pytest.mark.parametrize(("outputs", "tail"), [("view", []), ("copy", ["clone"])])
def test_replay_does_copies_launches_and_bodies_only(
    graph_device: GraphDevice, outputs: str, tail: list[str]
) -> None:
    x = ramp(graph_device, 4)
    captured = capture(forward, (x,), device=graph_device, outputs=outputs)
    captured(x)
    with _Operators() as operators:
        captured(x)
    # Input in, the body, its result into the boundary buffer (unless the next graph does that), output out.
    boundary = [] if captured.pool.edits_graphs else ["copy_"]
    assert _work(operators.names) == ["copy_", "mul", *boundary, *tail]


def test_input_that_already_lies_in_the_buffer_is_not_copied(graph_device: GraphDevice) -> None:
    """A captured output that is the input of the next call costs no copy where it is the buffer."""
    x = ramp(graph_device, 4)
    captured = capture(lambda t: t.add_(1), (x,), device=graph_device, outputs="view")
    buffer = captured(x)
    with _Operators() as operators:
        captured(buffer)
    assert "copy_" not in _work(operators.names) or _work(operators.names).count("copy_") == 1


def test_replay_runs_the_same_under_inference_mode_and_with_grad(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    captured = capture(forward, (x,), device=graph_device)
    with torch.inference_mode():
        assert_equal(captured(x), forward(x))
    with torch.enable_grad():
        assert_equal(captured(x), forward(x))
    assert not captured.fallbacks


def test_call_whose_inputs_require_grad_keeps_its_gradients(graph_device: GraphDevice) -> None:
    """A graph has none, so such a call runs eager, with a reason."""
    x = ramp(graph_device, 4)
    captured = capture(forward, (x,), device=graph_device)
    needs_grad = x.clone().requires_grad_()
    with torch.enable_grad():
        captured(needs_grad).sum().backward()
    assert needs_grad.grad is not None
    assert_equal(needs_grad.grad, torch.full_like(x, 1.0))
    assert captured.fallbacks == {AUTOGRAD_INPUTS: 1}
    with torch.no_grad():
        assert_equal(captured(needs_grad), forward(x))
    assert captured.fallbacks == {AUTOGRAD_INPUTS: 1}


def test_capture_under_inference_mode_replays_outside_of_it(graph_device: GraphDevice) -> None:
    with torch.inference_mode():
        x = ramp(graph_device, 8)
        captured = capture(forward, (x,), capture_sizes=[4, 8], device=graph_device)
    for size in (8, 3):
        y = ramp(graph_device, size, start=9.0)
        assert_equal(captured(y), forward(y))


def test_copied_output_is_the_callers_own(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    captured = capture(forward, (x,), device=graph_device)
    first = captured(x)
    first.fill_(-1)
    assert_equal(captured(x), forward(x))
    assert_equal(first, torch.full_like(x, -1))


def test_viewed_output_is_overwritten_by_the_next_replay(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    captured = capture(forward, (x,), device=graph_device, outputs="view")
    first = captured(x)
    second = captured(x + 5)
    assert first.data_ptr() == second.data_ptr()
    assert_equal(first, forward(x + 5))


def test_debug_mode_is_one_eager_segment_behind_the_same_buffers(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 8)
    runs: list[int] = []

    def counted(t: torch.Tensor) -> torch.Tensor:
        runs.append(t.shape[0])
        return forward(t)

    captured = capture(counted, (x,), capture_sizes=[4, 8], device=graph_device, debug=True)
    assert all(recording.num_breaks == 1 for recording in captured.recordings.values())
    assert all(recording.strategy == "debug" for recording in captured.recordings.values())
    runs.clear()
    y = ramp(graph_device, 3)
    assert_equal(captured(y), forward(y))
    assert runs == [4]  # Padded, as the graphs would run it.


def test_debug_mode_takes_what_a_graph_cannot_hold(graph_device: GraphDevice) -> None:
    """If a fault goes away in debug mode, capture is the suspect."""

    def reads_host(t: torch.Tensor) -> torch.Tensor:
        return t * t.sum().item()

    x = ramp(graph_device, 4)
    captured = capture(reads_host, (x,), device=graph_device, debug=True)
    y = ramp(graph_device, 4, start=7.0)
    assert_equal(captured(y), reads_host(y))


@pytest.mark.parametrize("has_run", [False, True])
def test_reset_recording_raises_and_callable_runs_eager(graph_device: GraphDevice, has_run: bool) -> None:
    x = ramp(graph_device, 4)
    captured = capture(forward, (x,), device=graph_device)
    (recording,) = captured.recordings.values()
    if has_run:  # Then it launches its graphs directly.
        captured(x)
    captured.reset()
    captured.reset()
    with pytest.raises(ReplayError, match="reset"):
        recording.replay()
    assert_equal(captured(x), forward(x))
