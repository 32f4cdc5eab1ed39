"""The emulated device's pool in numbers."""

from __future__ import annotations

from ..pool_model import PoolModel
from .arena import rounded_bytes
from .ranges import FreeRanges
from .streams import CAPTURE_STREAM


class EmulatedPoolModel(PoolModel):
    """Places blocks as an `Arena` does, by the same rules, without memory."""

    # A compiled piece is one operation to the recorder, and only its results move into the pool.
    sees_compiled_code = False

    def __init__(self, *, edits_graphs: bool) -> None:
        super().__init__(edits_graphs=edits_graphs)
        self._ranges = FreeRanges()
        self._blocks: list[tuple[int, int]] = []

    @property
    def reserved_bytes(self) -> int:
        return self._ranges.top - self._ranges.base

    def allocate(self, num_bytes: int) -> int:
        rounded = rounded_bytes(num_bytes)
        address = self._ranges.take(rounded, CAPTURE_STREAM)
        if address is None:
            address = self._ranges.grow(rounded, CAPTURE_STREAM)
        self._blocks.append((address, rounded))
        return len(self._blocks) - 1

    def free(self, block: int) -> None:
        self._ranges.give(*self._blocks[block], CAPTURE_STREAM)
