"""A marked call as one operator: what a compiler sees, and what runs in its place.

``sgl_piecewise::marked_call_N`` takes the call's tensors, handles of its other objects (the first is the
mark), its symbolic integers, and a signature: a text that names a `CallSite`, which says how arguments and
results fit together; N counts the tensors it returns. The operator calls the mark as usual, so a capture
breaks there. Nothing here knows Dynamo; `mark_tracing` makes the call sites.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .mark_call_site import call_site
from .mark_handles import object_of

SHAPE_ONLY = "sgl_piecewise_shape_only"
"""Key in the ``meta`` of nodes that a mark's ``fake`` left in a graph; nothing needs their values."""


def call_marked(
    tensors: Sequence[torch.Tensor], handles: Sequence[torch.Tensor], ints: Sequence[int], signature: str
) -> list[torch.Tensor]:
    """Calls the mark.

    Args:
        tensors: Tensor arguments; the body may write them.
        handles: Of the mark and of the call's object arguments.
        ints: Integer arguments that were symbolic in the trace.
        signature: Names the call site.

    Returns:
        The fresh tensors of the result, in its order.
    """
    site = call_site(signature)
    mark, *objects = [object_of(handle) for handle in handles]
    return site.fresh_results(site.call(mark, tensors, objects, ints), tensors, ints)


def _fake_marked_call(
    tensors: Sequence[torch.Tensor], handles: Sequence[torch.Tensor], ints: Sequence[Any], signature: str
) -> list[torch.Tensor]:
    """Shapes of the results. Handles are not read: that would be a guard on each object."""
    fresh = [leaf.fresh for leaf in call_site(signature).result_leaves]
    return [one.empty(tensors, ints) for one in fresh if one is not None]


_LIBRARY = torch.library.Library("sgl_piecewise", "DEF")


@functools.cache
def operator_returning(num_fresh: int) -> Any:
    """Returns the operator for calls whose result has so many fresh tensors, as a graph's node has it for target.

    One operator per number: functionalization takes operators that write their arguments only where they
    return tensors one by one. All arguments count as written, the handles too: a body may write any tensor,
    and so no compiler drops a call or swaps two.
    """
    name = f"marked_call_{num_fresh}"
    returns = "Tensor" if num_fresh == 1 else f"({', '.join(['Tensor'] * num_fresh)})"
    _LIBRARY.define(
        f"{name}(Tensor(a!)[] tensors, Tensor(b!)[] handles, SymInt[] ints, str signature) -> {returns}"
    )
    body = _unpacked(call_marked, num_fresh)
    body.__name__ = name
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    fake = _unpacked(_fake_marked_call, num_fresh)
    torch.library.register_fake(f"sgl_piecewise::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.sgl_piecewise, name).default
    _OPERATORS[operator] = body
    torch.fx.node.has_side_effect(operator)
    return operator


def _unpacked(function: Callable[..., list[torch.Tensor]], num_fresh: int) -> Callable[..., Any]:
    """Makes a function return what the operator's schema says."""
    if num_fresh == 1:
        return lambda *args: function(*args)[0]
    return lambda *args: tuple(function(*args)) if num_fresh else (function(*args), None)[1]


_OPERATORS: dict[Any, Callable[..., Any]] = {}


def is_marked_call(target: Any) -> bool:
    """Tells whether a node with this target is a marked call."""
    return target in _OPERATORS


def body_of(target: Any) -> Callable[..., Any]:
    """Returns what a marked call's operator runs, to be called without the dispatcher."""
    return _OPERATORS[target]
