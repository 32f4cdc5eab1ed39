"""The passes, in the order they run: one list, read from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from sgl_piecewise.runtime.time_line import span

from .deduplicate import deduplicate
from .drop_shape_only import drop_shape_only
from .split_at_marks import split_at_marks

Pass = Callable[[GraphModule, Sequence[Any]], GraphModule]


def pipeline(*, options_text: str = "") -> list[Pass]:
    """Returns the passes for one compile.

    Args:
        options_text: What else decides how a piece is compiled, for the key of equal pieces.
    """
    return [
        drop_shape_only,
        split_at_marks,
        partial(deduplicate, options_text=options_text),
    ]


def run_passes(gm: GraphModule, example_inputs: Sequence[Any], passes: Sequence[Pass]) -> GraphModule:
    """Runs passes one after the other and returns the last one's module."""
    for one in passes:
        with span(f"pass {_name_of(one)}", "graph passes"):
            gm = one(gm, example_inputs)
    return gm


def _name_of(one: Pass) -> str:
    named = one.func if isinstance(one, partial) else one
    return str(getattr(named, "__name__", type(named).__name__))
