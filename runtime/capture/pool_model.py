"""What a graph pool would reserve, told without a device: the interface of a device's allocator in numbers.

A model takes the allocations and frees of a capture in their order and says how much memory the pool holds then.
The bytes that live at once are less: an allocator takes memory in larger parts, and a free block serves only
what fits it. This module must not know what allocates.
"""

from __future__ import annotations

import abc


class PoolModel(abc.ABC):
    """An imitation of the allocator behind one pool and its one capture stream.

    Args:
        edits_graphs: As the pool's. If so, a break's result waits in pool memory for the graph that copies it.

    Attributes:
        edits_graphs: The same.
        sees_compiled_code: Whether what a compiler's code allocates for itself comes from the pool.
    """

    sees_compiled_code = True

    def __init__(self, *, edits_graphs: bool) -> None:
        self.edits_graphs = edits_graphs

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> int:
        """Takes a block.

        Args:
            num_bytes: What a tensor's storage holds; at least one.

        Returns:
            A number for the block, to free it with.
        """

    @abc.abstractmethod
    def free(self, block: int) -> None:
        """Gives a block back to the pool, which keeps its memory."""

    @property
    @abc.abstractmethod
    def reserved_bytes(self) -> int:
        """What the pool has taken from the device so far."""
