"""Streams in an emulated recording: what is not waited for shows, and strays are named."""

# ruff: noqa: PLW0108 - a function must be looked up when it is called: capture replaces some.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_support import capture, recording

from sgl_piecewise.runtime.capture.device import DeviceGraph
from sgl_piecewise.runtime.capture.emulated import EmulatedDevice, EmulatedPool, streams
from sgl_piecewise.runtime.errors import CaptureForbiddenError, UnjoinedStreamError

NUM_REPLAYS = 8
cpu = torch.cpu


@pytest.fixture
def side() -> cpu.Stream:
    return cpu.Stream()


def fork_and_join(x: torch.Tensor, side: cpu.Stream) -> torch.Tensor:
    """Work on both streams that depends on each other both ways."""
    main = cpu.current_stream()
    y = x * 2
    side.wait_stream(main)
    with cpu.stream(side):
        z = y + 1
    w = x - 1
    main.wait_stream(side)
    return z * w


def with_events(x: torch.Tensor, side: cpu.Stream) -> torch.Tensor:
    y = x * 2
    forked, joined = cpu.Event(), cpu.Event()
    forked.record()
    side.wait_event(forked)
    with cpu.stream(side):
        z = y + 1
        joined.record(cpu.current_stream())
    w = x - 1
    joined.wait()
    return z * w


def with_record_event(x: torch.Tensor, side: cpu.Stream) -> torch.Tensor:
    main = cpu.current_stream()
    y = x * 2
    side.wait_event(main.record_event())
    with cpu.stream(side):
        z = y + 1
    w = x - 1
    main.wait_event(side.record_event())
    return z * w


def expected(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1) * (x - 1)


def is_right_in_all_replays(graph: DeviceGraph, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Replays with fresh inputs; False as soon as one gives a wrong value."""
    for value in range(NUM_REPLAYS):
        x.fill_(float(value + 3))
        graph.replay()
        if not torch.equal(y, expected(x)):
            return False
    return True


@pytest.mark.parametrize("code", [fork_and_join, with_events, with_record_event])
def test_fork_and_join(code: Callable[..., torch.Tensor], side: cpu.Stream) -> None:
    x = torch.ones(4)
    graph, y = capture(lambda: code(x, side))
    assert is_right_in_all_replays(graph, x, y)


@pytest.mark.parametrize("code", [fork_and_join, with_events, with_record_event])
def test_seeded_defect_dropped_waits_give_wrong_values(
    code: Callable[..., torch.Tensor], side: cpu.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_no_edge(positions: dict[int, frozenset[int]], stream: int, operations: frozenset[int]) -> None:
        pass

    monkeypatch.setattr(streams, "add_edges", keep_no_edge)
    x = torch.ones(4)
    graph, y = capture(lambda: code(x, side))
    assert not is_right_in_all_replays(graph, x, y)


def test_forgotten_join_gives_wrong_values(side: cpu.Stream) -> None:
    """Joined at the end of the graph, but not before its result is used."""

    def code(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            z = x * 2 + 1
        return z * (x - 1)

    x = torch.ones(4)
    graph, y = capture(lambda: code(x))
    assert not is_right_in_all_replays(graph, x, y)


def test_forgotten_wait_of_the_side_stream_gives_wrong_values(side: cpu.Stream) -> None:
    def code(x: torch.Tensor) -> torch.Tensor:
        main = cpu.current_stream()
        side.wait_stream(main)
        y = x * 2  # After the fork: the side stream does not wait for it.
        with cpu.stream(side):
            z = y + 1
        main.wait_stream(side)
        return z * (x - 1)

    x = torch.ones(4)
    graph, y = capture(lambda: code(x))
    assert not is_right_in_all_replays(graph, x, y)


def test_freed_memory_stays_with_its_stream(side: cpu.Stream) -> None:
    addresses: list[int] = []

    def code() -> None:
        main = cpu.current_stream()
        side.wait_stream(main)
        with cpu.stream(side):
            temporary = torch.ones(100)
            addresses.append(temporary.data_ptr())
            del temporary
        kept = torch.ones(100)
        addresses.append(kept.data_ptr())
        with cpu.stream(side):
            again = torch.ones(100)
            addresses.append(again.data_ptr())
        main.wait_stream(side)
        del again

    capture(code)
    assert addresses[0] == addresses[2]
    assert addresses[0] != addresses[1]


def use_on_side_and_drop(x: torch.Tensor, side: cpu.Stream, *, record: bool) -> torch.Tensor:
    """Drops a tensor while another stream may still read it."""
    main = cpu.current_stream()
    y = x * 2
    side.wait_stream(main)
    with cpu.stream(side):
        z = y + 1
    if record:
        y.record_stream(side)
    del y
    w = x - 1
    main.wait_stream(side)
    return z * w


@pytest.mark.parametrize("record", [True, False])
def test_record_stream_keeps_memory_for_the_other_stream(side: cpu.Stream, record: bool) -> None:
    x = torch.ones(4)
    graph, y = capture(lambda: use_on_side_and_drop(x, side, record=record))
    assert is_right_in_all_replays(graph, x, y) == record


def test_random_numbers_do_not_depend_on_the_order(side: cpu.Stream) -> None:
    def code() -> tuple[torch.Tensor, torch.Tensor]:
        main = cpu.current_stream()
        side.wait_stream(main)
        with cpu.stream(side):
            a = torch.rand(3)
        b = torch.rand(3)
        main.wait_stream(side)
        return a, b

    graph, (a, b) = capture(code)
    for _ in range(NUM_REPLAYS):
        torch.manual_seed(5)
        graph.replay()
        torch.manual_seed(5)
        assert torch.equal(a, torch.rand(3))
        assert torch.equal(b, torch.rand(3))


def capture_in_two(
    pool: EmulatedPool, first: Callable[[], Any], second: Callable[[], Any], between: Callable[[], Any] = int
) -> tuple[list[DeviceGraph], Any, Any]:
    """Captures two graphs with a break between them."""
    with torch.no_grad(), pool.capture_scope():
        with recording(pool) as one:
            left = first()
        between()
        with recording(pool) as two:
            right = second()
    return [one, two], left, right


def test_stream_open_at_a_break_is_joined_and_forked_again(side: cpu.Stream) -> None:
    """vllm/pytorch error 904: a side stream is forked before a break and joined after it."""
    x = torch.ones(4)
    pool = EmulatedDevice().new_pool()
    values: dict[str, torch.Tensor] = {}

    def first() -> None:
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            values["z"] = x * 2

    def second() -> None:
        with cpu.stream(side):
            values["z"] += 1
        cpu.current_stream().wait_stream(side)
        values["y"] = values["z"] * (x - 1)

    graphs, _, _ = capture_in_two(pool, first, second)
    for value in range(NUM_REPLAYS):
        x.fill_(value)
        for graph in graphs:
            graph.replay()
        assert torch.equal(values["y"], expected(x))


def test_event_of_an_earlier_graph_is_over(side: cpu.Stream) -> None:
    """Waiting for it is a no-op on the capture stream, and forks a side stream."""
    event, x = cpu.Event(), torch.ones(2)
    other = cpu.Stream()

    def second() -> torch.Tensor:
        cpu.current_stream().wait_event(event)
        other.wait_event(event)
        with cpu.stream(other):
            y = x + 1
        cpu.current_stream().wait_stream(other)
        return y * 2

    graphs, _, y = capture_in_two(EmulatedDevice().new_pool(), lambda: event.record(), second)
    for graph in graphs:
        graph.replay()
    assert torch.equal(y, torch.full((2,), 4.0))


def test_joined_stream_must_be_forked_again_after_a_break(side: cpu.Stream) -> None:
    x = torch.ones(2)

    def second() -> torch.Tensor:
        with cpu.stream(side):
            return x + 1

    with pytest.raises(UnjoinedStreamError, match="side stream"):
        capture_in_two(EmulatedDevice().new_pool(), lambda: fork_and_join(x, side), second)


def test_stream_that_was_never_forked_is_named(side: cpu.Stream) -> None:
    def code() -> torch.Tensor:
        with cpu.stream(side):
            return torch.ones(2) + 1

    with pytest.raises(
        UnjoinedStreamError, match=r"side stream 1.*test_emulated_streams\.py:\d+.*wait_stream"
    ):
        capture(code)
    assert code().tolist() == [2, 2]


def test_wait_for_a_stream_outside_the_capture_is_named(side: cpu.Stream) -> None:
    """TRT-LLM#16609: such a wait was dropped silently (a copy prefetched on another stream)."""
    with pytest.raises(UnjoinedStreamError, match="side stream 1"):
        capture(lambda: cpu.current_stream().wait_stream(side))


@pytest.mark.parametrize("record", [lambda event: None, lambda event: event.record()])
def test_wait_for_an_event_outside_the_capture_is_named(record: Callable[[Any], None]) -> None:
    event = cpu.Event()
    with pytest.raises(UnjoinedStreamError, match="event"):
        capture_in_two(EmulatedDevice().new_pool(), int, lambda: event.wait(), between=lambda: record(event))


def test_default_stream_is_not_the_capture_stream(side: cpu.Stream) -> None:
    """Forking from a stream kept from before the capture forks from nothing that is captured."""
    kept = cpu.current_stream()

    def code() -> torch.Tensor:
        side.wait_stream(kept)
        with cpu.stream(side):
            return torch.ones(2)

    with pytest.raises(UnjoinedStreamError, match="side stream"):
        capture(code)


def test_host_may_not_wait_while_recording() -> None:
    event = cpu.Event()
    for code in (lambda: cpu.synchronize(), lambda: event.synchronize(), lambda: event.query()):
        with pytest.raises(CaptureForbiddenError, match="host would wait"):
            capture(code)
        code()


def test_breaks_use_streams_freely(side: cpu.Stream) -> None:
    def between() -> None:
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            assert cpu.current_stream() is side
            torch.ones(2).tolist()
        cpu.current_stream().wait_stream(side)
        cpu.synchronize()

    capture_in_two(EmulatedDevice().new_pool(), lambda: torch.ones(2), lambda: torch.ones(2), between)


def test_streams_are_pytorchs_again_after_a_capture(side: cpu.Stream) -> None:
    before = dict(vars(cpu.Stream)), dict(vars(cpu.Event)), cpu.current_stream, dict(vars(cpu.StreamContext))
    outside = cpu.current_stream()
    x = torch.ones(2)
    capture(lambda: fork_and_join(x, side))
    after = dict(vars(cpu.Stream)), dict(vars(cpu.Event)), cpu.current_stream, dict(vars(cpu.StreamContext))
    assert after == before
    assert cpu.current_stream() is outside


def test_code_may_ask_whether_it_is_captured_as_on_cuda() -> None:
    """transformers asks before it looks at a mask's values; its models were refused."""
    seen: list[bool] = []
    ask = torch.cuda.is_current_stream_capturing
    pool = EmulatedDevice().new_pool()

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.is_current_stream_capturing())
        return x + 1

    x = torch.ones(3)
    with pool.capture_scope():
        look(x)
        graph = pool.new_graph()
        graph.begin()
        look(x)
        graph.end()
        look(x)
    assert seen == [False, True, False]
    assert torch.cuda.is_current_stream_capturing is ask
