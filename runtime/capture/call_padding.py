"""How calls of a flat forward run at a larger size: which inputs are padded, which outputs are cut back.

One invariant: what is here was found sound for the forward before any call; padded rows that reach real ones
are the business of who asked for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Why a forward for which padding was asked runs at exact sizes only: keys of ``CallStats.without_graph``.
NOT_SYMBOLIC = "size_is_not_symbolic"  # Compiled for one size: see ``dynamic=True`` of ``torch.compile``.
NO_NAMED_INPUT = "no_input_is_named_by_dynamic_dims"
NAMED_DIFFER = "named_dimensions_differ_in_size"
UNNAMED_INPUT = "another_input_follows_the_size"
EXPANDED = "padded_input_is_expanded"  # All rows are one.
NUMBER = "number_follows_the_size"
VIEW_OUTPUT = "output_is_a_view_of_a_padded_input"
ROWS_NOT_APART = "padded_rows_may_reach_others"
# Why one call does.
GUARDED = "compiled_code_is_not_for_the_padded_size"

Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor."""


@dataclass(frozen=True, kw_only=True)
class CallPadding:
    """How to run a call at a capture size; numbers are places among the flat inputs.

    Attributes:
        size: The number that is the size.
        sizes: All numbers that are: tensors whose sizes are equal may have one each.
        dims: Padded input to the dimension that follows the size.
        pad_values: Padded input to what padded rows hold.
        output_dims: Of each output the dimension that follows the size, or None.
        forms: Gives the form of every padded input at a size, from a call's inputs.
        admits: Tells whether the forward may run at a size, from a call's inputs.
    """

    size: int
    sizes: tuple[int, ...]
    dims: Mapping[int, int]
    pad_values: Mapping[int, int | float | bool]
    output_dims: tuple[int | None, ...]
    forms: Callable[[Sequence[Any], int], Mapping[int, Form]]
    admits: Callable[[Sequence[Any], int], bool]

    def at(self, args: Sequence[Any], size: int) -> tuple[Any, ...]:
        """Returns a call's inputs with another number for the size; tensors are as they were."""
        values = list(args)
        for index in self.sizes:
            values[index] = size
        return tuple(values)

    def real(self, index: int, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Returns the real rows of a padded input's buffer; other inputs' buffers as they are."""
        return tensor.narrow(self.dims[index], 0, size) if index in self.dims else tensor

    def tail(self, index: int, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Returns what of a padded input's buffer is past the real rows."""
        dim = self.dims[index]
        return tensor.narrow(dim, size, tensor.shape[dim] - size)

    def cut(self, index: int, tensor: Any, size: int) -> Any:
        """Returns the real rows of an output."""
        dim = self.output_dims[index]
        return tensor if dim is None else tensor.narrow(dim, 0, size)
