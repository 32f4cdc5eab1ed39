"""Point 13: captures and replays that cannot nest say so; threads take turns on a pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from contract.support import assert_equal, ramp, record, untouched
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import CaptureError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def forward(x: torch.Tensor) -> torch.Tensor:
    return double(x + 1) - x


@pytest.mark.parametrize("shares_pool", [True, False])
def test_capture_inside_capture_raises(graph_device: GraphDevice, shares_pool: bool) -> None:
    pool = graph_device.new_pool()
    inner_pool = pool if shares_pool else graph_device.new_pool()
    x = ramp(graph_device, 4)
    with untouched(graph_device, pool), pytest.raises(CaptureError, match=r"[Cc]apture inside capture"):
        record(lambda: record(lambda: forward(x), pool=inner_pool), pool=pool)
    assert_equal(capture(forward, (x,), pool=pool)(x), forward(x))


def test_replay_inside_a_capture_raises(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    inner = capture(forward, (x,), device=graph_device)
    calls = {"count": 0}

    def outer(t: torch.Tensor) -> torch.Tensor:
        calls["count"] += 1
        return t + 1 if calls["count"] == 1 else inner(t) + 1  # The warm-up does not replay.

    with untouched(graph_device, inner.pool), pytest.raises(CaptureError, match="inside a capture"):
        capture(outer, (x,), device=graph_device)
    assert_equal(inner(x), forward(x))


def test_replay_inside_an_eager_segment_of_the_same_pool_raises(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    pool = graph_device.new_pool()
    inner = capture(forward, (x,), pool=pool)
    use = {"inner": False}

    @eager_on_graph
    def body(t: torch.Tensor) -> torch.Tensor:
        return inner(t) if use["inner"] else forward(t)

    outer = capture(lambda t: body(t + 1) + 1, (x,), pool=pool)
    use["inner"] = True
    with untouched(graph_device, pool), pytest.raises(CaptureError, match="own pool"):
        outer(x)
    use["inner"] = False
    assert_equal(outer(x), forward(x + 1) + 1)


def test_replay_inside_an_eager_segment_of_another_pool_is_fine(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    inner = capture(forward, (x,), device=graph_device)
    body = eager_on_graph(inner)
    outer = capture(lambda t: body(t + 1) + 1, (x,), device=graph_device)
    for start in (0.0, 9.0):
        y = ramp(graph_device, 4, start=start)
        assert_equal(outer(y), forward(y + 1) + 1)


def test_capture_while_autograd_records_raises(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    weight = torch.nn.Parameter(torch.ones(4, device=graph_device.torch_device))
    linear = torch.nn.Linear(4, 4, device=graph_device.torch_device)
    with torch.enable_grad():
        for fn, args in (
            (forward, (x.clone().requires_grad_(),)),  # An input,
            (linear, (x,)),  # a module's parameter,
            (lambda t: t * weight, (x,)),  # or something that the function closes over.
        ):
            with untouched(graph_device), pytest.raises(CaptureError, match="no_grad"):
                capture(fn, args, device=graph_device)
        with untouched(graph_device), pytest.raises(CaptureError, match="no_grad"):
            record(lambda: double(x * weight), device=graph_device)
        # Without anything that requires grad there is nothing to record.
        captured = capture(forward, (x,), device=graph_device)
        assert_equal(captured(x), forward(x))


def test_result_of_a_body_that_requires_grad_is_refused(graph_device: GraphDevice) -> None:
    weight = torch.nn.Parameter(torch.ones(4, device=graph_device.torch_device))
    scaled = eager_on_graph(lambda t: t * weight)
    x = ramp(graph_device, 4)
    with torch.enable_grad(), pytest.raises(CaptureError, match="requires grad"):
        record(lambda: scaled(x + 1), device=graph_device)


def _in_threads(*functions: Callable[[], Any]) -> list[Any]:
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as executor:
        return [future.result() for future in [executor.submit(run, function) for function in functions]]


def test_two_threads_on_one_pool_never_interleave(graph_device: GraphDevice) -> None:
    """From copy-in to copy-out a pool is one thread's: recordings share memory."""
    pool = graph_device.new_pool()
    inside: set[int] = set()

    @eager_on_graph
    def alone(t: torch.Tensor) -> torch.Tensor:
        inside.add(threading.get_ident())
        assert len(inside) == 1
        result = t * 2
        inside.discard(threading.get_ident())
        return result

    x = ramp(graph_device, 512)
    one = capture(lambda t: alone(t + 1) - 1, (x,), pool=pool)
    other = capture(lambda t: alone(t * 3) + 5, (x,), pool=pool)

    def use(captured: Any, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for n in range(40):
            y = x + n
            assert_equal(captured(y), expected(y))

    _in_threads(
        lambda: use(one, lambda y: (y + 1) * 2 - 1),
        lambda: use(other, lambda y: y * 6 + 5),
        lambda: use(one, lambda y: (y + 1) * 2 - 1),
    )


def test_two_threads_capture_on_their_own_pools(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 64)

    def build(factor: int) -> torch.Tensor:
        with torch.no_grad():
            captured = capture(lambda t: double(t * factor) + 1, (x,), device=graph_device)
            return captured(x)

    results = _in_threads(*(lambda factor=factor: build(factor) for factor in (3, 5)))
    assert_equal(results, [x * 6 + 1, x * 10 + 1])


def test_work_of_another_thread_is_not_captured(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    others: list[torch.Tensor] = []

    def other_thread() -> None:
        others.append(x * 100)

    def fn(t: torch.Tensor) -> torch.Tensor:
        y = t + 1
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        return y * 2

    captured = capture(fn, (x,), device=graph_device)
    assert_equal(captured(x), (x + 1) * 2)
    assert_equal(others, [x * 100] * 2)
    (recording,) = captured.recordings.values()
    assert recording.segments[0].graph.num_ops in (None, 2)


def test_marks_of_another_thread_are_ordinary_calls(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    others: list[torch.Tensor] = []

    def fn(t: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: others.append(double(x)))
        thread.start()
        thread.join()
        return t + 1

    captured = capture(fn, (x,), device=graph_device)
    assert next(iter(captured.recordings.values())).num_breaks == 0
    assert_equal(others, [x * 2] * 2)
