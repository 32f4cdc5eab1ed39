"""Puts the memory estimates of a forward and of its shared layers together, in the order that they run.

A trace of a layer serves many calls, and knows neither the forward's symbols nor what becomes of its results.
Both are told by one run of the forward: which trace served which call, and what every symbol was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from sgl_piecewise.passes.memory_estimate import BreakMemory, MemoryEstimate, PieceMemory
from sgl_piecewise.passes.pool_events import LayerCall, PoolEvent, levels_of
from sgl_piecewise.passes.symbolic_bytes import SymbolicBytes
from sgl_piecewise.runtime.errors import CompileError

Estimator = Callable[[GraphModule, Sequence[Any]], MemoryEstimate]


@dataclass(eq=False)
class _Run:
    """One run of a trace.

    Attributes:
        estimate: Of the trace.
        values: Of its symbols in this run.
        layers: Runs of layers inside, in order.
    """

    estimate: MemoryEstimate
    values: dict[Any, int]
    layers: list[_Run] = field(default_factory=list)


class LayeredEstimates:
    """A Dynamo backend for a forward and its layers: estimates every trace, runs it as it is, and notes the runs.

    Args:
        estimator: Estimates one trace.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._open: list[_Run] = []
        self._first: _Run | None = None

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        estimate = self._estimator(gm, example_inputs)
        inputs = [node.meta.get("example_value") for node in gm.graph.nodes if node.op == "placeholder"]
        forward: Callable[..., Any] = gm.forward

        def run(*args: Any) -> Any:
            one = _Run(estimate, dict(_symbol_values(inputs, args)))
            if self._open:
                self._open[-1].layers.append(one)
            elif self._first is None:
                self._first = one
            self._open.append(one)
            try:
                return forward(*args)
            finally:
                self._open.pop()

        return run

    def linked(self) -> MemoryEstimate | None:
        """Returns the estimate of the first forward that ran, its layers included; None if none ran.

        Raises:
            CompileError: A layer has a size that does not follow from the forward's.
        """
        return None if self._first is None else _linked(self._first)


def _symbol_values(inputs: Sequence[Any], args: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """Yields the symbols among sizes of a trace's inputs, with what they are in a call."""
    for example, value in zip(inputs, args, strict=True):
        pairs = (
            zip(example.shape, value.shape, strict=True)
            if isinstance(example, torch.Tensor)
            else [(example, value)]
        )
        for size, number in pairs:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                yield size.node.expr, int(number)


def _linked(run: _Run) -> MemoryEstimate:
    """Puts the layers of a run in the place of their calls."""
    estimate = run.estimate
    calls = [event for event in estimate.events if isinstance(event, LayerCall)]
    if not calls:
        return estimate
    if len(calls) != len(run.layers):
        raise CompileError(
            f"The forward calls {len(calls)} shared layers and ran {len(run.layers)}: a marked function seems to call "
            "one too. Estimate with shares_layers=False."
        )
    plain, fused = _Linker(run), _Linker(run, are_layers_fused=True)
    for linker in (plain, fused):
        # Small pieces around layers run as FX whatever compiles the layers.
        for event in estimate.events:
            linker.add(event)
    return MemoryEstimate(
        pieces=(*estimate.pieces, *plain.pieces.values()),
        breaks=(*estimate.breaks, *plain.breaks.values()),
        peak=SymbolicBytes.largest_of(levels_of(plain.events)),
        events=tuple(plain.events),
        outputs=estimate.outputs,
        fused_events=tuple(fused.events),
        fused_outputs=estimate.outputs,
    )


class _Linker:
    """Goes through the events of a run and writes those of its layers where they are called.

    Args:
        run: The run.
        are_layers_fused: Whether layers have their events as a compiler that fuses runs them.

    Attributes:
        events: All, in order.
        pieces: Of the layers, by trace and name.
        breaks: Of the layers, by name and size of results.
    """

    def __init__(self, run: _Run, *, are_layers_fused: bool = False) -> None:
        self._are_layers_fused = are_layers_fused
        self._values = run.values
        self._layers = iter(run.layers)
        self._names: dict[int, str] = {}
        self._held: list[MemoryEstimate] = []
        self._blocks: dict[int, int] = {}
        self._num_blocks = max(_blocks_of(run.estimate), default=0)
        self.events: list[PoolEvent] = []
        self.pieces: dict[tuple[int, str], PieceMemory] = {}
        self.breaks: dict[tuple[str, Any], BreakMemory] = {}

    def add(self, event: PoolEvent | LayerCall) -> None:
        """Takes the next event of the forward."""
        if isinstance(event, LayerCall):
            self._add_layer(event, next(self._layers))
        else:
            block = self._blocks.get(event.block, event.block)
            self.events.append(event._replace(block=block, is_inside_piece=False))

    def _add_layer(self, call: LayerCall, run: _Run) -> None:
        estimate = _linked(run)
        symbols = self._in_own_symbols(call.name, run.values)
        blocks: dict[int, int] = {}
        sizes: dict[int, Any] = {}
        events, outputs = estimate.events, estimate.outputs
        if self._are_layers_fused:
            events, outputs = estimate.fused_events, estimate.fused_outputs
        for event in events:
            assert isinstance(event, PoolEvent), "layers of a linked estimate are in place"
            if event.num_bytes is None:
                if event.block not in outputs:
                    self.events.append(event._replace(block=blocks[event.block]))
                continue
            self._num_blocks += 1
            blocks[event.block] = self._num_blocks
            sizes[self._num_blocks] = event.num_bytes.xreplace(symbols)
            self.events.append(event._replace(block=self._num_blocks, num_bytes=sizes[self._num_blocks]))
        self._hand_on(call, [blocks[block] for block in outputs], sizes)
        self._count(call.name, run.estimate, estimate, symbols)

    def _hand_on(self, call: LayerCall, outputs: list[int], sizes: dict[int, Any]) -> None:
        """Lets the layer's outputs be the results of the call; Dynamo does not say which is which, sizes do."""
        for result in call.results:
            found = next((block for block in outputs if sizes[block] == result.num_bytes), None)
            if found is None:  # A view of something larger: the call's plan only knows the view.
                found = next(iter(outputs), None)
            if found is None:
                self.events.append(result)
            else:
                outputs.remove(found)
                self._blocks[result.block] = found
        self.events += [PoolEvent(block) for block in outputs]

    def _in_own_symbols(self, layer: str, values: dict[Any, int]) -> dict[Any, Any]:
        """Returns a layer's symbols as expressions over those of the forward, told by their values in the run."""
        found: dict[Any, Any] = {}
        for symbol, value in values.items():
            equal = [one for one, number in self._values.items() if number == value]
            parts = [one for one, number in self._values.items() if number > 1 and value % number == 0]
            if len(equal) == 1:
                found[symbol] = equal[0]
            elif not equal and len(parts) == 1:
                found[symbol] = sympy.Integer(value // self._values[parts[0]]) * parts[0]
            else:
                raise CompileError(
                    f"Layer {layer} was traced with a size of {value} that does not follow from the sizes of the "
                    f"forward ({ {str(one): number for one, number in self._values.items()} }). Estimate with "
                    "shares_layers=False."
                )
        return found

    def _count(self, layer: str, trace: MemoryEstimate, linked: MemoryEstimate, symbols: Any) -> None:
        """Adds the layer's pieces and breaks to those of the forward, each trace's once."""
        if id(trace) not in self._names:
            again = sum(name.partition("#")[0] == layer for name in self._names.values())
            self._names[id(trace)] = f"{layer}#{again + 1}" if again else layer
            self._held.append(trace)
        name = self._names[id(trace)]
        for piece in linked.pieces:
            before = self.pieces.get((id(trace), piece.name))
            self.pieces[id(trace), piece.name] = replace(
                piece,
                name=f"{name}.{piece.name}",
                num_calls=piece.num_calls + (before.num_calls if before else 0),
                peak=piece.peak.replaced(symbols),
                outputs=piece.outputs.replaced(symbols),
            )
        for one in linked.breaks:
            results = one.results.replaced(symbols)
            key = (one.name, results.candidates)
            num_before = self.breaks[key].num_calls if key in self.breaks else 0
            self.breaks[key] = replace(one, num_calls=one.num_calls + num_before, results=results)


def _blocks_of(estimate: MemoryEstimate) -> Iterator[int]:
    for event in estimate.events:
        if isinstance(event, LayerCall):
            yield from (result.block for result in event.results)
        else:
            yield event.block
