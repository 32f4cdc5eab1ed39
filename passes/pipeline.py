"""The passes, in the order they run: one list, read from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from sgl_piecewise.runtime.time_line import span

from .deduplicate import deduplicate
from .drop_shape_only import drop_shape_only
from .dump import dump
from .estimate_memory import estimate_memory
from .fusions import FUSIONS
from .split_at_marks import split_at_marks
from .validate import validate

Pass = Callable[[GraphModule, Sequence[Any]], GraphModule]


def pipeline(
    *,
    options_text: str = "",
    fusions: Sequence[str] = (),
    dump_folder: Path | None = None,
    estimates_memory: bool = False,
) -> list[Pass]:
    """Returns the passes for one compile.

    Args:
        options_text: What else decides how a piece is compiled, for the key of equal pieces.
        fusions: Names of numerics-changing passes to run.
        dump_folder: Where the graph is written before the first pass and after each, and what it will need of
            memory; None writes nothing.
        estimates_memory: Whether memory is estimated though nothing is written: a build does not wait for what
            nobody reads.
    """
    passes: list[tuple[str, Pass]] = [
        ("drop_shape_only", drop_shape_only),
        *((name, one) for name, one in FUSIONS.items() if name in fusions),
        ("split_at_marks", split_at_marks),
        ("deduplicate", partial(deduplicate, options_text=options_text)),
        ("validate", validate),
    ]
    if estimates_memory or dump_folder is not None:
        passes.append(("estimate_memory", estimate_memory))
    if dump_folder is None:
        return [one for _, one in passes]
    return list(_with_dumps(passes, dump_folder))


def _with_dumps(passes: Sequence[tuple[str, Pass]], folder: Path) -> Iterable[Pass]:
    yield partial(dump, folder=folder, title="0_traced")
    for number, (name, one) in enumerate(passes, start=1):
        yield one
        yield partial(dump, folder=folder, title=f"{number}_{name}")


def run_passes(gm: GraphModule, example_inputs: Sequence[Any], passes: Sequence[Pass]) -> GraphModule:
    """Runs passes one after the other and returns the last one's module."""
    for one in passes:
        with span(f"pass {_name_of(one)}", "graph passes"):
            gm = one(gm, example_inputs)
    return gm


def _name_of(one: Pass) -> str:
    named = one.func if isinstance(one, partial) else one
    return str(getattr(named, "__name__", type(named).__name__))
