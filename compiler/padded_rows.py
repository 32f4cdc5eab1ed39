"""Whether rows that a call is padded with can reach anything else, shown from the operators of its trace.

One invariant is followed through a forward: whatever has the size in its shape has it as it is, and its row ``i``
comes from row ``i`` of the inputs, or rows before it; whatever does not have it comes from no padded row. The
operators that keep it are in `padded_row_rules`. All others end the search: what is not known is not sound. Marked
functions are not looked into, so they end it as well.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sgl_piecewise.passes.run_on_fakes import run_on_fakes
from sgl_piecewise.passes.split_at_marks import pieces_of
from sgl_piecewise.runtime import torch_private, torch_private_compiling, torch_private_sizes, tree
from sgl_piecewise.runtime.capture.user_code import traced_user_line
from sgl_piecewise.runtime.mark_operator import is_marked_call

from .padded_row_rules import SHOWN_WHOLE, UNKNOWN, OperatorCall, rule_of


def what_padded_rows_may_reach(split: GraphModule, symbol: Any) -> str | None:
    """Returns what keeps a forward from being padded: an operator with its source line; None where nothing does.

    Args:
        split: Pieces and marked calls, before the pieces are compiled.
        symbol: The size that would be padded.
    """
    pieces = pieces_of(split)
    # Memory that has no such rows, which eager would leave alone where a padded row is written.
    fixed = {
        torch_private.storage_key(value)
        for node in split.graph.nodes
        for value in _values(node)
        if _is_strided(value) and symbol not in _shape_symbols(value)
    }
    done: set[tuple[str, str]] = set()
    for node in split.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
            continue
        values = [
            value.meta.get("example_value") if isinstance(value, Node) else value for value in node.args
        ]
        if node.op == "call_module" and str(node.target) in pieces:
            key = (str(node.target), str([_shape(value) for value in values]))
            if key not in done:
                done.add(key)
                reached = _follow(pieces[str(node.target)], values, symbol, fixed)
                if reached is not None:
                    return reached
        elif is_marked_call(node.target):
            if any(
                symbol in _any_symbols(one) for used in (node, *node.all_input_nodes) for one in _values(used)
            ):
                return _at(node, "a marked function or shared layer, which is not looked into")
        elif any(isinstance(one, torch.Tensor) for one in _values(node)):
            return _at(node, str(node.target))
    return None


def _follow(piece: GraphModule, values: Sequence[Any], symbol: Any, fixed: Collection[int]) -> str | None:
    """Follows the rows through one piece; returns the operator through which they may get out, or None."""
    examples = torch_private_compiling.example_inputs(values)
    memory = _Memory()
    reached: list[str] = []
    for value, example in zip(values, examples, strict=True):
        if _is_strided(value):
            is_fixed = torch_private.storage_key(value) in fixed
            memory.note(example, has_rows=not is_fixed and symbol in _shape_symbols(value))

    def observe(node: Node, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = [one for one in tree.flatten(result)[0] if isinstance(one, torch.Tensor)]
        given = tree.flatten((args, kwargs))[0]
        if not reached and any(symbol in _any_symbols(one) for one in (*given, *found)):
            why = _why_not(func, args, kwargs, given, found, symbol, memory)
            if why is not None:
                reached.append(_at(node, f"{func}: {why}"))
        for one in found:
            if _is_strided(one):
                memory.note(one, has_rows=symbol in _shape_symbols(one))

    with torch.inference_mode():  # Elsewhere composite operators are taken apart before anybody sees them.
        run_on_fakes(piece, examples, observe, shown_whole=SHOWN_WHOLE)
    return reached[0] if reached else None


def _why_not(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Sequence[Any],
    found: Sequence[torch.Tensor],
    symbol: Any,
    memory: _Memory,
) -> str | None:
    """Returns why an operator does not keep the invariant; None where it does."""
    if not torch_private.is_overload(func):
        return UNKNOWN
    for one in (*given, *found):
        if isinstance(one, torch.Tensor):
            for size in one.shape:
                if symbol in _any_symbols(size) and torch_private_sizes.symbol_of(size) != symbol:
                    return f"a tensor of it has the size {size}"
    for one in torch_private.written_arguments(func, args, kwargs):
        if symbol in _shape_symbols(one) and not memory.has_rows(one):
            return "it writes padded rows into memory that has none"
    call = OperatorCall(func, args, kwargs, found, symbol)
    rule = rule_of(func)
    if rule is None:
        return UNKNOWN
    for name, value in call.arguments.items():
        numbers = [one for one in tree.flatten(value)[0] if not isinstance(one, torch.Tensor)]
        if name not in rule.sizes and any(symbol in _any_symbols(one) for one in numbers):
            return f"its {name} is a number that follows the size"
    return None if rule.check is None else rule.check(call)


class _Memory:
    """Which memory was made to have the rows: only that may be written through a tensor that has them."""

    def __init__(self) -> None:
        self._has_rows: dict[int, bool] = {}
        self._held: list[torch.Tensor] = []  # A storage's identity is its own while it lives.

    def note(self, tensor: torch.Tensor, *, has_rows: bool) -> None:
        """Takes memory that is new; a view of what is known changes nothing."""
        key = torch_private.storage_key(tensor)
        if key not in self._has_rows:
            self._held.append(tensor)
            self._has_rows[key] = has_rows

    def has_rows(self, tensor: torch.Tensor) -> bool:
        return _is_strided(tensor) and self._has_rows.get(torch_private.storage_key(tensor), False)


def _at(node: Node, what: str) -> str:
    return f"{what}, at {traced_user_line(node.stack_trace)}"


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _values(node: Node) -> list[Any]:
    return tree.flatten(node.meta.get("example_value"))[0]


def _shape(value: Any) -> Any:
    return tuple(map(str, value.shape)) if isinstance(value, torch.Tensor) else str(value)


def _shape_symbols(tensor: torch.Tensor) -> set[Any]:
    return set().union(*(_any_symbols(size) for size in tensor.shape))


def _any_symbols(value: Any) -> set[Any]:
    """Returns the symbols of a number, or of a tensor's shape."""
    return (
        _shape_symbols(value) if isinstance(value, torch.Tensor) else torch_private_sizes.free_symbols(value)
    )
