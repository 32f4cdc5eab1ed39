"""PyTorch's CUDA caching allocator in numbers: what a graph pool reserves for a sequence of allocations.

The rules, for one stream and default settings (without expandable segments): sizes are rounded up to 512 bytes;
up to 1 MiB come from segments of 2 MiB, less than 10 MiB from segments of 20 MiB, and larger ones get a segment of
their own in steps of 2 MiB; the smallest free block that fits is taken, and split if enough of it is left (512
bytes of a small segment, more than 1 MiB of another); a free block grows together with free neighbours of its
segment, and never across segments.

Source: PyTorch 2.11, ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h``. Of free blocks of
one size the allocator takes the one at the lowest address, and the driver chooses where segments lie. Assumed here:
each new segment lies below all older ones. So what three models reserved on an H200 comes out to the byte, and with
new segments above it does not (``docs/results/2026-11-30-h200-compile-*.json``).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from .pool_model import PoolModel

_MIB = 1 << 20
_BLOCK_BYTES = 512
_SMALL_BYTES = _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB
_OWN_SEGMENT_BYTES = 10 * _MIB
_OWN_SEGMENT_STEP_BYTES = 2 * _MIB

_FreeKey = tuple[int, int, int]


@dataclass(eq=False)
class _Block:
    """A part of a segment; a newer segment has a lower number, as it lies lower."""

    segment: int
    offset: int
    num_bytes: int
    is_small: bool
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> _FreeKey:
        """Orders free blocks by what is taken first."""
        return self.num_bytes, self.segment, self.offset


@dataclass
class _FreeBlocks:
    """The free blocks of small segments, or of the others."""

    keys: list[_FreeKey] = field(default_factory=list)
    blocks: dict[_FreeKey, _Block] = field(default_factory=dict)

    def add(self, block: _Block) -> None:
        bisect.insort(self.keys, block.key)
        self.blocks[block.key] = block

    def remove(self, block: _Block) -> None:
        del self.keys[bisect.bisect_left(self.keys, block.key)]
        del self.blocks[block.key]

    def best_for(self, num_bytes: int) -> _Block | None:
        index = bisect.bisect_left(self.keys, num_bytes, key=lambda key: key[0])
        return self.blocks[self.keys[index]] if index < len(self.keys) else None


class CudaPoolModel(PoolModel):
    """A graph pool of PyTorch's caching allocator; see the module."""

    def __init__(self, *, edits_graphs: bool) -> None:
        super().__init__(edits_graphs=edits_graphs)
        self._free = {True: _FreeBlocks(), False: _FreeBlocks()}
        self._taken: list[_Block] = []
        self._segments: list[int] = []

    @property
    def reserved_bytes(self) -> int:
        return sum(self._segments)

    @property
    def segment_bytes(self) -> tuple[int, ...]:
        """Size of every segment, in the order they were taken."""
        return tuple(self._segments)

    def allocate(self, num_bytes: int) -> int:
        rounded = -(-max(num_bytes, 1) // _BLOCK_BYTES) * _BLOCK_BYTES
        is_small = rounded <= _SMALL_BYTES
        free = self._free[is_small]
        block = free.best_for(rounded)
        if block is None:
            block = self._new_segment(rounded, is_small)
        else:
            free.remove(block)
        left_bytes = block.num_bytes - rounded
        if left_bytes >= _BLOCK_BYTES if is_small else left_bytes > _SMALL_BYTES:
            self._split(block, rounded)
        block.is_free = False
        self._taken.append(block)
        return len(self._taken) - 1

    def free(self, block: int) -> None:
        one = self._taken[block]
        free = self._free[one.is_small]
        if one.after is not None and one.after.is_free:
            free.remove(one.after)
            _join(one, one.after)
        if one.before is not None and one.before.is_free:
            free.remove(one.before)
            one = _join(one.before, one)
        one.is_free = True
        free.add(one)

    def _new_segment(self, num_bytes: int, is_small: bool) -> _Block:
        if is_small:
            size = _SMALL_SEGMENT_BYTES
        elif num_bytes < _OWN_SEGMENT_BYTES:
            size = _LARGE_SEGMENT_BYTES
        else:
            size = -(-num_bytes // _OWN_SEGMENT_STEP_BYTES) * _OWN_SEGMENT_STEP_BYTES
        self._segments.append(size)
        return _Block(segment=-len(self._segments), offset=0, num_bytes=size, is_small=is_small)

    def _split(self, block: _Block, num_bytes: int) -> None:
        """Cuts a block down to its first bytes; the rest is free."""
        rest = _Block(
            segment=block.segment,
            offset=block.offset + num_bytes,
            num_bytes=block.num_bytes - num_bytes,
            is_small=block.is_small,
            before=block,
            after=block.after,
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.num_bytes = rest, num_bytes
        self._free[block.is_small].add(rest)


def _join(first: _Block, second: _Block) -> _Block:
    """Makes one block of two neighbours."""
    first.num_bytes += second.num_bytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
