"""Compiled forwards for runners: what they need of a compiler, which comes from above.

The runtime knows no compiler. Who builds a model runner hands one in; one compile serves all sizes
of all runners whose strategies name the same piece compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..batch.dummy import dummy_extend_batch
from ..batch.forward_mode import ForwardMode
from ..context import use_forward_context
from ..errors import ConfigError
from .base import RunnerParts, context_of
from .plan import NO_COMPILE

HiddenStates = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(input_ids, positions)`` to hidden states."""


class CompiledHiddenStates(Protocol):
    """A compiled forward, not traced yet."""

    def __call__(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Runs it."""

    def trace_size(self, sizes: Sequence[int]) -> int:
        """Returns the number of tokens to trace with, equal to no other dimension."""

    def trace(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> None:
        """Compiles it, for any number of tokens, by one call."""


ForwardCompiler = Callable[[HiddenStates, str], CompiledHiddenStates]
"""Makes a compiled forward of a model's, with pieces compiled by the named piece compiler."""


class CompiledForwards:
    """The forwards of a plan by their compile value, each compiled once.

    Args:
        parts: What runners work with.
        compiler: None where there is none: only ``none`` can be asked for then.
        sizes: Ascending numbers of tokens of all graphs.
    """

    def __init__(self, parts: RunnerParts, compiler: ForwardCompiler | None, sizes: Sequence[int]) -> None:
        self._parts = parts
        self._compiler = compiler
        self._sizes = sizes
        self._found: dict[str, HiddenStates] = {NO_COMPILE: parts.model.hidden_states}

    def of(self, name: str) -> HiddenStates:
        """Returns the forward with a compile value; compiled now if it is the first to ask.

        Raises:
            ConfigError: A compiler is named and none was handed in.
            CompileError: The model cannot be compiled.
        """
        if name not in self._found:
            self._found[name] = self._compiled(name)
        return self._found[name]

    def _compiled(self, name: str) -> HiddenStates:
        if self._compiler is None:
            raise ConfigError(
                f"The plan compiles with {name!r}, and this model runner was built without a compiler. Hand one in "
                "(compiler=), or write 'none'."
            )
        parts = self._parts
        compiled = self._compiler(parts.model.hidden_states, name)
        num_tokens = compiled.trace_size(self._sizes)
        batch = dummy_extend_batch(
            ForwardMode.EXTEND, parts.batch_runner, num_tokens=num_tokens, max_context=parts.max_context
        )
        attention = parts.attention_for(batch)
        attention.plan(batch)
        with use_forward_context(context_of(batch, attention)):
            compiled.trace(batch.input_ids, batch.positions)
        return compiled
