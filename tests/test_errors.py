"""The error hierarchy: every error is ours and a built-in kind, and unknown words get a hint."""

from __future__ import annotations

import inspect

import pytest

from sgl_piecewise.runtime import errors

CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if value.__module__ == errors.__name__ and value is not errors.SglPiecewiseError
]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_is_ours_and_a_built_in_kind(error: type[Exception]) -> None:
    """Callers may catch either: a server that knows only RuntimeError still handles ours."""
    assert issubclass(error, errors.SglPiecewiseError)
    built_in = [base for base in error.__mro__ if base.__module__ == "builtins"]
    assert built_in[0] not in {Exception, BaseException, object}
    assert error.__doc__
    assert str(error("what, where, what to do")) == "what, where, what to do"


def test_nearest_names_the_likely_word_and_all_others() -> None:
    assert (
        errors.nearest("brakable", ["full", "breakable"])
        == "did you mean 'breakable'? Known: breakable, full."
    )
    assert errors.nearest("FULL", ["full", "breakable"]).startswith("did you mean 'full'?")
    assert errors.nearest("x", []) == "Known: none."
    assert errors.nearest("xyz", {"full": 1, "breakable": 2}) == "Known: breakable, full."
