"""Which nodes of a traced forward may write into a tensor that exists."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from sgl_piecewise.runtime import torch_private
from sgl_piecewise.runtime.mark_operator import is_marked_call

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift",
        "isub", "itruediv", "ixor", "setitem",
    )
)  # fmt: skip


def may_write(node: Node) -> bool:
    """Tells whether a node may change a tensor that exists; says so where it is not known.

    Known are PyTorch's names: what writes ends in an underscore, gets ``out=`` or ``inplace=True``, or says so
    in its schema. A marked call may write any of its arguments.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op == "call_module" or is_marked_call(node.target) or node.kwargs.get("out") is not None:
        return True
    if _is_true(node.kwargs.get("inplace", False)) or node.target in _IN_PLACE_OPERATORS:
        return True
    target: Any = node.target
    if torch_private.is_overload(target):
        return bool(target._schema.is_mutable)
    if node.op == "call_method":
        return _ends_like_a_write(str(node.target))
    module = getattr(node.target, "__module__", None) or ""
    name = getattr(node.target, "__name__", "")
    if module == "torch.nn.functional" and any(value is True for value in node.args):
        return True  # relu(x, True)
    is_known = module.startswith(("torch", "_operator", "builtins", "math")) or isinstance(
        node.target, type(torch.add)
    )
    return not is_known or _ends_like_a_write(name)


def _is_true(value: Any) -> bool:
    return value is not False


def _ends_like_a_write(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
