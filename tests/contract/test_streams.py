"""Point 7: forked streams are joined or named, and a wait is never dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from contract.support import assert_equal, ramp, stream_api
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import UnjoinedStreamError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def _replays_like(
    device: GraphDevice, fn: Callable[..., Any], expected: Callable[[torch.Tensor], Any], **options: Any
) -> None:
    """Compares several replays: the emulated device takes another allowed order at each."""
    captured = capture(fn, (ramp(device, 64),), device=device, **options)
    for n in range(6):
        x = ramp(device, 64, start=float(n * 10))
        assert_equal(captured(x), expected(x))


def fork_and_join(device: GraphDevice, strategy: str = "breakable") -> None:
    """Work on a side stream, awaited before its result is read (also a seeded defect's check)."""
    api = stream_api(device)
    side = api.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        side.wait_stream(api.current_stream())
        with api.stream(side):
            a = y * 2
            a = a + 3
        b = y * 5
        api.current_stream().wait_stream(side)
        return a + b

    _replays_like(device, forward, lambda x: (x + 1) * 2 + 3 + (x + 1) * 5, strategy=strategy)


@pytest.mark.parametrize("strategy", ["full", "breakable"])
def test_fork_and_join_inside_captured_code(graph_device: GraphDevice, strategy: str) -> None:
    fork_and_join(graph_device, strategy)


def test_fork_and_join_by_events(graph_device: GraphDevice) -> None:
    api = stream_api(graph_device)
    side = api.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        ready, done = api.Event(), api.Event()
        y = x + 1
        ready.record()
        side.wait_event(ready)
        with api.stream(side):
            a = y * 2
            done.record()
        b = y * 5
        done.wait()
        return a + b

    _replays_like(graph_device, forward, lambda x: (x + 1) * 7)


def test_side_stream_open_at_the_end_is_joined(graph_device: GraphDevice) -> None:
    """CUDA would refuse to end the capture (error 904); the open stream is known, so it is joined."""
    api = stream_api(graph_device)
    side = api.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        side.wait_stream(api.current_stream())
        with api.stream(side):
            return y * 2

    _replays_like(graph_device, forward, lambda x: (x + 1) * 2)


def test_side_stream_open_at_a_break_is_joined_and_goes_on(graph_device: GraphDevice) -> None:
    """The body after it reads finished work; captured code may go on using the stream unasked."""
    api = stream_api(graph_device)
    side = api.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        side.wait_stream(api.current_stream())
        with api.stream(side):
            a = y * 3
        b = double(a)
        with api.stream(side):
            c = y * 5
        api.current_stream().wait_stream(side)
        return b + c

    _replays_like(graph_device, forward, lambda x: (x + 1) * 6 + (x + 1) * 5)


def test_fork_before_a_break_and_join_after_it_by_event(graph_device: GraphDevice) -> None:
    api = stream_api(graph_device)
    side = api.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        done = api.Event()
        y = x + 1
        side.wait_stream(api.current_stream())
        with api.stream(side):
            a = y * 3
            done.record()
        b = double(y)
        done.wait()
        return a + b

    _replays_like(graph_device, forward, lambda x: (x + 1) * 5)


def test_two_side_streams_that_wait_for_each_other(graph_device: GraphDevice) -> None:
    api = stream_api(graph_device)
    one, two = api.Stream(), api.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        one.wait_stream(api.current_stream())
        with api.stream(one):
            a = y * 2
        two.wait_stream(one)
        with api.stream(two):
            b = a + 7
        api.current_stream().wait_stream(two)
        api.current_stream().wait_stream(one)
        return a + b

    _replays_like(graph_device, forward, lambda x: (x + 1) * 4 + 7)


@pytest.mark.parametrize("when", ["before", "inside"])
def test_wait_on_a_stream_outside_the_capture_raises(graph_device: GraphDevice, when: str) -> None:
    """A graph cannot wait for it; a wait that is dropped reads unfinished data (TRT-LLM#16609)."""
    api = stream_api(graph_device)
    other = api.Stream()
    event = api.Event()
    event.record(other)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if when == "before":
            api.current_stream().wait_event(event)
        else:
            api.current_stream().wait_stream(other)
        return y * 2

    x = ramp(graph_device, 64)
    with pytest.raises(UnjoinedStreamError, match="stream"):
        capture(_only_while_capturing(forward), (x,), device=graph_device)
    # The device is as usable as before.
    assert_equal(capture(lambda t: t * 3, (x,), device=graph_device)(x), x * 3)


def _only_while_capturing(
    fn: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Leaves out the first call, the warm-up, where such a wait is legal."""
    calls = {"count": 0}

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls["count"] += 1
        return x * 2 if calls["count"] == 1 else fn(x)

    return forward


def test_marked_function_may_wait_for_any_stream(graph_device: GraphDevice) -> None:
    api = stream_api(graph_device)
    other = api.Stream()
    held: dict[str, torch.Tensor] = {}

    @eager_on_graph
    def fetch(t: torch.Tensor) -> torch.Tensor:
        other.wait_stream(api.current_stream())
        with api.stream(other):
            held["value"] = t * 4
        api.current_stream().wait_stream(other)
        return held["value"]

    _replays_like(graph_device, lambda x: fetch(x + 1) - 1, lambda x: (x + 1) * 4 - 1)


def test_memory_of_a_side_stream_is_not_handed_to_another(graph_device: GraphDevice) -> None:
    """Blocks belong to the stream that allocated them: no order says when another might write."""
    api = stream_api(graph_device)
    side = api.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        side.wait_stream(api.current_stream())
        with api.stream(side):
            a = y * 2
            b = a * 3
            del a
        c = y - 4
        c = c * 2
        api.current_stream().wait_stream(side)
        return b + c

    _replays_like(graph_device, forward, lambda x: (x + 1) * 6 + (x - 3) * 2)
