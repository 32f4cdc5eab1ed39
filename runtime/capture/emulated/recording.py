"""What a recording holds while it is made: its operations, and what undoes their side effects.

Operations refer to pool memory by address only (non-owning aliases), as kernels in a CUDA graph
do; the graph keeps the arena mapped. Memory outside the pool is held, so a stale pointer gives
stale values instead of a crash. This module must not know of dispatch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import torch_private
from ...errors import CaptureError, ReplayError
from . import arena as arena_module
from .arena import Arena, Block
from .streams import CAPTURE_STREAM, StreamOrder
from .undo import GeneratorUndo, MemoryUndo

_EPOCHS = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One recorded operation.

    Attributes:
        name: Its name for reports, or None for what only the emulation does (poison).
        run: Executes it.
    """

    name: str | None
    run: Callable[[], None]


@dataclass(kw_only=True)
class Recording:
    """A recording in the making.

    Attributes:
        arena: The pool's memory.
        order: The waits between streams.
        operations: In the order in which they were issued.
        memory: Undoes writes to memory from before.
        generators: Undoes draws.
        epoch: Serial number; blocks allocated here carry it.
        freed: Blocks that died and are not poisoned yet, by stream.
        kept: Blocks that died and must not be handed out before the graph's end.
        shared: Addresses of blocks that another stream uses too (``Tensor.record_stream``).
        error: What invalidated the recording, if something did.
    """

    arena: Arena
    order: StreamOrder
    operations: list[Operation] = field(default_factory=list)
    memory: MemoryUndo = field(default_factory=MemoryUndo)
    generators: GeneratorUndo = field(default_factory=GeneratorUndo)
    epoch: int = field(default_factory=_EPOCHS.__next__)
    freed: dict[int, list[Block]] = field(default_factory=dict)
    kept: list[Block] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)
    error: CaptureError | None = None

    def invalidate(self, error: CaptureError) -> CaptureError:
        """Notes what makes this recording worthless, even if captured code swallows the error."""
        self.error = self.error or error
        return error

    def add(
        self, name: str | None, run: Callable[[], None], stream: int, *, draws_random: bool = False
    ) -> None:
        """Appends an operation."""
        self.order.place(stream, draws_random=draws_random)
        self.operations.append(Operation(name=name, run=run))

    def add_free(self, block: Block) -> None:
        """Takes note that a block died: from here on its contents are undefined.

        With one stream it is poisoned at once. With several, another stream may still be reading
        it; as on CUDA that is safe until the block's own stream allocates again.
        """
        if block.address in self.shared:
            self.kept.append(block)
        elif self.order.has_forks() or not self.order.is_member(block.stream):
            self.freed.setdefault(block.stream, []).append(block)
        else:
            self.add_poison(block, block.stream)

    def poison_freed(self, stream: int) -> None:
        """Poisons what the stream has freed; it is about to allocate."""
        for block in self.freed.pop(stream, ()):
            self.add_poison(block, stream)

    def add_poison(self, block: Block, stream: int) -> None:
        """Poisons a block, now and in every replay."""
        if block.epoch != self.epoch:
            # An earlier graph filled it, and the launch of this one may read it before the block dies.
            self.memory.save_bytes(block.address, block.num_bytes)
        self.add_poison_range(block.address, block.num_bytes, block.is_bool, stream)

    def add_poison_range(self, address: int, num_bytes: int, is_bool: bool, stream: int) -> None:
        """As `add_poison`, for any aligned part of the arena."""

        def run() -> None:
            arena_module.poison_range(address, num_bytes, is_bool)

        run()
        self.add(None, run, stream)

    def share(self, tensor: torch.Tensor, stream: int) -> None:
        """Notes that ``stream`` uses a block of another stream: it is not free before the graph's end."""
        block = self.arena.live_block(tensor.untyped_storage().data_ptr())
        if block is not None and block.stream != stream:
            self.shared.add(block.address)

    def save(self, tensor: torch.Tensor) -> None:
        """Keeps what the tensor's storage holds before a write, unless it was made in this recording."""
        storage = tensor.untyped_storage()
        block = self.arena.live_block(storage.data_ptr())
        if block is None or block.epoch != self.epoch:
            self.memory.save(storage)

    def join(self) -> list[int]:
        """Joins all streams at the graph's end, when blocks used by several of them become free.

        Returns:
            The streams that captured code had forked and not joined.
        """
        unjoined = self.order.join_all()
        for blocks in self.freed.values():
            for block in blocks:
                self.add_poison(block, CAPTURE_STREAM)
        for block in self.kept:
            self.add_poison(block, CAPTURE_STREAM)
            self.arena.give_free(block)
        self.freed.clear()
        self.kept.clear()
        return unjoined

    def undo(self) -> None:
        """Makes memory and generators as if nothing had been executed."""
        # Poison first: a block of this recording may lie where an older one, restored after it, died.
        for block in self.arena.live_blocks():
            if block.epoch == self.epoch:
                arena_module.poison_range(block.address, block.num_bytes, block.is_bool)
        self.memory.restore()
        self.generators.restore()

    def alias(self, value: Any) -> Any:
        """Replaces the tensors in an argument by what the recording may keep of them."""
        if isinstance(value, torch.Tensor):
            if self.arena.contains(value.untyped_storage().data_ptr()):
                return torch_private.alias_without_owning(value)
            # The user may swap the storage or shape of this very object; the graph must not follow.
            return value.detach()
        if isinstance(value, list | tuple):
            return type(value)(self.alias(item) for item in value)
        return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Lists the tensors in an operator's argument or result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def replayed(
    name: str,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: list[tuple[int, torch.Tensor]],
) -> Callable[[], None]:
    """Returns what a replay runs for one operator.

    Args:
        name: For the error.
        call: The operator.
        args: Its arguments, as the recording keeps them.
        kwargs: Keyword arguments, likewise.
        targets: For each fresh storage of the result: which tensor of the result has it, and an
            alias over the block where captured code reads it.
    """
    if not targets:
        return lambda: call(*args, **kwargs)
    copies = [(index, alias.untyped_storage()) for index, alias in targets]

    def run() -> None:
        results = tensors_in(call(*args, **kwargs))
        for index, target in copies:
            source = results[index].untyped_storage()
            if source.nbytes() != target.nbytes():
                raise ReplayError(
                    f"{name} gave {source.nbytes()} bytes at replay and {target.nbytes()} at capture. Its "
                    "result depends on values, which a graph cannot hold; mark it with @eager_on_graph."
                )
            target.copy_(source)

    return run
