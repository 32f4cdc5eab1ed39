"""Allocators of token slots: ask (`can_allocate`) and do (`allocate`) apart, nothing lost or given twice.

Book-keeping is on the host, so no allocation waits for a device. A call that raises changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..errors import ConfigError, PoolError
from .pool import KVPool
from .slots import FULL_POOL, SCRATCH_SLOT, VirtualSlots


class SlotAllocator:
    """Hands out the slots 1 to ``num_slots`` of one sub-pool; slot 0 is scratch and never handed out.

    Args:
        num_slots: How many slots there are to own.
        name: Of the sub-pool, for errors.
    """

    def __init__(self, num_slots: int, *, name: str = FULL_POOL) -> None:
        if num_slots < 1:
            raise ConfigError(f"Sub-pool {name!r} needs at least one slot, got num_slots={num_slots}.")
        self.num_slots = num_slots
        self.name = name
        # A stack; the lowest slots lie on top at first.
        self._free = np.arange(num_slots, SCRATCH_SLOT, -1, dtype=np.int64)
        self._num_free = num_slots
        self._is_free = np.ones(num_slots + 1, dtype=np.bool_)
        self._is_free[SCRATCH_SLOT] = False

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        return self._num_free

    def can_allocate(self, num_slots: int) -> bool:
        """Whether that many slots are free."""
        return num_slots <= self._num_free

    def allocate(self, num_slots: int) -> torch.Tensor:
        """Takes slots.

        Returns:
            Their ids (int64[T], host), fresh.

        Raises:
            PoolError: Not so many are free; none was taken.
        """
        if num_slots < 0 or not self.can_allocate(num_slots):
            raise PoolError(
                f"Sub-pool {self.name!r}: {num_slots} slots asked for, {self._num_free} of {self.num_slots} "
                "are free. Ask can_allocate first, and let requests wait until others end."
            )
        self._num_free -= num_slots
        ids = self._free[self._num_free : self._num_free + num_slots][::-1].copy()
        self._is_free[ids] = False
        return torch.from_numpy(ids)

    def free(self, ids: torch.Tensor) -> None:
        """Gives slots back.

        Args:
            ids: From `allocate` (int64[T], host).

        Raises:
            PoolError: An id is scratch, out of range, free already or named twice; none was freed.
        """
        if ids.numel() == 0:
            return
        given = ids.numpy()
        self._check_owned(given)
        self._is_free[given] = True
        self._free[self._num_free : self._num_free + given.size] = given
        self._num_free += given.size

    def _check_owned(self, ids: np.ndarray) -> None:
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest <= SCRATCH_SLOT or highest > self.num_slots:
            raise PoolError(
                f"Sub-pool {self.name!r}: slots {lowest} to {highest} freed, but requests own only 1 to "
                f"{self.num_slots}; slot {SCRATCH_SLOT} is scratch."
            )
        free_already = ids[self._is_free[ids]]
        if free_already.size:
            raise PoolError(f"Sub-pool {self.name!r}: slot {int(free_already[0])} is free already.")
        if np.unique(ids).size != ids.size:
            raise PoolError(f"Sub-pool {self.name!r}: a slot is named twice in one free: {ids.tolist()}.")


class KVSlotAllocator:
    """Virtual slots for requests, each backed by a physical slot in every sub-pool.

    In the full-attention sub-pool the physical slot has the virtual one's number. In others it may
    be given back early (`release`), when the token has left the window.

    Args:
        num_slots: Slots of every sub-pool by name; ``full`` among them.

    Raises:
        ConfigError: There is no sub-pool ``full``, which the virtual slots are numbered by.
    """

    def __init__(self, num_slots: Mapping[str, int]) -> None:
        if FULL_POOL not in num_slots:
            raise ConfigError(
                f"Virtual slots are numbered by the sub-pool {FULL_POOL!r}, and there are only "
                f"{sorted(num_slots)}."
            )
        self._full = SlotAllocator(num_slots[FULL_POOL])
        self._others = {
            name: SlotAllocator(count, name=name) for name, count in num_slots.items() if name != FULL_POOL
        }
        self._physical = {
            name: torch.zeros(num_slots[FULL_POOL] + 1, dtype=torch.int64) for name in self._others
        }

    @classmethod
    def of_pool(cls, pool: KVPool) -> KVSlotAllocator:
        """Returns an allocator for all slots of a pool."""
        return cls({name: sub_pool.num_slots for name, sub_pool in pool.sub_pools.items()})

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the sub-pools, ``full`` first."""
        return (FULL_POOL, *self._others)

    def num_free(self, pool: str = FULL_POOL) -> int:
        """Returns how many physical slots of a sub-pool nobody owns."""
        return self._allocator(pool).num_free

    def can_allocate(self, num_slots: int) -> bool:
        """Whether every sub-pool has that many free slots."""
        return all(self._allocator(pool).can_allocate(num_slots) for pool in self.pools)

    def allocate(self, num_slots: int) -> VirtualSlots:
        """Takes slots, each backed in every sub-pool.

        Raises:
            PoolError: A sub-pool has not so many; none was taken in any.
        """
        for pool in self.pools:
            if not self._allocator(pool).can_allocate(num_slots):
                self._allocator(pool).allocate(num_slots)  # Raises, and names the sub-pool.
        ids = self._full.allocate(num_slots)
        for pool, allocator in self._others.items():
            self._physical[pool][ids] = allocator.allocate(num_slots)
        return VirtualSlots(ids)

    def free(self, slots: VirtualSlots) -> None:
        """Gives slots back in every sub-pool.

        Raises:
            PoolError: As in `SlotAllocator.free`; none was freed in any sub-pool.
        """
        self._full.free(slots.ids)
        for pool in self._others:
            self._release_in(pool, slots.ids)

    def release(self, slots: VirtualSlots, *, pool: str) -> int:
        """Gives back the physical slots of one sub-pool alone: the tokens left its window.

        Returns:
            How many were given back; slots that had been released before do not count.

        Raises:
            PoolError: The sub-pool is ``full`` or unknown: its tokens are read until the request ends.
        """
        if pool not in self._others:
            raise PoolError(f"Only {sorted(self._others)} can be released early, not {pool!r}.")
        return self._release_in(pool, slots.ids)

    def _release_in(self, pool: str, ids: torch.Tensor) -> int:
        table = self._physical[pool]
        physical = table[ids]
        physical = physical[physical != SCRATCH_SLOT]
        self._others[pool].free(physical)
        table[ids] = SCRATCH_SLOT
        return physical.numel()

    def translate(self, slots: VirtualSlots, *, pool: str) -> torch.Tensor:
        """Returns the physical slots in a sub-pool (int64[T], host), fresh; scratch where released."""
        if pool == FULL_POOL:
            return slots.ids.clone()
        return self._physical[pool][slots.ids]

    def _allocator(self, pool: str) -> SlotAllocator:
        return self._full if pool == FULL_POOL else self._others[pool]
