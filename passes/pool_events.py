"""The allocations and frees of a graph pool in their order, in bytes that follow the symbolic sizes of a trace.

Made by running a piece on fake tensors while storages are watched: one that is new is an allocation, and one whose
last tensor is gone is a free. Views and in-place writes make no storage. This module must not know of marks, or of
what calls a piece.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import sympy
import torch
from torch.fx import GraphModule, Node

from sgl_piecewise.runtime import torch_private, torch_private_compiling, tree

from .fused_run import Operation, becomes_loop, fused_steps
from .run_on_fakes import run_on_fakes
from .symbolic_bytes import rounded_bytes


class PoolEvent(NamedTuple):
    """One allocation or free.

    Attributes:
        block: Which block; a number that is its own in a list of events.
        num_bytes: Sympy expression of its bytes, rounded as an allocator rounds; None frees it.
        is_staging: Whether it is where a break's result waits for the graph that copies it, which only pools
            have whose graphs copy.
        is_inside_piece: Whether it is for a value that no piece hands on.
    """

    block: int
    num_bytes: Any = None
    is_staging: bool = False
    is_inside_piece: bool = False


class LayerCall(NamedTuple):
    """The call of a shared layer, whose own events are those of another trace.

    Attributes:
        name: The layer's class.
        results: One allocation per fresh result.
    """

    name: str
    results: tuple[PoolEvent, ...]


class PieceOutput(NamedTuple):
    """Where one output of a piece lies.

    Attributes:
        kind: ``fresh`` (a block of the piece's events), ``input``, or ``outside`` the pool.
        number: Which block, or which input.
    """

    kind: Literal["fresh", "input", "outside"]
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class PieceRun:
    """What one run of a piece does to the pool.

    Attributes:
        events: In order; blocks of outputs are not freed.
        num_bytes: Bytes of every block.
        outputs: One entry per output.
        operations: What it ran.
    """

    events: tuple[PoolEvent, ...]
    num_bytes: tuple[Any, ...]
    outputs: tuple[PieceOutput, ...]
    operations: tuple[Operation, ...]

    @property
    def levels(self) -> tuple[Any, ...]:
        """Bytes allocated after each allocation, each sum once."""
        return tuple(levels_of(self.events))

    @property
    def output_bytes(self) -> Any:
        """Bytes of the fresh outputs together."""
        blocks = dict.fromkeys(one.number for one in self.outputs if one.kind == "fresh")
        return sum((self.num_bytes[block] for block in blocks), sympy.Integer(0))

    @functools.cached_property
    def fused(self) -> PieceRun:
        """The same as a compiler that fuses would run it."""
        fresh = [one.number for one in self.outputs if one.kind == "fresh"]
        events: list[PoolEvent] = []
        memory: dict[int, int] = {}
        for step in fused_steps(self.operations, fresh, self.num_bytes):
            if step.is_free:
                events.append(PoolEvent(memory[step.block]))
            elif step.takes is None:
                memory[step.block] = step.block
                events.append(PoolEvent(step.block, self.num_bytes[step.block]))
            else:
                memory[step.block] = memory[step.takes]
        outputs = (
            one._replace(number=memory[one.number]) if one.kind == "fresh" else one for one in self.outputs
        )
        return dataclasses.replace(self, events=tuple(events), outputs=tuple(outputs))


def without_layers(events: Iterable[PoolEvent | LayerCall]) -> Iterator[PoolEvent]:
    """Yields events with no more of a layer than its results."""
    for event in events:
        if isinstance(event, LayerCall):
            yield from event.results
        else:
            yield event


def levels_of(events: Iterable[PoolEvent]) -> dict[Any, None]:
    """Returns what is allocated after each allocation, without staging, each sum once, in order."""
    total: Any = sympy.Integer(0)
    live: dict[int, Any] = {}
    levels: dict[Any, None] = {}
    for event in events:
        if event.is_staging:
            continue
        if event.num_bytes is None:
            total = total - live.pop(event.block)
        else:
            live[event.block] = event.num_bytes
            total = total + event.num_bytes
            levels[total] = None
    return levels


def run_piece(piece: GraphModule, values: Sequence[Any], device: str) -> PieceRun:
    """Runs a piece on fake tensors and follows its storages.

    Args:
        piece: The piece.
        values: What it is called with in the trace.
        device: The type of the device whose memory counts.
    """
    examples = torch_private_compiling.example_inputs(values)
    watch = _Storages(tensors_of(examples), device)

    def observe(node: Node, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        reads = watch.blocks_of((args, kwargs))
        made = watch.add(result)
        if made or func._schema.is_mutable:  # Others are views, which nothing is computed for.
            watch.operations.append(Operation(reads, made, becomes_loop(func)))

    results = run_on_fakes(piece, examples, observe)
    watch.sweep()
    inputs = {
        torch_private.storage_key(one): index
        for index, one in enumerate(examples)
        if isinstance(one, torch.Tensor) and one.layout is torch.strided
    }
    outputs = []
    for one in results:
        if not isinstance(one, torch.Tensor) or one.layout is not torch.strided or one.device.type != device:
            outputs.append(PieceOutput("outside"))
            continue
        key = torch_private.storage_key(one)
        if key in inputs:
            outputs.append(PieceOutput("input", inputs[key]))
        else:
            block = watch.block_of(one)
            outputs.append(PieceOutput("outside") if block is None else PieceOutput("fresh", block))
    return PieceRun(
        events=tuple(watch.events),
        num_bytes=tuple(watch.num_bytes),
        outputs=tuple(outputs),
        operations=tuple(watch.operations),
    )


class _Storages:
    """Follows the storages of a device while a piece runs."""

    def __init__(self, given: Iterable[torch.Tensor], device: str) -> None:
        self._given = {torch_private.storage_key(one) for one in given}
        self._device = device
        self._live: dict[int, tuple[Any, int]] = {}
        self.events: list[PoolEvent] = []
        self.num_bytes: list[Any] = []
        self.operations: list[Operation] = []

    def add(self, result: Any) -> tuple[int, ...]:
        """Takes note of the storages of an operator's result that are new; returns their blocks."""
        self.sweep()
        made = []
        for tensor in tensors_of(result):
            key = torch_private.storage_key(tensor)
            if tensor.device.type != self._device or key in self._given or key in self._live:
                continue
            block = len(self.num_bytes)
            self.num_bytes.append(rounded_bytes(tensor.untyped_storage().nbytes()))
            self._live[key] = (torch_private.storage_weak_ref(tensor), block)
            self.events.append(PoolEvent(block, self.num_bytes[block]))
            made.append(block)
        return tuple(made)

    def blocks_of(self, value: Any) -> tuple[int, ...]:
        """Returns the blocks of tensors in a value, without those that the piece was given."""
        found = (self.block_of(tensor) for tensor in tensors_of(value))
        return tuple(dict.fromkeys(block for block in found if block is not None))

    def sweep(self) -> None:
        """Takes note of the storages that died."""
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            self.events.append(PoolEvent(self._live.pop(key)[1]))

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the block of a live tensor; None for one that no operator made."""
        found = self._live.get(torch_private.storage_key(tensor))
        return None if found is None else found[1]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the dense tensors in a value."""
    leaves = tree.flatten(value)[0]
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.layout is torch.strided]
