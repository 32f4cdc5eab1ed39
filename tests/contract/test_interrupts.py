"""Ctrl-C at any moment of a capture or a replay leaves everything usable, and is not lost."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from contract.support import assert_equal, ramp, record, untouched
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.interrupts import HeldInterrupts, _is_bookkeeping
from sgl_piecewise.runtime.mark import break_graph, eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def forward(x: torch.Tensor) -> torch.Tensor:
    return double(double(x + 1) - 1) + 1


_WATCHED = ("sgl_piecewise.runtime", "contextlib", "functools", "signal")


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _interrupt_at(nth: int, work: Callable[[], Any]) -> bool:
    """Does ``work`` with SIGINT at the nth moment in the library; False if there are fewer.

    Moments are where Python looks for signals: when a function begins, and after a call of one in C.
    """
    left, is_sent = nth, False

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left, is_sent
        module = frame.f_globals.get("__name__", "")
        if is_sent or event not in ("call", "c_return") or not module.startswith(_WATCHED):
            return
        left -= 1
        if left < 0:
            is_sent = True
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                handler(signal.SIGINT, frame)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return is_sent


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _capture(device: GraphDevice, x: torch.Tensor, pool: Any) -> None:
    capture(forward, (x,), capture_sizes=[2, 4], pool=pool)


def _block(device: GraphDevice, x: torch.Tensor, pool: Any) -> None:
    record(lambda: (x + 1, break_graph(), x * 2), pool=pool)


@pytest.mark.parametrize("step", [41, pytest.param(23, marks=pytest.mark.slow)])
@pytest.mark.parametrize("work", [_capture, _block])
def test_interrupt_anywhere_in_a_capture(
    graph_device: GraphDevice, work: Callable[..., None], step: int
) -> None:
    """torch.Tensor lost methods, and every later capture was "inside a capture"."""
    if not graph_device.is_emulated:
        step //= 3  # Less of a recording is Python there: a short block has under 400 moments.
    x = ramp(graph_device, 4)
    captured = capture(forward, (x,), device=graph_device)
    work(graph_device, x, graph_device.new_pool())
    nth = 0
    while True:
        pool = graph_device.new_pool()
        with untouched(graph_device, pool):
            try:
                if not _interrupt_at(nth, lambda pool=pool: work(graph_device, x, pool)):  # type: ignore[misc]
                    break
                was_interrupted = False
            except KeyboardInterrupt:
                was_interrupted = True
        assert was_interrupted, nth
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert_equal(captured(x), forward(x))
        nth += step
    assert nth > 20 * step
    work(graph_device, x, graph_device.new_pool())
    gc.collect()


def test_interrupt_anywhere_in_a_replay(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    captured = capture(forward, (x,), device=graph_device)
    for nth in range(1000):
        try:
            if not _interrupt_at(nth, lambda: captured(x)):
                break
        except KeyboardInterrupt:
            pass
        assert not captured.pool.is_held()
        assert_equal(captured(x), forward(x))


def test_interrupt_in_the_users_code_is_raised_there(graph_device: GraphDevice) -> None:
    reached: list[str] = []

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        _interrupt()
        reached.append("later")
        return x + 1

    with pytest.raises(KeyboardInterrupt):
        capture(interrupted, (ramp(graph_device, 4),), device=graph_device)
    with pytest.raises(KeyboardInterrupt):
        record(lambda: interrupted(ramp(graph_device, 4)), device=graph_device)
    assert not reached


def test_handler_of_the_program_is_called(graph_device: GraphDevice) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    sent = _interrupt_at(500, lambda: capture(forward, (ramp(graph_device, 4),), device=graph_device))
    assert sent
    assert heard == [signal.SIGINT]


def test_ignored_interrupts_stay_ignored_and_threads_are_left_alone(graph_device: GraphDevice) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert _interrupt_at(500, lambda: capture(forward, (ramp(graph_device, 4),), device=graph_device))
    results: list[Any] = []

    def in_thread() -> None:
        with torch.no_grad(), HeldInterrupts():
            results.append(capture(forward, (ramp(graph_device, 4),), device=graph_device))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert len(results) == 1


@pytest.mark.parametrize("helper", ["torch_private", "torch_private_settings", "tree", "time_line"])
@pytest.mark.parametrize(
    ("caller", "is_held"), [("sgl_piecewise.runtime.capture.entry", True), ("users_model", False)]
)
def test_whose_interrupt_it_is_shows_further_out_than_helpers(
    helper: str, caller: str, is_held: bool
) -> None:
    """A routing of allocations stayed open: the call that begins it is no bookkeeping by its module's name."""
    outer: Any = SimpleNamespace(f_globals={"__name__": caller}, f_back=None)
    inner: Any = SimpleNamespace(f_globals={"__name__": f"sgl_piecewise.runtime.{helper}"}, f_back=outer)
    assert _is_bookkeeping(inner) is is_held
