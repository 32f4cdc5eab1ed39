"""What tests of the compile axis share: graphs as text, recorded traces, noted breaks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

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
    """Writes a module as text: one node a line, then each piece."""
    lines = [_node_text(node) for node in gm.graph.nodes]
    for name, piece in gm.named_children():
        if isinstance(piece, GraphModule):
            lines.append(f"{name}:")
            lines += [f"  {_node_text(node)}" for node in piece.graph.nodes]
    return "\n".join(lines)


def _node_text(node: Any) -> str:
    if node.op == "placeholder":
        return f"{node.name} = input"
    arguments = ", ".join(
        [str(value) for value in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
    )
    if node.op == "output":
        return f"return {node.args[0]}"
    target = str(node.target) if isinstance(node.target, str) else node.target.__name__
    target = re.sub(r"\.default$", "", target)
    return f"{node.name} = {target}({arguments})"
