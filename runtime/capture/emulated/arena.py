"""Pool memory of the emulated device: an address range that never moves and is never given back.

A block lives as long as the storage of the tensor made over it; when that storage dies the block
is free for later allocations of the same stream, as in CUDA's caching allocator. The one
invariant: a block is handed out again only after `Arena.drain` has reported it freed, so whoever
records can write the free down first. This module must not know what is being recorded.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from .ranges import FreeRanges

ALIGNMENT_BYTES = 512
_LARGEST_ARENA_BYTES = 64 << 30
_SMALLEST_ARENA_BYTES = 1 << 30
# Not in Python's mmap module before 3.13. Address space only; pages come with the first write.
_MAP_NORESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)
# The bytes FF FF FF 7F, little-endian: NaN in every floating type of 8 to 64 bits, and as int32 or
# int64 far out of range as an index. (All bytes FF would be -1, which is a valid index.)
_POISON = 0x7FFFFFFF


@dataclass(frozen=True, kw_only=True)
class Block:
    """A live or just freed piece of the arena.

    Attributes:
        address: First byte, aligned.
        num_bytes: Size, a multiple of the alignment.
        stream: The stream that allocated it; only that stream gets it again.
        is_bool: Whether booleans lie in it, which have no value that tells of poison.
        epoch: Serial number of the recording it was allocated in, 0 for none.
    """

    address: int
    num_bytes: int
    stream: int
    is_bool: bool
    epoch: int


def rounded_bytes(num_bytes: int) -> int:
    """Returns the size of the block that serves ``num_bytes``."""
    return -(-max(num_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def poison_range(address: int, num_bytes: int, is_bool: bool) -> None:
    """Fills aligned memory with what a read of undefined memory should give."""
    if is_bool:
        ctypes.memset(address, 1, num_bytes)
        return
    memory = (ctypes.c_char * num_bytes).from_address(address)
    torch.frombuffer(memory, dtype=torch.int32).fill_(_POISON)


def holds_poison(tensor: torch.Tensor) -> bool:
    """Tells whether an int32 or int64 tensor has an element that was poisoned and not written since."""
    poison = _POISON if tensor.dtype is torch.int32 else _POISON << 32 | _POISON
    return bool((tensor == poison).any())


class Arena:
    """The memory of one pool.

    Args:
        reserve: Called with a number of bytes before the arena grows by them; raises
            ``torch.OutOfMemoryError`` to refuse.
    """

    def __init__(self, reserve: Callable[[int], None]) -> None:
        self._reserve = reserve
        self._memory, self.capacity_bytes = _map_memory()
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._ranges = FreeRanges(self.base)
        self._live: dict[int, Block] = {}
        # Filled by finalizers, which run at any point of any thread: appending takes no lock.
        self._died: collections.deque[Block] = collections.deque()
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """The most that was ever in use, fragmentation included."""
        return self._ranges.top - self.base

    @property
    def allocated_bytes(self) -> int:
        """What live tensors hold, rounded up to the alignment."""
        with self._lock:
            died = sum(block.num_bytes for block in list(self._died))
            return sum(block.num_bytes for block in self._live.values()) - died

    def contains(self, address: int) -> bool:
        """Tells whether an address lies in this arena."""
        return self.base <= address < self.base + self.capacity_bytes

    def live_block(self, address: int) -> Block | None:
        """Returns the live block that starts at ``address``, or None."""
        return self._live.get(address)

    def live_blocks(self) -> list[Block]:
        """Returns the live blocks in order of allocation."""
        return list(self._live.values())

    def allocate(
        self, num_bytes: int, *, stream: int, is_bool: bool = False, epoch: int = 0
    ) -> torch.UntypedStorage:
        """Takes a block and returns the storage that owns it.

        Args:
            num_bytes: Size of the storage; the block is rounded up.
            stream: The stream that allocates.
            is_bool: Whether booleans will lie in it.
            epoch: Serial number of the recording, 0 for none.

        Raises:
            torch.OutOfMemoryError: Neither a free block nor growth can serve it.
        """
        rounded = rounded_bytes(num_bytes)
        with self._lock:
            address = self._ranges.take(rounded, stream)
            if address is None:
                address = self._grow(rounded, stream)
            block = Block(address=address, num_bytes=rounded, stream=stream, is_bool=is_bool, epoch=epoch)
            self._live[address] = block
        # The buffer holds the mapping, so a tensor may outlive pool and graphs.
        buffer = (ctypes.c_char * num_bytes).from_buffer(self._memory, address - self.base)
        weakref.finalize(buffer, self._died.append, block).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()

    def drain(self, keep: Collection[int] = ()) -> list[Block]:
        """Makes the blocks whose storages died free again.

        Args:
            keep: Addresses of blocks that must not be handed out yet; `give_free` them later.

        Returns:
            All blocks that died since the last call, oldest first.
        """
        if not self._died:
            return []
        blocks = []
        with self._lock:
            while self._died:
                block = self._died.popleft()
                del self._live[block.address]
                if block.address not in keep:
                    self._give_free(block)
                blocks.append(block)
        return blocks

    def give_free(self, block: Block) -> None:
        """Lets a block be handed out that `drain` kept."""
        with self._lock:
            self._give_free(block)

    def _grow(self, num_bytes: int, stream: int) -> int:
        """Takes memory above all that was used, together with the stream's free range next to it."""
        end = self._ranges.next_start(stream) + num_bytes
        if end > self.base + self.capacity_bytes:
            raise torch.OutOfMemoryError(
                f"Emulated graph pool: {num_bytes} bytes asked for, {self.reserved_bytes} of "
                f"{self.capacity_bytes} bytes of address space are used. Capture fewer or smaller sizes."
            )
        self._reserve(end - self._ranges.top)
        return self._ranges.grow(num_bytes, stream)

    def _give_free(self, block: Block) -> None:
        self._ranges.give(block.address, block.num_bytes, block.stream)


def _map_memory() -> tuple[mmap.mmap, int]:
    """Maps as much address space as the system allows, up to the largest useful size."""
    num_bytes = _LARGEST_ARENA_BYTES
    while True:
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            return mmap.mmap(-1, num_bytes, flags=flags), num_bytes
        except OSError as err:
            if num_bytes <= _SMALLEST_ARENA_BYTES:
                raise torch.OutOfMemoryError(
                    f"Emulated graph pool: the system refuses {num_bytes} bytes of address space ({err}). "
                    "Raise `ulimit -v`, or drop pools that are not used any more."
                ) from err
            num_bytes //= 2
