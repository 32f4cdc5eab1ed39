"""What a compiler that fuses keeps of the values in a piece: predicted from its operators, without compiling.

Elementwise operators, reductions and gathers that depend on one another without a library call between them become
one kernel, and only what is read outside of it has memory. A result as large as an intermediate value that is read
for the last time takes its place. Kernels run when the first library call needs them. That is what Inductor does in
the main; it also looks at the shapes of loops, which is not imitated here, so this is an estimate and no bound.

This module must not know what a piece is made of, or whose memory is counted.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

# Beside what PyTorch tags as pointwise: operators that become loops, named as in ``torch.ops.aten``.
_LOOP_NAMES = """
_fused_rms_norm _log_softmax _softmax _to_copy all amax amin any arange argmax argmin cat clone constant_pad_nd copy
embedding empty empty_like expand_copy flip full full_like gather glu index index_select masked_fill mean
native_group_norm native_layer_norm new_empty new_full new_ones new_zeros ones ones_like prod repeat roll
select_scatter slice_scatter stack std sum tril triu var var_mean zeros zeros_like
"""
_LOOPS = frozenset(_LOOP_NAMES.split())


class Operation(NamedTuple):
    """One operator that a piece ran.

    Attributes:
        reads: Blocks that it reads, without the piece's inputs.
        makes: Blocks that it makes.
        is_loop: Whether it becomes a loop that can be fused.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    is_loop: bool


class Step(NamedTuple):
    """One allocation or free; ``takes`` is the block whose memory an allocated one takes over, if any."""

    block: int
    is_free: bool = False
    takes: int | None = None


def becomes_loop(func: Any) -> bool:
    """Tells whether an operator becomes a loop that a compiler fuses with others."""
    if getattr(func, "namespace", None) != "aten" or func._schema.is_mutable:
        return False
    return torch.Tag.pointwise in func.tags or func._schema.name.partition("::")[2] in _LOOPS


def fused_steps(
    operations: Sequence[Operation], outputs: Iterable[int], num_bytes: Sequence[Any]
) -> Iterator[Step]:
    """Yields the allocations and frees of a piece whose loops are fused.

    Args:
        operations: In the order that they ran.
        outputs: Blocks that the piece hands on, which are not freed.
        num_bytes: Of every block.
    """
    return _Schedule(operations, frozenset(outputs), num_bytes).steps()


@dataclass(eq=False)
class _Kernel:
    """A library call, or loops that are fused."""

    is_loop: bool
    last: int
    reads: set[int] = field(default_factory=set)
    makes: list[int] = field(default_factory=list)
    is_done: bool = False


class _Schedule:
    def __init__(
        self, operations: Sequence[Operation], outputs: frozenset[int], num_bytes: Sequence[Any]
    ) -> None:
        self._outputs = outputs
        self._num_bytes = num_bytes
        self._maker: dict[int, _Kernel] = {}
        kernels = list(dict.fromkeys(_kernels_of(operations)))
        for kernel in kernels:
            for block in kernel.makes:
                self._maker[block] = kernel
        readers: dict[int, list[_Kernel]] = collections.defaultdict(list)
        for kernel in kernels:
            kernel.reads -= set(kernel.makes)
            for block in kernel.reads:
                readers[block].append(kernel)
        # A value inside one kernel has no memory.
        for kernel in kernels:
            kernel.makes = [
                block for block in kernel.makes if not kernel.is_loop or block in outputs or readers[block]
            ]
        self._readers_left = {block: len(found) for block, found in readers.items()}
        # Library calls in their order; loops when they are needed, or when all of them would have run.
        self._kernels = sorted(kernels, key=lambda kernel: kernel.last)

    def steps(self) -> Iterator[Step]:
        for kernel in self._kernels:
            yield from self._run(kernel)

    def _run(self, kernel: _Kernel) -> Iterator[Step]:
        if kernel.is_done:
            return
        kernel.is_done = True
        for block in sorted(kernel.reads):
            yield from self._run(self._maker[block])
        for block in kernel.reads:
            self._readers_left[block] -= 1
        dead = [
            block
            for block in sorted(kernel.reads)
            if not self._readers_left[block] and block not in self._outputs
        ]
        for block in kernel.makes:
            taken = None
            if kernel.is_loop:
                taken = next((one for one in dead if self._num_bytes[one] == self._num_bytes[block]), None)
            if taken is not None:
                dead.remove(taken)
            yield Step(block, takes=taken)
        unread = [
            block
            for block in kernel.makes
            if not self._readers_left.get(block) and block not in self._outputs
        ]
        for block in (*dead, *unread):
            yield Step(block, is_free=True)


def _kernels_of(operations: Sequence[Operation]) -> list[_Kernel]:
    """Returns the kernel of each operation."""
    # How many library calls lie before a value, on the longest way: loops with a call between them differ in it.
    depth: dict[int, int] = {}
    loops_of: dict[int, _Kernel] = {}
    found: list[_Kernel] = []
    for position, operation in enumerate(operations):
        before = max((depth[block] for block in operation.reads), default=0)
        if operation.is_loop:
            joined = [
                loops_of[block] for block in operation.reads if block in loops_of and depth[block] == before
            ]
            kernel = joined[0] if joined else _Kernel(is_loop=True, last=position)
            for other in joined[1:]:
                if other is not kernel:
                    kernel.reads |= other.reads
                    kernel.makes += other.makes
                    found = [kernel if one is other else one for one in found]
                    loops_of = {block: kernel if one is other else one for block, one in loops_of.items()}
            kernel.last = position
        else:
            kernel = _Kernel(is_loop=False, last=position)
        kernel.reads.update(operation.reads)
        kernel.makes += operation.makes
        for block in operation.makes:
            depth[block] = before if operation.is_loop else before + 1
            if operation.is_loop:
                loops_of[block] = kernel
        found.append(kernel)
    return found
