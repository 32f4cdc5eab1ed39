"""Slots as the scheduler counts them, and as a pool's buffers are indexed: two types, never mixed.

A token of a request owns one *virtual* slot. Where its keys and values lie in the buffers of one
sub-pool is a *physical* slot. In the full-attention sub-pool the two numbers are equal; in a
sliding-window sub-pool, which is smaller, they are not. Slot 0 of every sub-pool is scratch:
padding writes there, nobody reads it, no request owns it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCRATCH_SLOT = 0

FULL_POOL = "full"
"""Name of the sub-pool of full-attention layers."""

WINDOW_POOL = "window"
"""Name of the sub-pool of sliding-window layers."""


@dataclass(frozen=True, eq=False)
class VirtualSlots:
    """Slots of the scheduler's book-keeping.

    Attributes:
        ids: Int64[T], on the host.
    """

    ids: torch.Tensor

    def __len__(self) -> int:
        return self.ids.numel()


@dataclass(frozen=True, eq=False)
class PhysicalSlots:
    """Slots along dimension `S` of one sub-pool's buffers.

    Attributes:
        pool: Name of the sub-pool.
        ids: Int64[T], on the sub-pool's device.
    """

    pool: str
    ids: torch.Tensor

    def __len__(self) -> int:
        return self.ids.numel()
