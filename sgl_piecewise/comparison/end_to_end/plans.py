"""Execution plans by name: ``DECODE+EXTEND``, each a cell of the grid.

``full+tc_piecewise`` decodes in whole graphs of the plain forward and runs prompts compiled, in graphs between
breaks. One cell alone serves both. This module must not know how plans are measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sgl_piecewise.entry import BIT_KEEPING_COMPILERS, CELLS
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.errors import ConfigError, nearest
from sgl_piecewise.runtime.runners.plan import EAGER, NO_COMPILE, ExecutionPlan, ModeStrategy

DEFAULT_PLANS = (EAGER, "full+breakable", "full+tc_piecewise", "full")
"""The second is the plan that a model runner has where none is given."""


@dataclass(frozen=True, kw_only=True)
class NamedPlan:
    """How decoding and prompts run.

    Attributes:
        name: As given, in its shortest form.
        decode: Strategy of decoding, without sizes.
        extend: Strategy of prompts, without sizes.
    """

    name: str
    decode: ModeStrategy
    extend: ModeStrategy

    @property
    def is_reference(self) -> bool:
        """Whether other plans are compared with it."""
        return self.name == EAGER

    @property
    def keeps_bits(self) -> bool:
        """Whether no compiler of it changes how forwards round; decoding reads what prompts left in the cache."""
        return {self.decode.compile, self.extend.compile} <= BIT_KEEPING_COMPILERS

    @property
    def padded_eager(self) -> NamedPlan:
        """Eager with this plan's padding: what it is compared with. Eager itself where nothing is padded."""
        cells = [_UNPADDED if one.strategy == EAGER else _PADDED for one in (self.decode, self.extend)]
        if cells == [_UNPADDED] * 2:
            return named_plan(EAGER)
        decode, extend = cells
        name = "padded eager" if decode is extend else f"{decode.strategy}+{extend.strategy}"
        return NamedPlan(name=name, decode=decode, extend=extend)

    @property
    def compilers(self) -> tuple[str, ...]:
        """What compiles forwards of the plan, each once."""
        return tuple(sorted({self.decode.compile, self.extend.compile} - {NO_COMPILE}))

    def execution_plan(
        self, *, batch_sizes: tuple[int, ...], prompt_lengths: tuple[int, ...], attention: str = "auto"
    ) -> ExecutionPlan:
        """Returns the plan with graphs of these sizes.

        Args:
            batch_sizes: Requests of decode graphs, ascending.
            prompt_lengths: Tokens of extend graphs, ascending.
            attention: The attention backend of both.
        """
        modes = {
            ForwardMode.DECODE: _with_sizes(self.decode, batch_sizes),
            ForwardMode.EXTEND: _with_sizes(self.extend, prompt_lengths),
        }
        return ExecutionPlan(modes=modes, prefill_attention=attention, decode_attention=attention)


_UNPADDED, _PADDED = ModeStrategy(), ModeStrategy(strategy="none")


def named_plan(name: str) -> NamedPlan:
    """Returns the plan of a name.

    Raises:
        ConfigError: It names no cell of the grid, or more than two.
    """
    cells = [cell.strip() for cell in name.split("+")]
    if len(cells) > 2:
        raise ConfigError(
            f"The plan {name!r} names {len(cells)} cells; give DECODE+EXTEND, as full+breakable, or one for both."
        )
    for cell in cells:
        if cell not in CELLS:
            raise ConfigError(f"The plan {name!r} names no cell {cell!r}: {nearest(cell, CELLS)}")
    decode, extend = cells[0], cells[-1]
    short = decode if decode == extend else f"{decode}+{extend}"
    return NamedPlan(name=short, decode=_strategy(decode), extend=_strategy(extend))


def checked_plans(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in their shortest form, with eager first, adding it where it is left out.

    Raises:
        ConfigError: None at all, one that is not known, or one twice.
    """
    given = [named_plan(name).name for name in names]
    if not given:
        raise ConfigError(
            f"No plan to run end to end. Name some as {','.join(DEFAULT_PLANS)}, or switch it off."
        )
    for name in given:
        if given.count(name) > 1:
            raise ConfigError(f"The plan {name!r} is named more than once; name it once.")
    return (EAGER, *(name for name in given if name != EAGER))


def _strategy(cell: str) -> ModeStrategy:
    compiler, capture = CELLS[cell]
    if cell == EAGER:
        return ModeStrategy()
    return ModeStrategy(strategy=capture, compile=compiler)


def _with_sizes(strategy: ModeStrategy, sizes: tuple[int, ...]) -> ModeStrategy:
    if strategy.strategy == EAGER:
        return strategy
    return ModeStrategy(strategy=strategy.strategy, compile=strategy.compile, capture_sizes=sizes)
