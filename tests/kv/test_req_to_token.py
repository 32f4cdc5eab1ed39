"""The scheduler's request table, and scheduling on it."""

from __future__ import annotations

import pytest
import torch
from serving_support import world

from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.schedule_batch import DllmBlocks
from sgl_piecewise.runtime.batch.scheduling import can_schedule, release, schedule
from sgl_piecewise.runtime.errors import BatchError, ConfigError, PoolError
from sgl_piecewise.runtime.kv.req_to_token import ReqToTokenPool
from sgl_piecewise.runtime.kv.slots import VirtualSlots


def slots(*ids: int) -> VirtualSlots:
    return VirtualSlots(torch.tensor(ids, dtype=torch.int64))


def test_rows_come_and_go_and_row_0_never() -> None:
    table = ReqToTokenPool(max_requests=2, max_context=4)
    assert [table.allocate(), table.allocate()] == [1, 2]
    assert not table.can_allocate()
    with pytest.raises(PoolError, match="All 2 request rows are taken"):
        table.allocate()
    table.free(1)
    for row in (0, 1, 3, -1):
        with pytest.raises(PoolError, match=f"Request row {row} belongs to no request"):
            table.free(row)
    assert table.allocate() == 1


def test_slots_stand_in_the_order_of_the_tokens() -> None:
    table = ReqToTokenPool(max_requests=3, max_context=8)
    one, other = table.allocate(), table.allocate()
    table.append([one, other], [2, 3], slots(11, 12, 21, 22, 23))
    table.append([other, one], [1, 1], slots(24, 13))
    assert table.slots(one).ids.tolist() == [11, 12, 13]
    assert table.gather([other, one], [1, 0], [3, 1]).ids.tolist() == [22, 23, 24, 11]
    assert table.slots(other, 1, 1).ids.tolist() == []
    for begin, end in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(PoolError, match="has slots for 4 tokens"):
            table.slots(other, begin, end)


def test_a_row_that_was_freed_is_empty() -> None:
    """Otherwise its next request would read another's slots."""
    table = ReqToTokenPool(max_requests=1, max_context=4)
    row = table.allocate()
    table.append([row], [3], slots(7, 8, 9))
    table.free(row)
    assert table.num_tokens(table.allocate()) == 0


def test_what_does_not_fit_is_refused_whole() -> None:
    table = ReqToTokenPool(max_requests=2, max_context=4)
    one, other = table.allocate(), table.allocate()
    with pytest.raises(PoolError, match=r"would hold 5 tokens.*max_context=4"):
        table.append([one, other], [1, 5], slots(*range(1, 7)))
    with pytest.raises(PoolError, match="2 slots given for 1 tokens"):
        table.append([one], [1], slots(1, 2))
    assert (table.num_tokens(one), table.num_tokens(other)) == (0, 0)
    with pytest.raises(ConfigError, match="max_context=0"):
        ReqToTokenPool(max_requests=1, max_context=0)


def free_of(at: object) -> tuple[int, ...]:
    allocator, table = at.allocator, at.table  # type: ignore[attr-defined]
    return (*(allocator.num_free(pool) for pool in allocator.pools), table.num_free)


def test_requests_take_and_give_back_everything() -> None:
    at = world()
    before = free_of(at)
    reqs = [Req.of_prompt(str(length), range(length)) for length in (5, 9)]
    schedule(ForwardMode.EXTEND, reqs, [5, 4], at.allocator, at.table)
    assert free_of(at) == (before[0] - 9, before[1] - 9, before[2] - 2)
    reqs[1].num_computed_tokens = 4
    schedule(ForwardMode.EXTEND, reqs[1:], [5], at.allocator, at.table)
    for req in reqs:
        release(req, at.allocator, at.table)
        release(req, at.allocator, at.table)  # One that waits has nothing to give back.
    assert free_of(at) == before


def test_slots_of_drafts_that_were_turned_down_are_used_again() -> None:
    at = world()
    req = Req.of_prompt("r", range(20))
    schedule(ForwardMode.EXTEND, [req], [8], at.allocator, at.table)
    held = free_of(at)
    req.num_computed_tokens = 5
    batch = schedule(ForwardMode.EXTEND, [req], [3], at.allocator, at.table)
    assert free_of(at) == held
    assert req.req_pool_index is not None
    assert torch.equal(batch.out_cache_loc.ids, at.table.slots(req.req_pool_index, 5, 8).ids)


@pytest.mark.parametrize("shortage", ["full", "window", "rows", "context"])
def test_a_full_pool_refuses_and_takes_nothing(shortage: str) -> None:
    sizes = {"num_slots": 16, "num_window_slots": 16, "max_requests": 2, "max_context": 16}
    small = {
        "full": "num_slots",
        "window": "num_window_slots",
        "rows": "max_requests",
        "context": "max_context",
    }
    sizes[small[shortage]] = 1 if shortage == "rows" else 6
    at = world(**sizes)
    before = free_of(at)
    reqs = [Req.of_prompt(str(index), range(7)) for index in range(2)]
    if shortage != "context":
        assert not can_schedule(reqs, [7, 7], at.allocator, at.table)
    message = "max_context=6" if shortage == "context" else "Ask can_schedule first"
    with pytest.raises(PoolError, match=message):
        schedule(ForwardMode.EXTEND, reqs, [7, 7], at.allocator, at.table)
    assert free_of(at) == before
    assert all(req.req_pool_index is None for req in reqs)


def test_a_refused_decision_takes_nothing() -> None:
    at = world()
    before = free_of(at)
    req = Req.of_prompt("r", range(3))
    for mode, news, dllm, message in (
        (ForwardMode.EXTEND, [4], None, "input_ids: request 'r' has 3 tokens"),
        (ForwardMode.EXTEND, [1, 1], None, "num_new_tokens: 2 entries"),
        (ForwardMode.EXTEND, [0], None, r"extend_lens\[0\] is 0"),
        (ForwardMode.EXTEND, [-1], None, r"num_new_tokens\[0\] is -1"),
        (ForwardMode.DLLM_EXTEND, [2], DllmBlocks(block_size=2, block_offsets=(0, 2)), "block_offsets"),
    ):
        with pytest.raises(BatchError, match=message):
            schedule(mode, [req], news, at.allocator, at.table, dllm=dllm)
    assert free_of(at) == before
