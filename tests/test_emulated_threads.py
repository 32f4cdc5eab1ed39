"""A capture belongs to its thread: others run undisturbed and are not recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from emulated_support import capture, recording

from sgl_piecewise.runtime.capture.emulated import EmulatedDevice
from sgl_piecewise.runtime.errors import CaptureError


def in_other_thread(code: Callable[[], object]) -> object:
    """Runs ``code`` in a fresh thread and returns its result."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(code).result(timeout=60)


def test_other_thread_is_neither_recorded_nor_refused() -> None:
    shared, state = torch.zeros(3), torch.get_rng_state()
    pool = EmulatedDevice().new_pool()
    with torch.no_grad(), pool.capture_scope():
        graph = pool.new_graph()
        graph.begin()
        y = torch.ones(3) * 2
        in_other_thread(lambda: shared.add_(1))
        assert in_other_thread(lambda: torch.tensor([1.0]).tolist()) == [1.0]
        assert in_other_thread(lambda: torch.ones(3).nonzero().shape[0]) == 3
        in_other_thread(_use_streams)
        z = y + 1
        graph.end()
    assert torch.equal(shared, torch.ones(3)), "the other thread's write is its own and stays"
    assert torch.equal(torch.get_rng_state(), state)
    graph.replay()
    assert torch.equal(z, torch.full((3,), 3.0))
    assert graph.op_names() == ["aten.ones.default", "aten.mul.Tensor", "aten.add.Tensor"]
    assert torch.equal(shared, torch.ones(3))


def _use_streams() -> None:
    side = torch.cpu.Stream()
    with torch.cpu.stream(side):
        torch.cpu.Stream().wait_stream(side)
        torch.ones(2).sum().item()
    torch.cpu.synchronize()


def test_random_numbers_of_another_thread_are_no_seeding() -> None:
    """All threads share the default generator."""

    def code() -> torch.Tensor:
        y = torch.rand(2)
        in_other_thread(lambda: torch.rand(3))
        return y + torch.rand(2)

    graph, _ = capture(code)
    graph.replay()


def test_two_threads_capture_on_two_pools_at_once() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def work(value: float) -> float:
        pool = EmulatedDevice().new_pool()
        with torch.no_grad(), pool.capture_scope():
            barrier.wait()
            with recording(pool) as graph:
                barrier.wait()
                y = torch.full((4,), value) * 2
                barrier.wait()
                with pytest.raises(CaptureError):
                    _refuse()
            barrier.wait()
        graph.replay()
        return y.sum().item()

    def _refuse() -> None:
        raise CaptureError("each thread sees its own errors")

    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(work, (1.0, 2.0))) == [8.0, 16.0]
    assert torch.ones(2).tolist() == [1.0, 1.0]


def test_one_thread_ends_while_the_other_still_records() -> None:
    """Patches stay for whoever still needs them."""
    first_is_done, second_records = threading.Event(), threading.Event()

    def first() -> None:
        second_records.wait(60)
        capture(lambda: torch.ones(2))
        first_is_done.set()

    def second() -> str:
        def code() -> None:
            second_records.set()
            first_is_done.wait(60)
            torch.ones(2).tolist()

        with pytest.raises(CaptureError) as caught:
            capture(code)
        return str(caught.value)

    with ThreadPoolExecutor(2) as executor:
        done = executor.submit(first)
        assert "tolist" in executor.submit(second).result(timeout=60)
        done.result(timeout=60)
    assert "tolist" not in vars(torch.Tensor)


def test_pool_refuses_a_scope_of_another_thread() -> None:
    pool = EmulatedDevice().new_pool()
    with pool.capture_scope():
        with pytest.raises(CaptureError, match="capture_scope"):
            in_other_thread(pool.new_graph().begin)
        with pytest.raises(CaptureError, match="this pool, is capturing"):
            in_other_thread(lambda: pool.capture_scope().__enter__())


def test_memory_freed_by_another_thread_is_taken_back() -> None:
    pool = EmulatedDevice().new_pool()
    with torch.no_grad(), pool.capture_scope(), recording(pool):
        held = [torch.ones(100)]
        address = held[0].data_ptr()
        in_other_thread(held.clear)
        assert torch.ones(100).data_ptr() == address
