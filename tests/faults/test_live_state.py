"""State that changes or moves after capture, memory that runs out, and messages that say so."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract.support import assert_equal, ramp

from sgl_piecewise.runtime.capture.captured import NO_GRAPH
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import CaptureForbiddenError, MovedAddressError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


class Layer(torch.nn.Module):
    def __init__(self, attention: object) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x + 1) - x  # type: ignore[operator]


def test_row_074_attention_without_a_mark_shows_in_the_break_list(graph_device: GraphDevice) -> None:
    """torchtitan#3685: an attention op was not decorated, was captured, and answers went on for ever."""

    def plain(t: torch.Tensor) -> torch.Tensor:
        return t * 2

    model = torch.nn.Sequential(Layer(double), Layer(plain), Layer(double))
    captured = capture(model, (ramp(graph_device, 4),), device=graph_device)
    (recording,) = captured.recordings.values()
    assert recording.break_names == (double.name, double.name)  # Two, for three layers.


@dataclasses.dataclass
class Context:
    scale: torch.Tensor


def test_row_076_context_swapped_between_replays_is_read_again(graph_device: GraphDevice) -> None:
    """sglang#38943: break arguments frozen at capture went stale; per-batch state is read in the body."""
    current: dict[str, Context] = {}

    @eager_on_graph
    def attend(t: torch.Tensor) -> torch.Tensor:
        return t * current["context"].scale

    def forward(x: torch.Tensor) -> torch.Tensor:
        return attend(x + 1) - 1

    x = ramp(graph_device, 4)
    current["context"] = Context(torch.zeros(4, device=graph_device.torch_device))
    captured = capture(forward, (x,), device=graph_device)
    for n in range(3):
        current["context"] = Context(ramp(graph_device, 4, start=float(n)))
        assert_equal(captured(x), forward(x))


class LinearAttention(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.add_(x)
        return double(self.state)


def test_row_082_084_state_buffer_that_was_replaced_raises(graph_device: GraphDevice) -> None:
    """sglang#27140, vllm#55013: state buffers were freed and moved after a weight sync or a sleep."""
    model, x = LinearAttention(graph_device.torch_device), ramp(graph_device, 4)
    captured = capture(model, (x,), device=graph_device)
    model.state.zero_()
    assert_equal(captured(x), x * 2)
    model.state = torch.zeros(4, device=graph_device.torch_device)
    with pytest.raises(MovedAddressError, match="state"):
        captured.check_static_addresses()


def test_row_092_out_of_memory_mid_ladder_keeps_what_is_captured(graph_device: GraphDevice) -> None:
    """sglang#23769: memory ran out while capturing with a documented configuration."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 8 and len(attempts) < 1:
            attempts.append(8)
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return double(x + 1)

    attempts: list[int] = []
    reported: list[tuple[str, int, int]] = []
    captured = capture(
        forward,
        (ramp(graph_device, 16),),
        capture_sizes=[2, 4, 8, 16],
        device=graph_device,
        on_progress=lambda *step: reported.append(step),
    )
    assert captured.build is not None
    assert {entry.size: entry.error for entry in captured.build.sizes} == {
        16: None,
        8: "out of memory: tried to allocate 2.00 GiB",
        4: None,
        2: None,
    }
    assert reported[-1] == ("capture", 4, 4)
    for real in (16, 8, 5, 4, 1):
        x = ramp(graph_device, real)
        assert_equal(captured(x), forward(x))
    assert captured.fallbacks == {NO_GRAPH: 2}


def test_row_103_refusal_names_the_source_line(graph_device: GraphDevice) -> None:
    """pytorch#117281: the reason for skipping a graph named nothing that a reader could look up."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x + 1)[x > 2]

    with pytest.raises(CaptureForbiddenError) as caught:
        capture(forward, (ramp(graph_device, 4),), device=graph_device)
    line = forward.__code__.co_firstlineno + 1
    assert f"test_live_state.py:{line}" in str(caught.value)
