"""Hooks on pool methods: what watches every KV write, recorded by graphs like the write itself."""

from __future__ import annotations

import torch

from ..kv.pool import KVPool
from ..kv.slots import PhysicalSlots
from .options import WriteHook


def install_write_hooks(pool: KVPool, hooks: tuple[WriteHook, ...]) -> None:
    """Makes hooks run before every write into a pool; call it before anything is captured."""
    if not hooks:
        return
    write = pool.set_kv

    def hooked(layer_id: int, slots: PhysicalSlots, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        for hook in hooks:
            hook(layer_id, slots, k_TKD, v_TKD)
        write(layer_id, slots, k_TKD, v_TKD)

    pool.set_kv = hooked  # type: ignore[method-assign]  # Backends look the method up at each write.


class WriteCanary:
    """Counts writes to every slot of a sub-pool, at a fixed address, so that replays count too.

    Args:
        pool: Name of the sub-pool.
        num_slots: Its slots, scratch not counted.
        device: Where the pool is.

    Attributes:
        counts: Writes so far, by slot (int64[S]).
    """

    def __init__(self, pool: str, num_slots: int, device: torch.device) -> None:
        self._pool = pool
        self.counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def __call__(self, layer_id: int, slots: PhysicalSlots, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        if slots.pool == self._pool:
            self.counts.index_add_(0, slots.ids, torch.ones_like(slots.ids))
