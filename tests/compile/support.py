"""What tests of the compile axis share: graphs as text, recorded traces, noted breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from sgl_piecewise.runtime.mark import MarkedFunction, use_capture
from sgl_piecewise.runtime.mark_operator import is_marked_call


class Traces:
    """A Dynamo backend that keeps each trace and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm.graph.lint()
        self.graphs.append(gm)
        return gm.forward

    @property
    def num_marked_calls(self) -> list[int]:
        """Marked calls of each trace."""
        return [sum(is_marked_call(node.target) for node in gm.graph.nodes) for gm in self.graphs]


class NotedBreaks:
    """An active capture that notes marked calls and runs them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def call_marked(self, mark: MarkedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(mark.name)
        with use_capture(None):
            return mark.fn(*args, **kwargs)


@contextlib.contextmanager
def noted_breaks() -> Iterator[list[str]]:
    """Notes the marks that the block calls."""
    noted = NotedBreaks()
    with use_capture(noted):
        yield noted.names


def compiled(fn: Callable[..., Any], **options: Any) -> Any:
    """Compiles with our backend, in one trace."""
    return torch.compile(fn, backend="sgl_piecewise", fullgraph=True, options=options)


def graph_text(gm: GraphModule) -> str:
    """Writes a module as text: one node a line, values numbered, then each piece.

    Names that Dynamo gives differ between versions.
    """
    lines = _graph_lines(gm.graph)
    for name, piece in gm.named_children():
        if isinstance(piece, GraphModule):
            lines.append(f"{name}:")
            lines += [f"  {line}" for line in _graph_lines(piece.graph)]
    return "\n".join(lines)


def _graph_lines(graph: Graph) -> list[str]:
    names = {node: f"v{number}" for number, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda used: _Name(names[used]))
        shown = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        target = str(node.target) if isinstance(node.target, str) else node.target.__name__
        if node.op == "placeholder":
            lines.append(f"{names[node]} = input")
        elif node.op == "output":
            lines.append(f"return {shown}")
        else:
            lines.append(f"{names[node]} = {target.removesuffix('.default')}({shown})")
    return lines


class _Name(str):
    """A string whose repr is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
