"""Values of a strategy whose compiler rounds otherwise: judged by what eager's own rounding costs.

Eager and the strategy are both compared with the model in a wider dtype, on the same padded tokens. The
strategy may be off by a few times eager's own error, and a changed next token is excused only where the wide
model itself hardly tells the two apart. This module must not know strategies.

Source: the rule of lm-evaluation style teacher forcing, with the tolerance measured in place of chosen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .records import CaseValues
from .values import max_abs_difference

ERROR_FACTOR = 4.0
"""How many times eager's own error a strategy may be off. Both errors are maxima over many values, so that equal
methods differ by some; a wrong value is off by orders of magnitude."""

TIE_FACTOR = 2.0
"""A changed next token is excused where the wide margin between the two is under this many times eager's error."""

MOST_EXCUSED = 0.01
"""Largest part of the rows whose next token may be excused."""


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """How far a strategy and eager are from the wide model, on one input.

    Attributes:
        max_error: Largest absolute difference of the strategy's output to the wide model's; None where the
            strategy's alone is not finite.
        eager_error: The same of eager's.
        num_excused: Rows with another next token than eager's, excused as a tie.
        first_wrong: Index of a value that is off by too much, or of a row with another next token that is no
            tie; None if there is neither.
    """

    max_error: float | None
    eager_error: float | None
    num_excused: int
    first_wrong: tuple[int, ...] | None


def closeness(wide: torch.Tensor, eager: torch.Tensor, got: torch.Tensor) -> Closeness:
    """Judges one output, where eager's and the wide model's are finite.

    Args:
        wide: Of the wide model (wide dtype, a row a token).
        eager: Eager's, on the same padded tokens.
        got: The strategy's; same shape as ``eager``.
    """
    wide, eager, got = _where_finite(wide, eager, got)
    eager_error = max_abs_difference(wide, eager)
    max_error = max_abs_difference(wide, got)
    if eager_error is None or max_error is None:
        return Closeness(
            max_error=max_error, eager_error=eager_error, num_excused=0, first_wrong=_first_not_finite(got)
        )
    least = _rounding(wide, eager.dtype)
    allowed = ERROR_FACTOR * max(eager_error, least)
    if max_error > allowed:
        off = (wide - got.to(wide.dtype)).abs()
        return Closeness(
            max_error=max_error,
            eager_error=eager_error,
            num_excused=0,
            first_wrong=_index_of(int(off.argmax()), off.shape),
        )
    num_excused, wrong_row = _next_tokens(wide, eager, got, TIE_FACTOR * max(eager_error, least))
    return Closeness(
        max_error=max_error, eager_error=eager_error, num_excused=num_excused, first_wrong=wrong_row
    )


def _next_tokens(
    wide: torch.Tensor, eager: torch.Tensor, got: torch.Tensor, tie: float
) -> tuple[int, tuple[int, ...] | None]:
    """Returns how many rows are excused, and the first whose next token is wrong."""
    if eager.dim() != 2 or eager.shape[0] == 0 or eager.dtype.is_complex:
        return 0, None
    eager_T, got_T = eager.argmax(dim=-1, keepdim=True), got.argmax(dim=-1, keepdim=True)
    margin_T = (wide.gather(1, eager_T) - wide.gather(1, got_T)).abs().squeeze(1)
    is_changed_T = (eager_T != got_T).squeeze(1)
    is_wrong_T = is_changed_T & (margin_T >= tie)
    num_excused = int((is_changed_T & ~is_wrong_T).sum())
    if not bool(is_wrong_T.any()):
        return num_excused, None
    row = int(is_wrong_T.to(torch.uint8).argmax())
    return num_excused, (row, int(got_T[row]))


def _rounding(wide: torch.Tensor, dtype: torch.dtype) -> float:
    """One rounding of the largest value: no error is resolved below that."""
    return float(wide.abs().max()) * torch.finfo(dtype).eps if wide.numel() else 0.0


def _where_finite(
    wide: torch.Tensor, eager: torch.Tensor, got: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns all three with zeros where eager or the wide model is not finite: no fault of a strategy's is there."""
    is_judged = torch.isfinite(wide) & torch.isfinite(eager)
    if bool(is_judged.all()):
        return wide, eager, got
    return (
        wide.masked_fill(~is_judged, 0),
        eager.masked_fill(~is_judged, 0),
        got.masked_fill(~is_judged, 0),
    )


def _first_not_finite(tensor: torch.Tensor) -> tuple[int, ...] | None:
    bad = ~torch.isfinite(tensor)
    return _index_of(int(bad.to(torch.uint8).argmax()), bad.shape) if bool(bad.any()) else None


def _index_of(flat_index: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat_index), shape))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype against which a model's own error is measured: float32, or float64 for float32."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def wide_model(model: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor] | None:
    """Returns a copy of a module, or of a method with its module, in the wide dtype.

    It takes the model's own arguments. None for any other function: what it computes with cannot be widened.
    """
    owner = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    if not isinstance(owner, torch.nn.Module):
        return None
    wide, dtype = widened(owner)
    function: Any = wide if owner is model else getattr(wide, model.__name__)

    def run(*arguments: Any) -> torch.Tensor:
        result: torch.Tensor = function(*(_widened(argument, dtype) for argument in arguments))
        return result

    return run


def widened(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.dtype]:
    """Returns a copy of a module in the wide dtype, and that dtype."""
    dtypes = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    dtype = wide_dtype(dtypes[0]) if dtypes else torch.float64
    return copy.deepcopy(module).to(dtype), dtype


def excused_in_words(entries: Sequence[CaseValues]) -> str | None:
    """Returns what is wrong where more next tokens were excused as ties than chance makes likely, or None."""
    num_excused = sum(entry.num_excused for entry in entries)
    num_rows = sum(entry.num_rows for entry in entries)
    if num_excused <= MOST_EXCUSED * num_rows:
        return None
    return (
        f"{num_excused} of {num_rows} rows have another next token than padded eager. Each is a tie within the "
        f"rounding error, but more than {MOST_EXCUSED:.0%} are too many to be chance"
    )


def _widened(argument: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.to(dtype) if is_float else argument
