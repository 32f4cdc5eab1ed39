"""Cuts a traced forward into pieces at its marked calls.

What stands between two marked calls becomes one submodule, a piece. Marked calls, the ``getitem`` nodes that
take their results apart, tensors the module holds, sizes that follow from the inputs, and what
`stays_outside_pieces` stay in the outer graph. The order of all nodes is kept and none is dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sgl_piecewise.runtime.errors import CompileError
from sgl_piecewise.runtime.mark_operator import is_marked_call

PIECE_PREFIX = "piece_"

_OUTSIDE_PIECES: set[Any] = set()


def stays_outside_pieces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps calls of a function of ours, whose arguments are inputs, out of pieces: it runs on the host."""
    _OUTSIDE_PIECES.add(function)
    return function


def split_at_marks(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Returns a module that calls pieces and marks in the order of the original.

    Args:
        gm: A traced forward, with ``example_value`` in each node's ``meta``.
        example_inputs: Not used.

    Returns:
        A new module. Pieces are submodules ``piece_0``, ``piece_1``, ..., take what they use in order of
        first use, and return a tuple of what is used after them. A forward without marks is one piece.

    Raises:
        CompileError: A value that no piece can hand on, such as an open context, crosses a marked call.
    """
    outer = Graph()
    root = torch.nn.Module()
    copies: dict[Node, Node] = {}
    pending: list[Node] = []
    num_pieces = 0

    def close_piece() -> None:
        nonlocal num_pieces
        if pending:
            _add_piece(gm, root, outer, copies, pending, f"{PIECE_PREFIX}{num_pieces}")
            num_pieces += 1
            pending.clear()

    for node in gm.graph.nodes:
        if node.op == "output" or is_marked_call(node.target):
            close_piece()
        if _stays_outside(node, gm, copies):
            copies[node] = outer.node_copy(node, lambda used: copies[used])
            if node.op == "get_attr":
                _copy_attribute(gm, root, node.target)
        else:
            pending.append(node)
    result = GraphModule(root, outer, class_name="SplitForward")
    result.graph.lint()
    return result


def pieces_of(gm: GraphModule) -> dict[str, GraphModule]:
    """Returns the pieces of a split module by name."""
    return {
        name: module
        for name, module in gm.named_children()
        if name.startswith(PIECE_PREFIX) and isinstance(module, GraphModule)
    }


def _stays_outside(node: Node, gm: GraphModule, copies: dict[Node, Node]) -> bool:
    if node.op in ("placeholder", "output") or is_marked_call(node.target):
        return True
    if node.op == "get_attr":
        return isinstance(_attribute(gm, str(node.target)), torch.Tensor)
    if any(used not in copies for used in node.all_input_nodes):
        return False
    if node.target in _OUTSIDE_PIECES:
        return True
    if node.target is operator.getitem:
        return is_marked_call(node.args[0].target)  # type: ignore[union-attr]
    return bool(node.all_input_nodes) and isinstance(node.meta.get("example_value"), int | torch.SymInt)


def _add_piece(
    gm: GraphModule,
    root: torch.nn.Module,
    outer: Graph,
    copies: dict[Node, Node],
    nodes: list[Node],
    name: str,
) -> None:
    """Moves nodes into a submodule and calls it from the outer graph."""
    inside = set(nodes)
    inputs = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    for node in outputs:
        _check_can_cross(node)
    graph = Graph()
    holder = torch.nn.Module()
    local: dict[Node, Node] = {}
    for index, node in enumerate(inputs):
        local[node] = graph.placeholder(f"input_{index}")
        local[node].meta = dict(node.meta)
    for node in nodes:
        local[node] = graph.node_copy(node, lambda used: local[used])
        if node.op in ("get_attr", "call_module"):
            _copy_attribute(gm, holder, str(node.target))
    graph.output(tuple(local[node] for node in outputs))
    piece = GraphModule(holder, graph, class_name=name)
    piece.graph.lint()
    root.add_module(name, piece)

    call = outer.call_module(name, tuple(copies[node] for node in inputs))
    call.meta["example_value"] = tuple(node.meta.get("example_value") for node in outputs)
    for index, node in enumerate(outputs):
        copies[node] = outer.call_function(operator.getitem, (call, index))
        copies[node].meta = dict(node.meta)


def _check_can_cross(node: Node) -> None:
    value = node.meta.get("example_value")
    values = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(item, torch.Tensor | torch.SymInt | int | float | bool) for item in values):
        raise CompileError(
            f"{node.format_node()} is used on both sides of a marked call, and pieces can only hand on tensors and "
            "numbers. If it is a context such as autocast, enter it inside the marked function, or end it before."
        )


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _copy_attribute(source: torch.nn.Module, target: torch.nn.Module, path: Any) -> None:
    """Makes ``target`` hold what ``source`` holds under a dotted path."""
    *folders, name = str(path).split(".")
    for folder in folders:
        if folder not in dict(target.named_children()):
            target.add_module(folder, torch.nn.Module())
        target = target.get_submodule(folder)
    value = _attribute(source, str(path))
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        target.register_buffer(name, value)
    else:
        setattr(target, name, value)
