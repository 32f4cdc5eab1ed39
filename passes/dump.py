"""Writes graphs as text into a folder: the trace, what each pass made of it, and every piece.

A dump is a pass that changes nothing; `pipeline` puts one after each other pass when a folder is given. The
text is Python with the shape of every value and the user's source lines.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from sgl_piecewise.runtime.errors import ConfigError

from .estimate_memory import MEMORY
from .split_at_marks import pieces_of
from .validate import FINDINGS


def new_dump_folder(parent: str | os.PathLike[str]) -> Path:
    """Makes a folder of its own for one trace: ``trace_0``, ``trace_1``, ... in ``parent``.

    Raises:
        ConfigError: It cannot be made.
    """
    folder = Path(parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            one = folder / f"trace_{number}"
            try:
                one.mkdir()
            except FileExistsError:  # An earlier trace's, or another process's.
                continue
            return one
    except OSError as err:
        raise ConfigError(f"dump_folder '{parent}' cannot be written: {err}.") from err
    raise AssertionError("unreachable")


def dump(gm: GraphModule, example_inputs: Sequence[Any], *, folder: Path, title: str) -> GraphModule:
    """Writes a graph, its pieces, and what passes noted about it.

    Args:
        gm: Any graph; not changed.
        example_inputs: Not used.
        folder: Where to write.
        title: File name without ending; pieces go to ``pieces/NAME.py`` and are replaced by later passes'.

    Returns:
        The same module.
    """
    (folder / f"{title}.py").write_text(graph_text(gm))
    pieces = pieces_of(gm)
    if pieces:
        (folder / "pieces").mkdir(exist_ok=True)
    for name, piece in pieces.items():
        (folder / "pieces" / f"{name}.py").write_text(graph_text(piece))
    if gm.meta.get(FINDINGS):
        (folder / "findings.txt").write_text("\n".join(map(str, gm.meta[FINDINGS])) + "\n")
    if MEMORY in gm.meta:
        (folder / "memory.txt").write_text(str(gm.meta[MEMORY]) + "\n")
    return gm


def graph_text(gm: GraphModule) -> str:
    """Returns a graph as readable Python: shapes as comments, source lines above the code they gave."""
    return gm.print_readable(print_output=False) + "\n"
