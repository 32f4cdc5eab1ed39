"""Which parts of the emulated device's pool are free: first fit, neighbours joined, growth at the top.

Addresses only: the arena uses it for its memory, and the pool's model for none.
"""

from __future__ import annotations

import bisect


class FreeRanges:
    """The free ranges below a top that only grows; a range belongs to the stream that gave it.

    Args:
        base: Where the memory begins.

    Attributes:
        base: The same.
        top: Where it ends so far.
    """

    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.top = base
        self._free: dict[int, list[tuple[int, int]]] = {}

    def take(self, num_bytes: int, stream: int) -> int | None:
        """Takes the first free range of a stream that fits, and returns its address; None if none does."""
        ranges = self._free.get(stream, [])
        for index, (address, size) in enumerate(ranges):
            if size >= num_bytes:
                if size == num_bytes:
                    del ranges[index]
                else:
                    ranges[index] = (address + num_bytes, size - num_bytes)
                return address
        return None

    def next_start(self, stream: int) -> int:
        """Returns where a range would begin that `grow` takes: the stream's free range below the top is part of it."""
        ranges = self._free.get(stream, [])
        return ranges[-1][0] if ranges and sum(ranges[-1]) == self.top else self.top

    def grow(self, num_bytes: int, stream: int) -> int:
        """Takes a range that ends above the top so far, and returns its address."""
        start = self.next_start(stream)
        if start != self.top:
            self._free[stream].pop()
        self.top = start + num_bytes
        return start

    def give(self, address: int, num_bytes: int, stream: int) -> None:
        """Makes a range free for a stream, joined with its free neighbours."""
        ranges = self._free.setdefault(stream, [])
        start, end = address, address + num_bytes
        index = bisect.bisect(ranges, (start, 0))
        if index < len(ranges) and ranges[index][0] == end:
            end += ranges.pop(index)[1]
        if index and sum(ranges[index - 1]) == start:
            index -= 1
            start = ranges.pop(index)[0]
        ranges.insert(index, (start, end - start))
