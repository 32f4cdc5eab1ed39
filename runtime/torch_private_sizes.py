"""Private PyTorch APIs of symbolic sizes: sizes of results as functions of a call's arguments.

As in ``torch_private`` each piece is small, says what it relies on, and knows nothing of the rest of the
library; tried on 2.11 and 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

_MANY_CALLS = 256  # of one call site, by their numbers: more than a forward has capture sizes


class SizeExpression:
    """A size or stride as a function of a call's tensors and integers.

    Args:
        expression: Over symbols ``t<tensor>_<dimension>`` (a size), ``t<tensor>_s<dimension>`` (a stride)
            and ``i<index>`` (an integer).
    """

    def __init__(self, expression: Any) -> None:
        self._expression = expression
        self._text = str(expression)
        self._symbols = sorted(expression.free_symbols, key=str)
        self.quantities = [Quantity(str(symbol)) for symbol in self._symbols]

    def value(self, tensors: Sequence[torch.Tensor], ints: Sequence[Any]) -> Any:
        """Returns the size for these arguments: symbolic where they are."""
        numbers = [quantity.of(tensors, ints) for quantity in self.quantities]
        env = dict(zip(self._symbols, numbers, strict=True))
        if self._expression in env:
            return env[self._expression]
        return sympy_interp(PythonReferenceAnalysis, env, self._expression)

    def __str__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SizeExpression) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True)
class Quantity:
    """One symbol of a `SizeExpression`: where its value stands in a call.

    Attributes:
        name: The symbol's.
    """

    name: str

    @functools.cached_property
    def _place(self) -> tuple[int, int | None, bool]:
        """Index of the tensor or integer, which dimension of the tensor, and whether its stride."""
        index, _, dimension = self.name[1:].partition("_")
        number = None if self.name.startswith("i") else int(dimension.removeprefix("s"))
        return int(index), number, dimension.startswith("s")

    def of(self, tensors: Sequence[torch.Tensor], ints: Sequence[Any]) -> Any:
        """Returns its value for these arguments."""
        index, dimension, is_stride = self._place
        if dimension is None:
            return ints[index]
        return tensors[index].stride(dimension) if is_stride else tensors[index].size(dimension)


Sizes = tuple[int | SizeExpression, ...]


def evaluated(sizes: Sizes, tensors: Sequence[torch.Tensor], ints: Sequence[Any]) -> tuple[Any, ...]:
    """Returns sizes for these arguments, symbolic where they are."""
    return tuple([size if isinstance(size, int) else size.value(tensors, ints) for size in sizes])


class SizesOfCall:
    """Shapes and strides of a call's results, looked up at once: a compiled forward asks at every call.

    Args:
        results: Shape and stride of each result; None for one that has none.
    """

    def __init__(self, results: Sequence[tuple[Sizes, Sizes] | None]) -> None:
        self._results = results
        sizes = [size for one in results if one is not None for size in (*one[0], *one[1])]
        self._quantities = list(
            dict.fromkeys(
                quantity for size in sizes if isinstance(size, SizeExpression) for quantity in size.quantities
            )
        )
        self._known: dict[tuple[int, ...], list[Any]] = {}

    def of(self, tensors: Sequence[torch.Tensor], ints: Sequence[Any]) -> list[Any]:
        """Returns shape and stride of each result for these arguments, symbolic where they are."""
        numbers = tuple([quantity.of(tensors, ints) for quantity in self._quantities])
        if any(type(one) is not int for one in numbers):
            return self._evaluated(tensors, ints)
        found = self._known.get(numbers)
        if found is None:
            if len(self._known) == _MANY_CALLS:
                self._known.clear()
            found = self._known[numbers] = self._evaluated(tensors, ints)
        return found

    def _evaluated(self, tensors: Sequence[torch.Tensor], ints: Sequence[Any]) -> list[Any]:
        return [
            None if one is None else (evaluated(one[0], tensors, ints), evaluated(one[1], tensors, ints))
            for one in self._results
        ]


class SizeExpressions:
    """Turns symbolic sizes of a trace into `SizeExpression` over the arguments of one call.

    Args:
        tensors: The call's tensors, as the trace has them.
        ints: The call's symbolic integers.
        add_int: Makes a symbol of the trace one more integer of the call and returns its index, or returns
            None if the graph does not hold it.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], ints: Sequence[Any], add_int: Callable[[Any], int | None]
    ) -> None:
        self._known: dict[Any, Any] = {}
        self._add_int = add_int
        for index, number in enumerate(ints):
            self._add(number, f"i{index}")
        for index, tensor in enumerate(tensors):
            for dimension, size in enumerate(tensor.shape):
                self._add(size, f"t{index}_{dimension}")
        for index, tensor in enumerate(tensors):
            for dimension, stride in enumerate(tensor.stride()):
                self._add(stride, f"t{index}_s{dimension}")

    def _add(self, number: Any, name: str) -> None:
        if isinstance(number, torch.SymInt) and not number.node.expr.is_number:
            self._known.setdefault(number.node.expr, sympy.Symbol(name, integer=True, nonnegative=True))

    def of(self, size: int | torch.SymInt) -> int | SizeExpression:
        """Returns the size as a number or an expression.

        Raises:
            ValueError: It depends on something that is no size of an argument.
        """
        expression = sympy.Integer(size) if isinstance(size, int) else size.node.expr
        if expression.is_number:
            return int(expression)
        if expression in self._known:
            return SizeExpression(self._known[expression])
        replacements = {symbol: self._solve(symbol) for symbol in expression.free_symbols}
        return SizeExpression(expression.xreplace(replacements))

    def _solve(self, symbol: Any) -> Any:
        """Expresses one symbol of the trace by what is known, directly or from a sum or multiple of it."""
        if symbol in self._known:
            return self._known[symbol]
        for expression, name in self._known.items():
            if expression.free_symbols != {symbol}:
                continue
            factor = expression.coeff(symbol)
            rest = expression - factor * symbol
            if factor.is_Integer and factor > 0 and rest.is_Integer:
                return (name - rest) if factor == 1 else FloorDiv(name - rest, factor)
        index = self._add_int(symbol)
        if index is None:
            raise ValueError(f"{symbol} is not known when the call begins")
        self._known[symbol] = sympy.Symbol(f"i{index}", integer=True, nonnegative=True)
        return self._known[symbol]


# Sizes of a trace at another size ------------------------------------------------------------------


def symbol_of(size: Any) -> Any:
    """Returns the symbol that a size of a trace is; None for a number, or for an expression over symbols."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    return expression if expression.is_symbol else None


def free_symbols(value: Any) -> set[Any]:
    """Returns the symbols that a number, or the form of a tensor, depends on."""
    if isinstance(value, torch.Tensor):
        return set().union(
            *(free_symbols(one) for one in (*value.shape, *value.stride(), value.storage_offset()))
        )
    is_symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return set(value.node.expr.free_symbols) if is_symbolic else set()


def size_expression(size: int | torch.SymInt) -> Any:
    """Returns a size of a trace as an expression, which keeps nothing of the trace alive."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def value_at(expression: Any, values: Mapping[Any, int]) -> int:
    """Returns the value of an expression for these values of its symbols."""
    return int(expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()}))


class SizeGuards:
    """What a trace took for granted about its sizes, apart from the trace, which would keep much alive.

    Args:
        size: Any symbolic size of the trace.
    """

    def __init__(self, size: torch.SymInt) -> None:
        env = size.node.shape_env
        self._guards = [env.replace(guard.expr) for guard in env.guards]  # Equal sizes are one symbol.
        self._ranges = {symbol: (found.lower, found.upper) for symbol, found in env.var_to_range.items()}

    def hold_at(self, symbol: Any, values: Mapping[Any, int]) -> bool:
        """Tells whether code of the trace is right for these values as far as one symbol goes.

        Args:
            symbol: Only guards that look at it count.
            values: Of all symbols that are known; a guard over another one counts as not met.
        """
        lower, upper = self._ranges.get(symbol, (-sympy.oo, sympy.oo))
        if not lower <= values[symbol] <= upper:
            return False
        known = {one: sympy.Integer(value) for one, value in values.items()}
        return all(
            guard.xreplace(known) == sympy.true for guard in self._guards if symbol in guard.free_symbols
        )
