"""The compiler that model runners of the engine get: the one of the compile axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_piecewise.entry import compiled_forward
from sgl_piecewise.runtime.runners.compiling import HiddenStates


class CompiledModel:
    """A model's forward, compiled by backend ``sgl_piecewise``.

    Args:
        forward: The model's ``hidden_states``; equal layers are traced once if it is a module's method.
        piece_compiler: ``fx``, ``inductor``, or any Dynamo backend.
    """

    def __init__(self, forward: HiddenStates, piece_compiler: str) -> None:
        self._compiled = compiled_forward(forward, piece_compiler)

    def __call__(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Runs it, compiled."""
        hidden_TE: torch.Tensor = self._compiled(input_ids_T, positions_T)
        return hidden_TE

    def trace_size(self, sizes: Sequence[int]) -> int:
        """Returns the number of tokens to trace with."""
        from sgl_piecewise.compiler.trace_size import sizes_in_use, trace_size

        return trace_size(sizes, sizes_in_use(self._compiled.__self__, []))

    def trace(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> None:
        """Compiles it, for any number of tokens."""
        self._compiled.trace((input_ids_T, positions_T), {}, {0: 0, 1: 0})
