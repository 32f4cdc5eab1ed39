"""Pool memory of the emulated device: re-use, poison, and a recording that leaves no trace."""

from __future__ import annotations

import gc

import pytest
import torch
from emulated_support import capture, is_poisoned, recording

from sgl_piecewise.runtime import torch_private
from sgl_piecewise.runtime.capture.emulated import EmulatedDevice
from sgl_piecewise.runtime.errors import CaptureError, ReplayError


def test_recording_executes_nothing() -> None:
    """Results are undefined until the replay; what was written into outside memory is undone."""
    x, kv = torch.ones(4), torch.zeros(4)
    seed_state = torch.get_rng_state()

    def code() -> tuple[torch.Tensor, torch.Tensor]:
        kv.add_(x)
        return x * 2 + torch.rand(4), x.argsort()

    graph, (y, order) = capture(code)
    assert is_poisoned(y)
    assert is_poisoned(order)
    assert torch.equal(kv, torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), seed_state)
    graph.replay()
    assert torch.equal(kv, torch.ones(4))
    assert not y.isnan().any()


def test_memory_of_earlier_graphs_is_undone_too() -> None:
    pool = EmulatedDevice().new_pool()
    with torch.no_grad(), pool.capture_scope():
        with recording(pool) as first:
            y = torch.ones(4)
        first.replay()
        with recording(pool) as second:
            y.add_(1)
        assert torch.equal(y, torch.ones(4))
        second.replay()
    assert torch.equal(y, torch.full((4,), 2.0))


@pytest.mark.parametrize("reuses", [False, True])
def test_memory_that_dies_while_recording_is_whole_at_the_next_launch(reuses: bool) -> None:
    """Recording executes nothing, poison included: the launch still reads what an earlier graph left."""
    pool = EmulatedDevice().new_pool()
    with torch.no_grad(), pool.capture_scope():
        with recording(pool) as first:
            y = torch.ones(4)
        first.replay()
        with recording(pool) as second:
            z = y + 1
            del y
            later = torch.zeros(4) if reuses else None
        second.replay()
    assert torch.equal(z, torch.full((4,), 2.0))
    assert later is None or torch.equal(later, torch.zeros(4))


def test_freed_memory_is_reused_and_poisoned_at_every_replay() -> None:
    pool = EmulatedDevice().new_pool()
    x = torch.ones(1000)

    def code() -> torch.Tensor:
        temporary = x + 1
        stale.append(torch_private.alias_without_owning(temporary))
        result = temporary.sum()
        del temporary
        return result

    stale: list[torch.Tensor] = []
    graph, result = capture(code, pool)
    for value in (1.0, 2.0):
        x.fill_(value)
        stale[0].fill_(7.0)
        graph.replay()
        assert result.item() == 1000 * (value + 1)
        assert is_poisoned(stale[0]), "a read of freed memory must show at replay, too"


def test_empty_is_poison_at_every_replay() -> None:
    graph, (floats, integers) = capture(lambda: (torch.empty(4), torch.empty(4, dtype=torch.int64)))
    for _ in range(2):
        floats.zero_()
        integers.zero_()
        graph.replay()
        assert is_poisoned(floats)
        assert is_poisoned(integers)
    assert graph.num_ops == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
)
def test_poison_is_nan_in_every_floating_type(dtype: torch.dtype) -> None:
    _, y = capture(lambda: torch.empty(5, dtype=dtype))
    assert is_poisoned(y)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_poison_is_nan_in_float8(dtype: torch.dtype) -> None:
    _, y = capture(lambda: torch.empty(5, dtype=dtype))
    assert y.float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_poison_is_no_valid_index(dtype: torch.dtype) -> None:
    """-1 would be one, and read the last row without a word."""
    _, y = capture(lambda: torch.empty(3, dtype=dtype))
    with pytest.raises(IndexError):
        torch.ones(1000)[y.long()]


def test_undefined_indices_do_not_stop_a_recording() -> None:
    """CUDA looks at no value while recording: a graph that was not launched left poison."""
    pool = EmulatedDevice().new_pool()
    table, x = torch.arange(12.0).view(6, 2), torch.tensor([3.0, 1.0, 2.0])
    with torch.no_grad(), pool.capture_scope():
        with recording(pool) as first:
            order = x.argsort()
        with recording(pool) as second:
            rows = torch.nn.functional.embedding(order, table)
            table.index_add_(0, order, rows)
        assert is_poisoned(order)
        first.replay()
        second.replay()
    assert torch.equal(rows, torch.tensor([[2.0, 3.0], [4.0, 5.0], [0.0, 1.0]]))
    assert torch.equal(table[:3], torch.tensor([[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]))


def test_wrong_values_still_fail_at_replay() -> None:
    index = torch.zeros(2, dtype=torch.int64)
    graph, _ = capture(lambda: torch.ones(3)[index])
    index.fill_(9)
    with pytest.raises(IndexError):
        graph.replay()


def test_memory_freed_in_a_break_is_poisoned_by_the_next_graph() -> None:
    pool = EmulatedDevice().new_pool()
    with torch.no_grad(), pool.capture_scope():
        with recording(pool):
            y = torch.ones(100) * 2
        alias = torch_private.alias_without_owning(y)
        del y
        with recording(pool) as second:
            pass
        alias.fill_(1.0)
        second.replay()
    assert is_poisoned(alias)


def test_boundary_memory_that_reuses_freed_memory_is_not_poisoned_later() -> None:
    """In replay the break writes its result before the next graph starts."""
    pool = EmulatedDevice().new_pool()
    with torch.no_grad(), pool.capture_scope():
        with recording(pool):
            y = torch.ones(512)
        address = y.data_ptr()
        del y
        boundary = pool.allocate(512)
        assert boundary.data_ptr() == address
        boundary.fill_(3)
        with recording(pool) as second:
            z = boundary.float() + 1
        second.replay()
    assert torch.equal(z, torch.full((512,), 4.0))


def test_boundary_memory_is_poisoned_owned_and_given_back() -> None:
    pool = EmulatedDevice().new_pool()
    with pool.capture_scope():
        buffer = pool.allocate(100)
        assert buffer.dtype is torch.uint8
        assert buffer.shape == (100,)
        assert is_poisoned(buffer.view(torch.float32))
        assert pool.owns(buffer)
        assert pool.owns(buffer[10:])
        assert not pool.owns(torch.ones(3))
        assert pool.memory().allocated_bytes == 512
        view = buffer.view(torch.float32)[3:]
        del buffer
        gc.collect()
        assert pool.memory().allocated_bytes == 512, "a view keeps the block"
        del view
        assert pool.memory().allocated_bytes == 0
        assert pool.memory().reserved_bytes == 512
        assert pool.allocate(600).data_ptr() != 0
        assert pool.memory().reserved_bytes == 1024, "the freed block grew, it was not left behind"


def test_a_smaller_capture_reuses_the_memory_of_a_larger_one() -> None:
    pool = EmulatedDevice().new_pool()

    def chain(rows: int) -> torch.Tensor:
        y = torch.ones(rows, 64)
        for _ in range(5):
            y = y @ torch.eye(64) + 1
        return y.sum()

    large, total = capture(lambda: chain(256), pool)
    reserved = pool.memory().reserved_bytes
    small, other = capture(lambda: chain(32), pool)
    assert pool.memory().reserved_bytes - reserved <= 1024
    for graph, result, rows in ((small, other, 32), (large, total, 256), (small, other, 32)):
        graph.replay()
        assert result.item() == rows * 64 * 6


def test_result_outlives_pool_and_graph() -> None:
    graph, y = capture(lambda: torch.ones(3) + 1)
    graph.replay()
    graph.reset()
    graph.reset()
    with pytest.raises(ReplayError):
        graph.replay()
    del graph
    gc.collect()
    assert torch.equal(y, torch.full((3,), 2.0))


def test_graph_reads_the_memory_it_was_captured_with() -> None:
    """A parameter that is swapped goes stale, as on CUDA."""
    layer = torch.nn.Linear(2, 2, bias=False)
    x = torch.ones(1, 2)
    graph, y = capture(lambda: layer(x))
    graph.replay()
    before = y.clone()
    with torch.no_grad():
        layer.weight.data = torch.zeros(2, 2)
    graph.replay()
    assert torch.equal(y, before)


def test_random_numbers_differ_between_replays_and_follow_the_seed() -> None:
    graph, y = capture(lambda: torch.rand(4))
    torch.manual_seed(3)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    torch.manual_seed(3)
    graph.replay()
    assert torch.equal(first, y)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4))


def test_own_generator_is_drawn_from_live() -> None:
    generator = torch.Generator().manual_seed(1)
    graph, y = capture(lambda: torch.rand(4, generator=generator))
    graph.replay()
    assert torch.equal(y, torch.rand(4, generator=torch.Generator().manual_seed(1)))


def test_out_of_memory_while_recording_leaves_the_pool_usable() -> None:
    device = EmulatedDevice(limit_bytes=1 << 20)
    pool = device.new_pool()
    kv = torch.zeros(4)
    out_of_memory = pytest.raises(torch.OutOfMemoryError, match="limit_bytes")
    with torch.no_grad(), out_of_memory, pool.capture_scope(), recording(pool):
        kv.add_(1)
        torch.ones(1 << 20)
    assert torch.equal(kv, torch.zeros(4))
    assert pool.memory().allocated_bytes == 0
    graph, y = capture(lambda: torch.ones(8) * 2, pool)
    graph.replay()
    assert torch.equal(y, torch.full((8,), 2.0))
    with pool.capture_scope(), pytest.raises(torch.OutOfMemoryError):
        pool.allocate(2 << 20)
    assert device.allocator_reserved_bytes() == pool.memory().reserved_bytes


def test_device_counts_live_pools_only() -> None:
    device = EmulatedDevice()
    pool = device.new_pool()
    with pool.capture_scope():
        pool.allocate(512)
    assert device.allocator_reserved_bytes() == 512
    assert (device.name, device.is_emulated, device.used_bytes()) == ("emulated", True, None)
    del pool
    gc.collect()
    assert device.allocator_reserved_bytes() == 0


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_abort_undoes_everything(error: BaseException) -> None:
    pool = EmulatedDevice().new_pool()
    kv, state = torch.zeros(4), torch.get_rng_state()
    kept: list[torch.Tensor] = []

    def code() -> None:
        kv.add_(torch.rand(4))
        kept.append(kv + 1)
        raise error

    with pytest.raises(type(error)):
        capture(code, pool)
    assert torch.equal(kv, torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), state)
    assert is_poisoned(kept[0])
    assert torch.ones(2).tolist() == [1, 1]
    graph, y = capture(lambda: kv + 2, pool)
    graph.replay()
    assert torch.equal(y, torch.full((4,), 2.0))


def test_scope_that_ends_in_the_middle_of_a_recording_undoes_it() -> None:
    """`exit` without `end` or `abort`, as after an error that nobody aborted."""
    pool, kv = EmulatedDevice().new_pool(), torch.zeros(2)
    with torch.no_grad(), pool.capture_scope():
        pool.new_graph().begin()
        kv.add_(1)
    assert torch.equal(kv, torch.zeros(2))
    assert torch.ones(2).tolist() == [1, 1]


def test_misuse_is_named() -> None:
    pool = EmulatedDevice().new_pool()
    with pytest.raises(CaptureError, match="capture_scope"):
        pool.new_graph().begin()
    with pytest.raises(CaptureError, match="capture_scope"):
        pool.allocate(4)
    with pool.capture_scope():
        graph = pool.new_graph()
        with pytest.raises(CaptureError):
            graph.end()
        graph.begin()
        with pytest.raises(CaptureError, match="end it first"):
            pool.new_graph().begin()
        graph.end()
        with pytest.raises(CaptureError, match="inside capture"):
            EmulatedDevice().new_pool().capture_scope().__enter__()
    with pytest.raises(ReplayError):
        pool.new_graph().replay()


def test_replay_while_recording_is_refused() -> None:
    """On CUDA it would become part of the graph being captured, with its memory shared by both."""
    inner, _ = capture(lambda: torch.ones(2) + 1)
    with pytest.raises(CaptureError, match="replay"):
        capture(inner.replay)
