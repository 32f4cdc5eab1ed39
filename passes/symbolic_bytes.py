"""Bytes as a function of the symbolic sizes of a trace, such as the token count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from sgl_piecewise.runtime.errors import ConfigError

ALIGNMENT_BYTES = 512
"""What PyTorch's CUDA allocator rounds every tensor up to, and the emulated device after it."""


def rounded_bytes(num_bytes: int | torch.SymInt) -> Any:
    """Returns a sympy expression of the bytes that an allocator takes for so many."""
    expression = num_bytes.node.expr if isinstance(num_bytes, torch.SymInt) else sympy.Integer(num_bytes)
    return ALIGNMENT_BYTES * sympy.ceiling(expression / ALIGNMENT_BYTES)


@dataclass(frozen=True, kw_only=True)
class SymbolicBytes:
    """A number of bytes: the largest of some expressions over a trace's symbols.

    Attributes:
        candidates: Sympy expressions; the number is their maximum, 0 if there are none.
    """

    candidates: tuple[Any, ...]

    @classmethod
    def largest_of(cls, candidates: Iterable[Any]) -> SymbolicBytes:
        """Returns the maximum of expressions.

        Those that never exceed another one are left out; rounding up is not looked at there, so the result may
        be low by 512 bytes a tensor.
        """
        kept: dict[Any, dict[Any, Any]] = {}
        for one in dict.fromkeys(sympy.sympify(each) for each in candidates):
            terms = dict(one.replace(sympy.ceiling, lambda inner: inner).expand().as_coefficients_dict())
            if any(_is_never_above(terms, other) for other in kept.values()):
                continue
            for covered in [other for other in kept if _is_never_above(kept[other], terms)]:
                del kept[covered]
            kept[one] = terms
        return cls(candidates=tuple(kept))

    def replaced(self, expressions: Mapping[Any, Any]) -> SymbolicBytes:
        """Returns the number with other expressions in the place of symbols."""
        return SymbolicBytes(candidates=tuple(one.xreplace(expressions) for one in self.candidates))

    @property
    def expression(self) -> Any:
        """The number as one sympy expression."""
        return sympy.Max(0, *self.candidates)

    @property
    def symbols(self) -> tuple[Any, ...]:
        """The symbols it depends on, by name."""
        return tuple(sorted({one for each in self.candidates for one in each.free_symbols}, key=str))

    def at(self, num_tokens: int | Mapping[str, int]) -> int:
        """Returns the bytes for a token count.

        Args:
            num_tokens: The value of the one symbol there is, or values by symbol name. A trace of fixed
                shapes has no symbol; then nothing depends on it.

        Raises:
            ConfigError: The trace has several symbols, one has no value, or a count is no whole number from 0.
        """
        values = values_of_symbols(self.symbols, num_tokens)
        return max((int(one.xreplace(values)) for one in self.candidates), default=0)

    def __str__(self) -> str:
        return " or ".join(map(str, self.candidates)) or "0"


def values_of_symbols(symbols: Sequence[Any], num_tokens: int | Mapping[str, int]) -> dict[Any, Any]:
    """Returns the value of every symbol for a token count; see `SymbolicBytes.at`.

    Raises:
        ConfigError: As there.
    """
    for count in num_tokens.values() if isinstance(num_tokens, Mapping) else [num_tokens]:
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"num_tokens must be a whole number of at least 0, got {count!r}.")
    if isinstance(num_tokens, Mapping):
        missing = [str(one) for one in symbols if str(one) not in num_tokens]
        if missing:
            raise ConfigError(f"No value for {', '.join(missing)}; got {sorted(num_tokens)}.")
        return {one: sympy.Integer(num_tokens[str(one)]) for one in symbols}
    if len(symbols) > 1:
        raise ConfigError(
            f"The trace has {len(symbols)} symbolic sizes ({', '.join(map(str, symbols))}): give a mapping of "
            "their names to values."
        )
    return {one: sympy.Integer(num_tokens) for one in symbols}


def _is_never_above(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Compares sums term by term; terms are sizes and constants, so none is negative."""
    return all(factor <= other.get(term, 0) for term, factor in one.items()) and all(
        factor >= one.get(term, 0) for term, factor in other.items()
    )
