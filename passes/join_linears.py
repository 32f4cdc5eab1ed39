"""Fusion: linear layers that share their input become one, over weights that lie side by side.

Query, key and value, or gate and up, of a decoder layer: one matrix product instead of three or two. The first
call moves the weights into one memory, of which each parameter is then a part, so nothing is kept twice, and a
parameter that is updated in place is seen by eager code and compiled code, captured or not. A parameter whose
memory is replaced later is moved again at the next compiled call; a recording notices that it moved.

Changes numerics: a larger matrix product may add up in another order.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from sgl_piecewise.runtime import torch_private

from .propagate import propagate
from .split_at_marks import stays_outside_pieces
from .writes import may_write

_logger = logging.getLogger(__name__)
_moving = threading.Lock()


def join_linears(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Joins linear layers that share their input, where nothing in between writes.

    Args:
        gm: A traced forward, before it is split; its graph is replaced.
        example_inputs: Not used.

    Returns:
        The same module. Where an operator refuses the strides that its input has now, nothing is joined, and a
        warning says so.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    joined = GraphModule(gm, graph)
    groups = list(_groups(joined))
    for group in groups:
        _join(graph, group)
    graph.lint()
    try:
        propagate(joined)
    except (RuntimeError, ValueError) as err:
        _logger.warning("No linear layers are joined: %s", str(err).splitlines()[0])
        return gm
    gm.graph = graph
    gm.recompile()
    return gm


def _groups(gm: GraphModule) -> Iterator[list[Node]]:
    """Yields linear layers of one input, in order."""
    groups: dict[Any, list[Node]] = {}
    stretch = 0  # Code without writes: a value is the same all along.
    for node in gm.graph.nodes:
        if may_write(node):
            stretch += 1
        elif node.op == "call_function" and node.target is F.linear:
            arguments = _arguments(node)
            if arguments is None:
                continue
            x, weight, bias = arguments
            dtype = weight.meta["example_value"].dtype
            groups.setdefault((x, bias is None, dtype, stretch), []).append(node)
    for group in groups.values():
        weights = [_weight(node) for node in group]
        if len(group) > 1 and len(set(weights)) == len(weights):
            yield group


def _arguments(node: Node) -> tuple[Node, Node, Node | None] | None:
    """Returns input, weight and bias of a linear layer, None unless the last two are parameters."""
    x, weight, bias = (*node.args, *node.kwargs.values(), None)[:3]
    if set(node.kwargs) - {"weight", "bias"} or not isinstance(x, Node) or not _is_parameter(weight, 2):
        return None
    if bias is not None and not _is_parameter(bias, 1):
        return None
    return x, weight, bias  # type: ignore[return-value]


def _weight(node: Node) -> Node:
    arguments = _arguments(node)
    assert arguments is not None
    return arguments[1]


def _is_parameter(node: Any, num_dims: int) -> bool:
    if not isinstance(node, Node) or node.op != "placeholder":
        return False
    value = node.meta.get("example_value")
    return isinstance(value, torch.nn.Parameter) and value.dim() == num_dims and value.is_contiguous()


def _join(graph: Graph, group: list[Node]) -> None:
    arguments = [_arguments(node) for node in group]
    x = group[0].args[0]
    weights = [one[1] for one in arguments if one is not None]
    biases = [one[2] for one in arguments if one is not None and one[2] is not None]
    sizes = [weight.meta["example_value"].shape[0] for weight in weights]
    with graph.inserting_before(group[0]):
        weight = graph.call_function(side_by_side, tuple(weights))
        bias = graph.call_function(side_by_side, tuple(biases)) if biases else None
        product = graph.call_function(F.linear, (x, weight) if bias is None else (x, weight, bias))
        parts = graph.call_function(torch.split, (product, sizes), {"dim": -1})
        for index, node in enumerate(group):
            part = graph.call_function(operator.getitem, (parts, index))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
        product.meta["stack_trace"] = group[0].meta.get("stack_trace")
    for node in group:
        graph.erase_node(node)


@stays_outside_pieces
def side_by_side(*parts: torch.Tensor) -> torch.Tensor:
    """Returns parameters as one tensor over their memory, which is moved first if it lies apart.

    Args:
        parts: Contiguous parameters that differ in dimension 0 at most.

    Returns:
        A view over all of them, in order along dimension 0; a write into a parameter is a write into it.
    """
    if any(torch_private.is_fake_type(type(part)) for part in parts):
        return torch.cat(parts)
    whole = _as_one(parts)
    if whole is None:
        with _moving:
            whole = _as_one(parts)
            if whole is None:
                _move_together(parts)
                whole = _as_one(parts)
    assert whole is not None
    return whole


def _as_one(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns the view, or None where the parameters do not lie side by side."""
    first = parts[0]
    memory, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != offset:
            return None
        offset += part.numel()
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _move_together(parts: Sequence[torch.Tensor]) -> None:
    """Copies parameters into one memory and makes them parts of it."""
    with torch.inference_mode(parts[0].is_inference()), torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        ends = accumulate(part.shape[0] for part in parts)
        for part, end in zip(parts, ends, strict=True):
            part.data = whole[end - part.shape[0] : end]
