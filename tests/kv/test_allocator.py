"""Slot allocators: nothing handed out twice, nothing lost, scratch never, a refused call changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_piecewise.runtime.errors import ConfigError, PoolError
from sgl_piecewise.runtime.kv.allocator import KVSlotAllocator, SlotAllocator
from sgl_piecewise.runtime.kv.slots import FULL_POOL, WINDOW_POOL, VirtualSlots

NUM_FULL, NUM_WINDOW = 24, 14


class Allocations(RuleBasedStateMachine):
    """Requests take, release from the window, and give back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = KVSlotAllocator({FULL_POOL: NUM_FULL, WINDOW_POOL: NUM_WINDOW})
        # Slots of every request, and the windows' physical slots of those that were not released.
        self.held: list[dict[int, int | None]] = []

    def physical(self, ids: list[int]) -> list[int]:
        return self.allocator.translate(
            VirtualSlots(torch.tensor(ids, dtype=torch.int64)), pool=WINDOW_POOL
        ).tolist()

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        free = {pool: self.allocator.num_free(pool) for pool in self.allocator.pools}
        if self.allocator.can_allocate(count):
            ids = self.allocator.allocate(count).ids.tolist()
            self.held.append(dict(zip(ids, self.physical(ids), strict=True)))
            return
        with pytest.raises(PoolError, match="Ask can_allocate"):
            self.allocator.allocate(count)
        assert free == {pool: self.allocator.num_free(pool) for pool in self.allocator.pools}

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.held:
            return
        request = data.draw(st.sampled_from(self.held))
        ids = list(request)[: data.draw(st.integers(0, len(request)))]
        expected = sum(request[slot] is not None for slot in ids)
        assert (
            self.allocator.release(VirtualSlots(torch.tensor(ids, dtype=torch.int64)), pool=WINDOW_POOL)
            == expected
        )
        request.update(dict.fromkeys(ids))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if not self.held:
            return
        request = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        slots = VirtualSlots(torch.tensor(list(request), dtype=torch.int64))
        self.allocator.free(slots)
        if request:
            with pytest.raises(PoolError, match="is free already"):
                self.allocator.free(slots)

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        virtual = [slot for request in self.held for slot in request]
        windows = [slot for request in self.held for slot in request.values() if slot is not None]
        for ids, total, pool in ((virtual, NUM_FULL, FULL_POOL), (windows, NUM_WINDOW, WINDOW_POOL)):
            assert len(set(ids)) == len(ids)
            assert all(1 <= slot <= total for slot in ids)
            assert self.allocator.num_free(pool) == total - len(ids)
        for request in self.held:
            assert self.physical(list(request)) == [slot or 0 for slot in request.values()]


TestAllocations = Allocations.TestCase


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1], "slot 0 is scratch"),
        ([1, 9], "slots 1 to 9 freed, but requests own only 1 to 8"),
        ([1, 5], "slot 5 is free already"),
        ([1, 2, 1], "named twice"),
    ],
)
def test_a_wrong_free_raises_and_frees_nothing(ids: list[int], message: str) -> None:
    allocator = SlotAllocator(8)
    assert allocator.allocate(4).tolist() == [1, 2, 3, 4]
    with pytest.raises(PoolError, match=message):
        allocator.free(torch.tensor(ids))
    assert allocator.num_free == 4
    allocator.free(torch.tensor([1, 2, 3, 4]))


def test_a_wrong_free_frees_nothing_in_any_sub_pool() -> None:
    allocator = KVSlotAllocator({FULL_POOL: 8, WINDOW_POOL: 8})
    slots = allocator.allocate(3)
    with pytest.raises(PoolError):
        allocator.free(VirtualSlots(torch.tensor([1, 7])))
    assert (allocator.num_free(FULL_POOL), allocator.num_free(WINDOW_POOL)) == (5, 5)
    assert allocator.translate(slots, pool=WINDOW_POOL).min() > 0


def test_the_smaller_sub_pool_decides_and_is_named() -> None:
    allocator = KVSlotAllocator({FULL_POOL: 8, WINDOW_POOL: 2})
    assert not allocator.can_allocate(3)
    with pytest.raises(PoolError, match="'window': 3 slots asked for, 2 of 2 are free"):
        allocator.allocate(3)
    assert allocator.num_free() == 8


def test_what_the_full_pool_holds_is_not_released_early() -> None:
    allocator = KVSlotAllocator({FULL_POOL: 8})
    with pytest.raises(PoolError, match="not 'full'"):
        allocator.release(allocator.allocate(2), pool=FULL_POOL)


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="num_slots=0"):
        SlotAllocator(0)
    with pytest.raises(ConfigError, match=r"only \['window'\]"):
        KVSlotAllocator({WINDOW_POOL: 8})
    with pytest.raises(PoolError, match="-1 slots asked for"):
        SlotAllocator(2).allocate(-1)


def test_translations_belong_to_the_caller() -> None:
    allocator = KVSlotAllocator({FULL_POOL: 4, WINDOW_POOL: 4})
    slots = allocator.allocate(2)
    for pool in allocator.pools:
        allocator.translate(slots, pool=pool).fill_(4)
    assert slots.ids.tolist() == [1, 2]
    assert allocator.translate(slots, pool=WINDOW_POOL).tolist() == [1, 2]


def test_ids_belong_to_the_caller() -> None:
    """Writing to them must not reach the book-keeping."""
    allocator = SlotAllocator(4)
    first = allocator.allocate(2)
    kept = first.clone()
    first.fill_(3)
    assert allocator.allocate(2).tolist() == [3, 4]
    allocator.free(kept)
    assert allocator.num_free == 2
