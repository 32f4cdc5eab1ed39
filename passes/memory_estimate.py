"""What a forward needs of a graph pool: bytes that live at once, symbolically, and bytes reserved at given sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.errors import ConfigError

from .pool_events import LayerCall, PoolEvent, without_layers
from .symbolic_bytes import SymbolicBytes, values_of_symbols

PiecesRun = Literal["fx", "fused", "compiled"]
"""Whose choices decide which values of a piece have memory."""


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
        peak: Bytes that live at once when most do, outputs included, without what waits to be copied.
        events: Allocations and frees of one capture, in order. Calls of shared layers are among them only in
            the estimate of one trace.
        outputs: Blocks that the outputs lie in.
        fused_events: As ``events``, where a compiler fuses what is in pieces.
        fused_outputs: As ``outputs``, among the blocks of these.
    """

    pieces: tuple[PieceMemory, ...]
    breaks: tuple[BreakMemory, ...]
    peak: SymbolicBytes
    events: tuple[PoolEvent | LayerCall, ...]
    outputs: tuple[int, ...] = ()
    fused_events: tuple[PoolEvent | LayerCall, ...] = ()
    fused_outputs: tuple[int, ...] = ()

    def reserved_bytes(
        self, sizes: int | Sequence[int], device: GraphDevice, *, pieces_run: PiecesRun = "fx"
    ) -> int:
        """Returns what the pool holds once every size was captured; see `reserved_after_each`."""
        asked = [sizes] if isinstance(sizes, int) else sizes
        return list(self.reserved_after_each(asked, device, pieces_run=pieces_run).values())[-1]

    def reserved_after_each(
        self, sizes: Sequence[int], device: GraphDevice, *, pieces_run: PiecesRun = "fx"
    ) -> dict[int, int]:
        """Captures sizes on a model of the device's pool, largest first, as the engine does.

        That is more than what lives at once: an allocator takes memory in larger parts, and what is free between
        live blocks serves nothing that is larger.

        Args:
            sizes: Capture sizes, in any order.
            device: Whose allocator is imitated; nothing is allocated there.
            pieces_run: How: as ``fx``; ``fused``, as Inductor runs them, whose choices are predicted from the
                operators; or ``compiled`` by something unknown, which is taken to keep what FX keeps, an upper bound.
                On the emulated device, which takes a compiled piece for one operation, only what pieces hand on counts.

        Returns:
            By size, largest first, the bytes that the pool has reserved after that size.

        Raises:
            ConfigError: No size, one that is no whole number of at least 0, or a trace of several symbols.
        """
        if not sizes:
            raise ConfigError("sizes is empty: name the capture sizes of the pool.")
        pool = device.new_pool_model()
        events = [
            event
            for event in without_layers(self.fused_events if pieces_run == "fused" else self.events)
            if (pool.edits_graphs or not event.is_staging)
            and not (pieces_run != "fx" and event.is_inside_piece and not pool.sees_compiled_code)
        ]
        expressions = dict.fromkeys(event.num_bytes for event in events if event.num_bytes is not None)
        symbols = sorted({one for each in expressions for one in each.free_symbols}, key=str)
        reserved = {}
        for size in sorted(sizes, reverse=True):
            values = values_of_symbols(symbols, size)
            num_bytes = {one: int(one.xreplace(values)) for one in expressions}
            blocks: dict[int, int] = {}
            for event in events:
                if event.num_bytes is None:
                    if event.block in blocks:
                        pool.free(blocks.pop(event.block))
                elif num_bytes[event.num_bytes]:  # A tensor without elements has no memory.
                    blocks[event.block] = pool.allocate(num_bytes[event.num_bytes])
            reserved[size] = pool.reserved_bytes
        return reserved

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
