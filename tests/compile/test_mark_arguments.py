"""What compiled code hands to a marked function is what the caller passed, at every call, whatever it is."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sgl_piecewise import eager_on_graph


class Holder:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def times(self, value: float) -> float:
        return value * self.factor


def multiplied(factor: Any, value: float) -> Any:
    return factor * value


HOLDERS = [Holder(2.0), Holder(3.0), Holder(5.0)]
ROWS = torch.arange(6.0).reshape(3, 2)


def factor_of(value: Any) -> Any:
    """Returns a number that depends on all of an argument."""
    if isinstance(value, functools.partial) or callable(getattr(value, "__func__", None)):
        return value(2.0)
    if isinstance(value, weakref.ref):
        return value().factor
    if isinstance(value, np.ndarray):
        return float(value.sum())
    assert isinstance(value, range | collections.deque | torch.Size), f"got a {type(value)}"
    return float(sum(value))


@eager_on_graph(fake=lambda x, value: torch.empty_like(x))
def scaled(x: torch.Tensor, value: Any) -> torch.Tensor:
    return x * factor_of(value)


VALUES: dict[str, Callable[[int], Any]] = {
    "partial of an integer": lambda number: functools.partial(multiplied, number),
    "partial of a float": lambda number: functools.partial(multiplied, number + 0.5),
    "partial of a tensor": lambda number: functools.partial(multiplied, ROWS[number]),
    "method": lambda number: HOLDERS[number].times,
    "weak reference": lambda number: weakref.ref(HOLDERS[number]),
    "range": lambda number: range(number + 2),
    "deque": lambda number: collections.deque([1, number]),
    "size": lambda number: torch.Size([number + 1, 2]),
    "array": lambda number: np.ones(number + 1),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_that_vary_inside_an_argument(kind: str) -> None:
    """Dynamo makes a number that varies symbolic, and an object of such numbers was taken for a constant: it raised
    an internal error. An array came as the tensor that Dynamo puts into its graphs, with another type."""

    def forward(x: torch.Tensor, value: Any) -> torch.Tensor:
        return scaled(x + 1, value) * 2

    options = {"capture": "breakable", "piece_compiler": "fx"}
    compiled = torch.compile(forward, backend="sgl_piecewise", options=options)
    # Dynamo's guards on arrays do not hold in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        for number in (0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 1):
            x, value = torch.randn(2), VALUES[kind](number)
            torch.testing.assert_close(compiled(x, value), forward(x, value), rtol=0, atol=0)


def test_array_that_compiled_code_makes_is_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return scaled(x, np.ones(3) * 2)

    compiled = torch.compile(forward, backend="sgl_piecewise", options={"piece_compiler": "fx"})
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"argument 1 is a ndarray that the compiled function makes"),
    ):
        compiled(torch.ones(2))
