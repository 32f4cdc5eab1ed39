"""Estimates what a split forward needs of a graph pool, symbolically in the sizes of the trace.

Each distinct piece runs once on fake tensors while storages are watched: when one is made it counts, rounded
as an allocator rounds, and when the last tensor over it is gone it does not any more. Views and in-place writes
make no storage, so they count once. Between pieces the same is done with what they hand on and with the results
of marked calls, which become boundary buffers. Inputs, parameters and static buffers lie outside the pool.

Not counted: what a kernel allocates for itself, memory lost between blocks, and a compiler's choices: Inductor
fuses values away and reuses buffers, so its pieces need less.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sgl_piecewise.runtime import torch_private, torch_private_compiling, tree
from sgl_piecewise.runtime.mark_call_site import call_site
from sgl_piecewise.runtime.mark_operator import is_marked_call

from .run_on_fakes import run_on_fakes
from .split_at_marks import pieces_of
from .symbolic_bytes import SymbolicBytes, rounded_bytes

MEMORY = "sgl_piecewise_memory"
"""Key of the estimate in the ``meta`` of a module that went through `estimate_memory`."""


@dataclass(frozen=True, kw_only=True)
class PieceMemory:
    """What one distinct piece needs.

    Attributes:
        name: Its name in the split module.
        num_calls: How often the forward calls it.
        peak: Bytes beside its inputs when it needs most.
        outputs: Bytes of its fresh outputs.
    """

    name: str
    num_calls: int
    peak: SymbolicBytes
    outputs: SymbolicBytes


@dataclass(frozen=True, kw_only=True)
class BreakMemory:
    """What the results of one marked call need: its boundary buffers.

    Attributes:
        name: The mark's name.
        num_calls: How many calls with results of these sizes there are.
        results: Bytes of the results of one call.
    """

    name: str
    num_calls: int
    results: SymbolicBytes


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What a forward needs of a graph pool.

    Attributes:
        pieces: One entry per distinct piece.
        breaks: One entry per mark and size of results.
        peak: Bytes of the pool when it needs most, outputs included.
    """

    pieces: tuple[PieceMemory, ...]
    breaks: tuple[BreakMemory, ...]
    peak: SymbolicBytes

    def describe(self, num_tokens: int | Mapping[str, int]) -> str:
        """Returns the estimate at a token count as text, one line a piece and break."""
        lines = [f"pool {self.peak.at(num_tokens)} bytes at {num_tokens} tokens"]
        lines += [
            f"  {one.name} x{one.num_calls}: peak {one.peak.at(num_tokens)}, outputs {one.outputs.at(num_tokens)}"
            for one in self.pieces
        ]
        lines += [
            f"  break {one.name} x{one.num_calls}: results {one.results.at(num_tokens)}"
            for one in self.breaks
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        symbols = ", ".join(map(str, self.peak.symbols)) or "no symbolic size"
        lines = [f"pool (bytes, in {symbols}): {self.peak}"]
        lines += [
            f"{one.name} x{one.num_calls}: peak {one.peak}; outputs {one.outputs}" for one in self.pieces
        ]
        lines += [f"break {one.name} x{one.num_calls}: results {one.results}" for one in self.breaks]
        return "\n".join(lines)


def estimate_memory(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Estimates the memory of a split forward.

    Args:
        gm: A split module; only its ``meta`` changes.
        example_inputs: Not used: every node carries its own example.

    Returns:
        The same module, with a `MemoryEstimate` in ``gm.meta[MEMORY]``.
    """
    gm.meta[MEMORY] = _Forward(gm).estimate()
    return gm


@dataclass(frozen=True, eq=False)
class _Storage:
    """One allocation of the pool; which one it is matters, not what it is like."""

    num_bytes: Any


_OUTSIDE = _Storage(sympy.Integer(0))


@dataclass(frozen=True, kw_only=True)
class _PieceRun:
    """What a run of a piece told.

    Attributes:
        levels: Bytes allocated, after each allocation.
        outputs: For each output its storage: the index of an input that it lies in, or a group of fresh ones
            and their bytes.
    """

    levels: tuple[Any, ...]
    outputs: tuple[tuple[str, int, Any], ...]


class _Storages:
    """The storages that live while a piece runs."""

    def __init__(self, given: Iterable[torch.Tensor], device: str) -> None:
        self._given = {torch_private.storage_key(one) for one in given}
        self._device = device
        self._live: dict[int, tuple[Any, Any]] = {}
        self.total: Any = sympy.Integer(0)
        self.levels: list[Any] = []

    def add(self, result: Any) -> None:
        """Counts the storages of an operator's result that are new."""
        self.sweep()
        is_new = False
        for tensor in _tensors(result):
            key = torch_private.storage_key(tensor)
            if tensor.device.type != self._device or key in self._given or key in self._live:
                continue
            num_bytes = rounded_bytes(tensor.untyped_storage().nbytes())
            self._live[key] = (torch_private.storage_weak_ref(tensor), num_bytes)
            self.total = self.total + num_bytes
            is_new = True
        if is_new:
            self.levels.append(self.total)

    def sweep(self) -> None:
        """Takes out the storages that died."""
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            self.total = self.total - self._live.pop(key)[1]


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = tree.flatten(value)[0]
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.layout is torch.strided]


def _run_piece(piece: GraphModule, values: Sequence[Any], device: str) -> _PieceRun:
    examples = torch_private_compiling.example_inputs(values)
    storages = _Storages(_tensors(examples), device)
    results = run_on_fakes(piece, examples, lambda node, func, args, kwargs, result: storages.add(result))
    inputs = {
        torch_private.storage_key(one): index
        for index, one in enumerate(examples)
        if isinstance(one, torch.Tensor) and one.layout is torch.strided
    }
    outputs: list[tuple[str, int, Any]] = []
    groups: dict[int, int] = {}
    for one in results:
        if not isinstance(one, torch.Tensor) or one.layout is not torch.strided or one.device.type != device:
            outputs.append(("outside", 0, None))
            continue
        key = torch_private.storage_key(one)
        if key in inputs:
            outputs.append(("input", inputs[key], None))
        else:
            group = groups.setdefault(key, len(groups))
            outputs.append(("fresh", group, rounded_bytes(one.untyped_storage().nbytes())))
    return _PieceRun(levels=tuple(dict.fromkeys(storages.levels)), outputs=tuple(outputs))


@dataclass
class _Forward:
    """Follows what lives between the pieces of a split forward."""

    gm: GraphModule
    storages: dict[Node, tuple[_Storage, ...]] = field(default_factory=dict)
    levels: dict[Any, None] = field(default_factory=dict)
    runs: dict[str, _PieceRun] = field(default_factory=dict)
    breaks: Counter[tuple[str, Any]] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def estimate(self) -> MemoryEstimate:
        self.device = _device_of(self.gm)
        pieces = pieces_of(self.gm)
        last_uses = self._last_uses()
        alive: dict[Node, tuple[_Storage, ...]] = {}
        for node in self.gm.graph.nodes:
            if node.op == "call_module":
                self._call_piece(node, pieces[str(node.target)], _total(alive.values()))
            elif is_marked_call(node.target):
                self._call_mark(node)
            elif node.target is operator.getitem and node.args[0] in self.storages:
                container, index = node.args
                of_all = self.storages[container]
                self.storages[node] = (of_all[index],) if isinstance(index, int) else of_all
            else:
                self.storages[node] = (_OUTSIDE,)
            if any(one is not _OUTSIDE for one in self.storages[node]):
                alive[node] = self.storages[node]
                self.levels[_total(alive.values())] = None
            for used in last_uses.get(node, ()):
                alive.pop(used, None)
        return MemoryEstimate(
            pieces=tuple(self._piece_memory(name) for name in self.runs),
            breaks=tuple(
                BreakMemory(name=name, num_calls=count, results=SymbolicBytes.largest_of([num_bytes]))
                for (name, num_bytes), count in self.breaks.items()
            ),
            peak=SymbolicBytes.largest_of(self.levels),
        )

    def _last_uses(self) -> dict[Node, list[Node]]:
        """Returns for each node the values that nobody needs after it."""
        last: dict[Node, Node] = {}
        for node in self.gm.graph.nodes:
            last[node] = node
            for used in node.all_input_nodes:
                last[used] = node
        uses: dict[Node, list[Node]] = {}
        for used, node in last.items():
            uses.setdefault(node, []).append(used)
        return uses

    def _call_piece(self, node: Node, piece: GraphModule, live: Any) -> None:
        name = str(node.target)
        self.calls[name] += 1
        if name not in self.runs:
            values = [
                used.meta.get("example_value") if isinstance(used, Node) else used for used in node.args
            ]
            self.runs[name] = _run_piece(piece, values, self.device)
        run = self.runs[name]
        for level in run.levels:
            self.levels[live + level] = None
        fresh: dict[int, _Storage] = {}
        found = []
        for kind, index, num_bytes in run.outputs:
            if kind == "input":
                found.append(self.storages[node.args[index]][0])  # type: ignore[index]
            elif kind == "fresh":
                found.append(fresh.setdefault(index, _Storage(num_bytes)))
            else:
                found.append(_OUTSIDE)
        self.storages[node] = tuple(found)

    def _call_mark(self, node: Node) -> None:
        value = node.meta.get("example_value")
        results = [one for one in _tensors(value) if one.device.type == self.device]
        found = tuple(_Storage(rounded_bytes(one.untyped_storage().nbytes())) for one in results)
        self.storages[node] = found or (_OUTSIDE,)
        self.breaks[call_site(str(node.args[3])).name, _total([found])] += 1

    def _piece_memory(self, name: str) -> PieceMemory:
        run = self.runs[name]
        fresh = {index: num_bytes for kind, index, num_bytes in run.outputs if kind == "fresh"}
        return PieceMemory(
            name=name,
            num_calls=self.calls[name],
            peak=SymbolicBytes.largest_of(run.levels),
            outputs=SymbolicBytes.largest_of([sum(fresh.values())]),
        )


def _total(groups: Iterable[tuple[_Storage, ...]]) -> Any:
    """Adds up storages, each once."""
    found = {id(one): one for group in groups for one in group}
    return sum((one.num_bytes for one in found.values()), sympy.Integer(0))


def _device_of(gm: GraphModule) -> str:
    """Returns the type of the device that the forward computes on: an accelerator where it meets one."""
    for node in gm.graph.nodes:
        for one in _tensors(node.meta.get("example_value")):
            if one.device.type != "cpu":
                return str(one.device.type)
    return "cpu"
