"""Estimates what a split forward needs of a graph pool, symbolically in the sizes of the trace.

Each distinct piece runs once on fake tensors while storages are watched. Between pieces the same is done with what
they hand on and with the results of marked calls, which become boundary buffers. All of it is kept as one list of
allocations and frees, in the order of a capture. A value lives until its last user has run, as in the code that
FX writes. Inputs, parameters and static buffers lie outside the pool.

The list is kept twice: for pieces that run as FX, and for pieces whose operators a compiler fuses. Not counted: what a
kernel allocates for itself (a library's workspace is there since the warm-up, which runs on the same stream outside
the pool).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
from torch.fx import GraphModule, Node

from sgl_piecewise.runtime.mark_call_site import call_site
from sgl_piecewise.runtime.mark_operator import is_marked_call

from .memory_estimate import BreakMemory, MemoryEstimate, PieceMemory
from .pool_events import LayerCall, PieceRun, PoolEvent, levels_of, run_piece, tensors_of, without_layers
from .split_at_marks import pieces_of
from .symbolic_bytes import SymbolicBytes, rounded_bytes

MEMORY = "sgl_piecewise_memory"
"""Key of the estimate in the ``meta`` of a module that went through `estimate_memory`."""

_OUTSIDE = -1


def estimate_memory(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Estimates the memory of a split forward.

    Args:
        gm: A split module; only its ``meta`` changes.
        example_inputs: Not used: every node carries its own example.

    Returns:
        The same module, with a `MemoryEstimate` in ``gm.meta[MEMORY]``.
    """
    plain = _Forward(gm)
    estimate = plain.estimate()
    fused = _Forward(gm, is_fused=True, runs=plain.runs)
    fused.follow()
    gm.meta[MEMORY] = replace(estimate, fused_events=tuple(fused.events), fused_outputs=fused.output_blocks())
    return gm


@dataclass
class _Forward:
    """Follows what lives between the pieces of a split forward.

    A value is known by the blocks that it lies in, `_OUTSIDE` for memory that is not the pool's.
    """

    gm: GraphModule
    is_fused: bool = False
    blocks: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    events: list[PoolEvent | LayerCall] = field(default_factory=list)
    num_blocks: int = 0
    runs: dict[str, PieceRun] = field(default_factory=dict)
    breaks: Counter[tuple[str, Any]] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def follow(self) -> None:
        """Writes the events of a run."""
        self.device = _device_of(self.gm)
        pieces = pieces_of(self.gm)
        last_uses = self._last_uses()
        alive: dict[Node, tuple[int, ...]] = {}
        for node in self.gm.graph.nodes:
            if node.op == "call_module":
                self._call_piece(node, pieces[str(node.target)])
            elif is_marked_call(node.target):
                self._call_mark(node)
            elif node.target is operator.getitem and node.args[0] in self.blocks:
                container, index = node.args
                of_all = self.blocks[container]
                self.blocks[node] = (of_all[index],) if isinstance(index, int) else of_all
            else:
                self.blocks[node] = (_OUTSIDE,)
            alive[node] = self.blocks[node]
            self._let_go(alive, last_uses.get(node, ()))

    def estimate(self) -> MemoryEstimate:
        """Follows a run and says what it needs."""
        self.follow()
        return MemoryEstimate(
            pieces=tuple(self._piece_memory(name) for name in self.runs),
            breaks=tuple(
                BreakMemory(name=name, num_calls=count, results=SymbolicBytes.largest_of([num_bytes]))
                for (name, num_bytes), count in self.breaks.items()
            ),
            peak=SymbolicBytes.largest_of(levels_of(without_layers(self.events))),
            events=tuple(self.events),
            outputs=self.output_blocks(),
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

    def _let_go(self, alive: dict[Node, tuple[int, ...]], nodes: Iterable[Node]) -> None:
        """Frees the blocks that only these values lie in."""
        gone = dict.fromkeys(block for node in nodes for block in alive.pop(node, ()))
        kept = {block for blocks in alive.values() for block in blocks}
        self.events += [PoolEvent(block) for block in gone if block != _OUTSIDE and block not in kept]

    def output_blocks(self) -> tuple[int, ...]:
        """Returns the blocks that the outputs lie in."""
        (output,) = (node for node in self.gm.graph.nodes if node.op == "output")
        blocks = dict.fromkeys(block for used in output.all_input_nodes for block in self.blocks[used])
        return tuple(block for block in blocks if block != _OUTSIDE)

    def _new_block(self, num_bytes: Any, *, is_staging: bool = False, is_inside_piece: bool = False) -> int:
        self.num_blocks += 1
        self.events.append(PoolEvent(self.num_blocks, num_bytes, is_staging, is_inside_piece))
        return self.num_blocks

    def _call_piece(self, node: Node, piece: GraphModule) -> None:
        name = str(node.target)
        self.calls[name] += 1
        if name not in self.runs:
            values = [
                used.meta.get("example_value") if isinstance(used, Node) else used for used in node.args
            ]
            self.runs[name] = run_piece(piece, values, self.device)
        run = self.runs[name].fused if self.is_fused else self.runs[name]
        handed_on = {output.number for output in run.outputs if output.kind == "fresh"}
        of_piece: dict[int, int] = {}
        for event in run.events:
            is_inside = event.block not in handed_on
            if event.num_bytes is None:
                self.events.append(PoolEvent(of_piece[event.block], is_inside_piece=is_inside))
            else:
                of_piece[event.block] = self._new_block(event.num_bytes, is_inside_piece=is_inside)
        found = []
        for output in run.outputs:
            if output.kind == "input":
                found.append(self.blocks[node.args[output.number]][0])  # type: ignore[index]
            else:
                found.append(of_piece[output.number] if output.kind == "fresh" else _OUTSIDE)
        self.blocks[node] = tuple(found)

    def _call_mark(self, node: Node) -> None:
        """Adds the results of a marked call or layer; those of a break are boundary buffers."""
        site = call_site(str(node.args[3]))
        results = [
            one for one in tensors_of(node.meta.get("example_value")) if one.device.type == self.device
        ]
        num_bytes = [rounded_bytes(one.untyped_storage().nbytes()) for one in results]
        if site.is_break:
            found = self._boundary_blocks(num_bytes)
            self.breaks[site.name, sum(num_bytes, sympy.Integer(0))] += 1
        else:
            first = self.num_blocks + 1
            self.num_blocks += len(num_bytes)
            found = list(range(first, first + len(num_bytes)))
            allocations = tuple(map(PoolEvent, found, num_bytes))
            self.events.append(LayerCall(site.name.partition(",")[0], allocations))
        self.blocks[node] = tuple(found) or (_OUTSIDE,)

    def _boundary_blocks(self, num_bytes: Sequence[Any]) -> list[int]:
        """Allocates boundary buffers, and what waits in the pool until the next graph begins with its copies."""
        found, staging = [], []
        for one in num_bytes:
            found.append(self._new_block(one))
            staging.append(self._new_block(one, is_staging=True))
        self.events += [PoolEvent(block, is_staging=True) for block in reversed(staging)]
        return found

    def _piece_memory(self, name: str) -> PieceMemory:
        run = self.runs[name]
        return PieceMemory(
            name=name,
            num_calls=self.calls[name],
            peak=SymbolicBytes.largest_of(run.levels),
            outputs=SymbolicBytes.largest_of([run.output_bytes]),
        )


def _device_of(gm: GraphModule) -> str:
    """Returns the type of the device that the forward computes on: an accelerator where it meets one."""
    for node in gm.graph.nodes:
        for one in tensors_of(node.meta.get("example_value")):
            if one.device.type != "cpu":
                return str(one.device.type)
    return "cpu"
