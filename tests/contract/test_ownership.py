"""Point 4: who owns a break's result, how long it lives, and what outside memory may come back."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from contract.support import WAYS, assert_equal, assert_like_eager, churn, ramp
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import BreakMismatchError, OutsideWriteError
from sgl_piecewise.runtime.mark import eager_on_graph


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def busy(x: torch.Tensor) -> torch.Tensor:
    """Allocates the size of its break outputs between each mark and the use of its result."""
    first = double(x + 1)
    noise = [torch.full_like(x, 1000.0) for _ in range(3)]
    second = double(first + noise[0])
    noise = [torch.full_like(x, 2000.0 + n) for n in range(3)]
    third = double(second - noise[1])
    del noise
    more = torch.zeros_like(x) + 5
    return first + second * 2 + third * 3 + more


@pytest.mark.parametrize("way", WAYS)
def test_allocations_between_a_mark_and_the_use_of_its_result(graph_device: GraphDevice, way: str) -> None:
    """Dropping the owner while captured code still used the result gave 60 wrong replays of 90."""
    calls = [(ramp(graph_device, 16, 8, start=float(n)),) for n in range(3)]
    assert_like_eager(graph_device, busy, calls, **WAYS[way])


def test_allocator_churn_between_capture_and_replay(graph_device: GraphDevice) -> None:
    captured = capture(busy, (ramp(graph_device, 16, 8),), device=graph_device)
    for n in range(3):
        churn(graph_device, (16, 8), (16 * 8,), (1,))
        x = ramp(graph_device, 16, 8, start=float(n))
        assert_equal(captured(x), busy(x))


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_several_sizes_in_random_order_with_churn(graph_device: GraphDevice, outputs: str) -> None:
    sizes = [2, 4, 8, 16]
    captured = capture(
        busy, (ramp(graph_device, 16, 8),), capture_sizes=sizes, device=graph_device, outputs=outputs
    )
    order = random.Random(0)
    for step in range(24):
        size = order.choice([*sizes, 3, 13])
        x = ramp(graph_device, size, 8, start=float(step))
        if step % 12 == 0:
            churn(graph_device, (size, 8))
        assert_equal(captured(x), busy(x))
    assert not captured.fallbacks


def test_outputs_are_kept_when_another_size_replays(graph_device: GraphDevice) -> None:
    """Sizes share memory: a copy must be out before the next replay writes there."""
    captured = capture(busy, (ramp(graph_device, 16, 8),), capture_sizes=[4, 16], device=graph_device)
    inputs = [ramp(graph_device, size, 8, start=float(size)) for size in (16, 4, 3, 16, 1)]
    outputs = [captured(x) for x in inputs]
    for x, output in zip(inputs, outputs, strict=True):
        assert_equal(output, busy(x))


def test_every_size_is_right_after_all_others_ran(graph_device: GraphDevice) -> None:
    """What a size left in shared memory must not be read by the next; a stale read shows only now."""
    captured = capture(
        busy, (ramp(graph_device, 16, 8),), capture_sizes=[4, 8, 16], device=graph_device, outputs="view"
    )
    for first in (4, 8, 16):
        for second in (4, 8, 16):
            captured(ramp(graph_device, first, 8, start=-500.0))
            x = ramp(graph_device, second, 8)
            assert_equal(captured(x), busy(x))


def test_capture_keeps_neither_break_results_nor_outputs_alive(graph_device: GraphDevice) -> None:
    """A recording holds addresses; what stayed allocated could not serve the next size."""
    captured = capture(
        busy, (ramp(graph_device, 16, 8),), capture_sizes=[4, 8, 16], device=graph_device, outputs="view"
    )
    assert captured.pool.memory().allocated_bytes == 0
    assert captured.pool.memory().reserved_bytes > 0


def test_capture_needs_no_garbage_collection_to_free_memory(graph_device: GraphDevice) -> None:
    """A reference cycle in the engine would keep pool memory until some later collection."""
    gc.collect()
    gc.disable()
    try:
        captured = capture(busy, (ramp(graph_device, 16, 8),), device=graph_device)
        assert captured.pool.memory().allocated_bytes == 0
    finally:
        gc.enable()


def test_held_view_of_a_result_keeps_its_memory(graph_device: GraphDevice) -> None:
    """Captured code keeps only a view and drops the rest."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        tail = double(x + 1)[1:]
        noise = torch.full_like(x, 1000.0)
        return tail + noise[1:] * 0

    assert_like_eager(graph_device, forward, [(ramp(graph_device, 8),), (ramp(graph_device, 8, start=4.0),)])


def test_memory_of_a_dropped_result_is_used_again(graph_device: GraphDevice) -> None:
    """A chain of breaks needs no more pool than two of them: otherwise memory grows with depth."""

    def chain(length: int) -> int:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for _ in range(length):
                x = double(x + 1)
            return x

        x = ramp(graph_device, 1024, 16 if graph_device.is_emulated else 1024, start=0.0)
        captured = capture(forward, (x,), device=graph_device)
        assert_equal(captured(x), forward(x))
        return captured.pool.memory().reserved_bytes

    assert chain(8) <= chain(2) * 1.15


# Results that a marked function does not own ------------------------------------------------------


def test_argument_returned_keeps_its_address(graph_device: GraphDevice) -> None:
    @eager_on_graph
    def bump(t: torch.Tensor) -> torch.Tensor:
        t.add_(1)
        return t

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = bump(y)
        z.mul_(3)  # Writes into y, as in eager.
        return y + z

    captured = assert_like_eager(
        graph_device, forward, [(ramp(graph_device, 4),), (ramp(graph_device, 4, start=6.0),)]
    )
    (outputs,) = next(iter(captured.recordings.values())).break_outputs
    assert outputs.leaves[0].target is None


def test_view_of_a_static_tensor_keeps_its_address(graph_device: GraphDevice) -> None:
    """Captured writes into a KV buffer that a mark hands out change the buffer itself."""
    kv = ramp(graph_device, 6, 4, start=0.0)

    @eager_on_graph
    def rows() -> torch.Tensor:
        return kv[2:4]

    def forward(x: torch.Tensor) -> torch.Tensor:
        part = rows()
        part.add_(x)
        return part * 2

    x = ramp(graph_device, 2, 4)
    captured = capture(forward, (x,), device=graph_device, static_tensors={"kv": kv})
    kv.fill_(10)
    assert_equal(captured(x), (x + 10) * 2)
    assert_equal(kv[2:4], x + 10)
    assert_equal(kv[:2], torch.full_like(kv[:2], 10))


def test_other_view_of_a_static_tensor_at_replay_raises(graph_device: GraphDevice) -> None:
    kv, start = ramp(graph_device, 6, 4), {"row": 0}

    @eager_on_graph
    def rows() -> torch.Tensor:
        return kv[start["row"] : start["row"] + 2]

    x = ramp(graph_device, 2, 4)
    captured = capture(lambda t: rows() + t, (x,), device=graph_device, static_tensors={"kv": kv})
    start["row"] = 1
    with pytest.raises(BreakMismatchError, match=r"rows.*static tensor"):
        captured(x)


class _Counting(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4, device=device))

    @eager_on_graph
    def take(self) -> torch.Tensor:
        return self.state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.take()
        state.add_(x)
        return state * 2


def test_modules_buffer_is_static_without_being_named(graph_device: GraphDevice) -> None:
    module = _Counting(graph_device.torch_device)
    x = ramp(graph_device, 4)
    captured = capture(module, (x,), device=graph_device)
    module.state.zero_()
    for step in range(1, 4):
        assert_equal(captured(x), x * step * 2)
    assert_equal(module.state, x * 3)


def test_double_buffer_that_is_flipped_is_copied(graph_device: GraphDevice) -> None:
    """Its address is another at every call; captured code reads a copy in the pool."""
    buffers = [torch.zeros(4, device=graph_device.torch_device) for _ in range(2)]
    turn = {"now": 0}

    @eager_on_graph
    def flip(t: torch.Tensor) -> torch.Tensor:
        turn["now"] = 1 - turn["now"]
        buffers[turn["now"]].copy_(t * 2)
        return buffers[turn["now"]]

    calls = [(ramp(graph_device, 4, start=float(n)),) for n in range(3)]
    assert_like_eager(graph_device, lambda x: flip(x + 1) - 1, calls)


def _double_buffered(device: GraphDevice, write: Any) -> Any:
    buffers = [torch.zeros(4, device=device.torch_device) for _ in range(2)]
    turn = {"now": 0}

    @eager_on_graph
    def flip(t: torch.Tensor) -> dict[str, torch.Tensor]:
        turn["now"] = 1 - turn["now"]
        buffers[turn["now"]].copy_(t * 2)
        return {"state": buffers[turn["now"]]}

    def forward(x: torch.Tensor) -> torch.Tensor:
        state = flip(x + 1)["state"]
        write(state, x)
        return state * 2

    return forward


WRITES = {
    "add_": lambda state, x: state.add_(x),
    "copy_": lambda state, x: state.copy_(x),
    "view": lambda state, x: state[1:].mul_(2),
    "out": lambda state, x: torch.add(x, 1, out=state),
    "index_put_": lambda state, x: state.index_put_((torch.zeros_like(x, dtype=torch.int64),), x),
    "foreach": lambda state, x: torch._foreach_add_([state], [x]),
}


@pytest.mark.parametrize("how", WRITES)
def test_write_into_a_copy_of_outside_memory_raises(graph_device: GraphDevice, how: str) -> None:
    forward = _double_buffered(graph_device, WRITES[how])
    with pytest.raises(OutsideWriteError, match=r"result\['state'\].*flip.*break 0"):
        capture(forward, (ramp(graph_device, 4),), device=graph_device)


def _cached(device: GraphDevice, late: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward with two marks, of which the second writes the memory that the first returned."""
    cache = torch.zeros(4, device=device.torch_device)

    @eager_on_graph
    def look_up(t: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"part": cache[1:3]}

    @eager_on_graph
    def update(t: torch.Tensor, *found: torch.Tensor) -> torch.Tensor:
        cache.add_(1)
        return t + found[0].sum() if found else t * 1

    def forward(x: torch.Tensor) -> torch.Tensor:
        part = look_up(x)["part"]
        early = x + part.sum()
        if late == "mark":
            return update(early, part)
        y = update(early)
        return {"not at all": lambda: y, "captured code": lambda: y + part.sum(), "output": lambda: part}[
            late
        ]()

    return forward


@pytest.mark.parametrize("late", ["captured code", "mark", "output"])
def test_read_of_a_copy_whose_original_was_written_raises(graph_device: GraphDevice, late: str) -> None:
    """Eager code would see the write; captured code would go on with the copy, in silence."""
    with pytest.raises(OutsideWriteError, match=r"result\['part'\].*look_up.*break 0.*add_"):
        capture(_cached(graph_device, late), (ramp(graph_device, 4),), device=graph_device)


def test_copy_that_nobody_reads_after_its_original_was_written_is_fine(graph_device: GraphDevice) -> None:
    x = ramp(graph_device, 4)
    captured = capture(_cached(graph_device, "not at all"), (x,), device=graph_device)
    first, second = captured(x), captured(x)
    assert_equal(second, first + 2)


def test_reading_a_copy_of_outside_memory_is_fine(graph_device: GraphDevice) -> None:
    forward = _double_buffered(graph_device, lambda state, x: x.add_(0))
    calls = [(ramp(graph_device, 4),), (ramp(graph_device, 4, start=3.0),)]
    assert_like_eager(graph_device, forward, calls)


def test_result_that_aliases_an_unregistered_outside_tensor(graph_device: GraphDevice) -> None:
    """A slice of a persistent tensor that nobody registered: copied at every replay, never stale."""
    cache = ramp(graph_device, 8, start=0.0)

    @eager_on_graph
    def part(t: torch.Tensor) -> torch.Tensor:
        cache.add_(1)
        return cache[2:6]

    x = ramp(graph_device, 4)
    captured = capture(lambda t: part(t) + t, (x,), device=graph_device)
    for _ in range(3):
        result = captured(x)
        assert_equal(result, cache[2:6] + x)
