"""Fusion: RMSNorm written out in float32 becomes PyTorch's one operator.

The usual code casts to float32, squares, averages, multiplies, casts back and scales: six kernels or more where
pieces run as FX. `torch.nn.functional.rms_norm` is one on a GPU, with the same float32 inside.

Changes numerics in 16-bit dtypes: the operator scales by the weight before it rounds, not after.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from .writes import may_write

_CASTS = ("to", "float", "type", "type_as", "half", "bfloat16")


def fuse_rms_norm(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Replaces ``weight * cast(h * rsqrt(mean(h ** 2, -1) + eps))`` by ``rms_norm``.

    Args:
        gm: A traced forward, before it is split; changed in place.
        example_inputs: Not used.

    Returns:
        The same module.
    """
    positions = {node: number for number, node in enumerate(gm.graph.nodes)}
    writes = [number for node, number in positions.items() if may_write(node)]
    for node in list(gm.graph.nodes):
        found = _match(node)
        if found is None:
            continue
        begin, end = positions[found.first], positions[found.last]
        if any(begin <= number <= end for number in writes):
            continue
        with gm.graph.inserting_before(found.last):
            shape = tuple(found.weight.meta["example_value"].shape)
            new = gm.graph.call_function(F.rms_norm, (found.x, shape, found.weight, found.epsilon))
        new.meta = dict(found.last.meta)
        found.last.replace_all_uses_with(new)
        _erase_unused(gm, found.last, keep={found.x, found.weight})
    gm.graph.lint()
    gm.recompile()
    return gm


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """A norm as it was found: what goes in, and its first and last node."""

    x: Node
    weight: Node
    epsilon: float
    first: Node
    last: Node


def _match(root: Node) -> _Norm | None:
    """Recognises the norm that ends with a node that takes a reciprocal square root."""
    if not _calls(root, "rsqrt"):
        return None
    shifted = root.args[0]
    if not isinstance(shifted, Node) or not _calls(shifted, "add") or len(shifted.args) != 2:
        return None
    mean, epsilon = shifted.args
    if not isinstance(epsilon, float) or not isinstance(mean, Node) or not _is_mean_of_last(mean):
        return None
    square = mean.args[0]
    if not isinstance(square, Node):
        return None
    h = _squared(square)
    scaled = _only_user(root)
    if h is None or scaled is None or not _calls(scaled, "mul") or set(scaled.all_input_nodes) != {h, root}:
        return None
    x = h.args[0] if _is_cast(h) else h
    last, weight = _scaled_by_weight(scaled)
    if last is None or weight is None or not isinstance(x, Node):
        return None
    if not _has_fitting_values(x, weight, last) or not (_is_float32(x) or _is_float32(h)):
        return None
    first = h if h is not x else square
    return _Norm(x=x, weight=weight, epsilon=epsilon, first=first, last=last)


def _scaled_by_weight(scaled: Node) -> tuple[Node | None, Node | None]:
    """Follows a normalised value through an optional cast to its product with the weight."""
    value: Node | None = scaled
    user = _only_user(scaled)
    if user is not None and _is_cast(user):
        value, user = user, _only_user(user)
    if user is None or value is None or not _calls(user, "mul"):
        return None, None
    others = [one for one in user.all_input_nodes if one is not value]
    return (user, others[0]) if len(others) == 1 else (None, None)


def _calls(node: Node, name: str) -> bool:
    """Tells whether a node calls an operator by one of its spellings."""
    if node.op == "call_method":
        return node.target == name
    return node.op == "call_function" and node.target in (
        getattr(torch, name, None),
        getattr(operator, name, None) if name in ("add", "mul", "pow") else None,
    )


def _is_mean_of_last(node: Node) -> bool:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    is_last = dim in (-1, (-1,), [-1])
    return _calls(node, "mean") and is_last and keepdim is True and "dtype" not in node.kwargs


def _squared(node: Node) -> Node | None:
    """Returns what a node squares, or None."""
    base = node.args[0] if node.args else None
    if not isinstance(base, Node):
        return None
    if _calls(node, "square") or (_calls(node, "pow") and len(node.args) == 2 and node.args[1] == 2):
        return base
    return base if _calls(node, "mul") and tuple(node.args) == (base, base) else None


def _is_cast(node: Node) -> bool:
    return node.op == "call_method" and node.target in _CASTS


def _has_fitting_values(x: Node, weight: Node, last: Node) -> bool:
    """Tells whether the operator takes these and gives what the code gave: one dtype, a weight per column."""
    value, scale, result = (node.meta.get("example_value") for node in (x, weight, last))
    if not (
        isinstance(value, torch.Tensor)
        and isinstance(scale, torch.Tensor)
        and isinstance(result, torch.Tensor)
    ):
        return False
    return (
        value.dtype == scale.dtype == result.dtype
        and value.shape == result.shape
        and scale.dim() == 1
        and scale.shape[0] == value.shape[-1]
    )


def _is_float32(node: Node) -> bool:
    return bool(node.meta["example_value"].dtype is torch.float32)


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _erase_unused(gm: GraphModule, last: Node, keep: set[Node]) -> None:
    """Erases the nodes of a norm that nothing uses any more, from its end; what goes in stays."""
    pending = [last]
    while pending:
        node = pending.pop()
        if node in keep or node.users or node.op == "placeholder":
            continue
        inputs = list(node.all_input_nodes)
        gm.graph.erase_node(node)
        pending += [one for one in inputs if one not in pending]
