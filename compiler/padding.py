"""Whether calls of a compiled forward may be padded to a capture size, and how, from the sizes in its trace.

Sound is: the dimension is symbolic, no tensor or number follows it that was not named, and every output can be
cut back. All else is a reason, which the statistics of calls show.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sgl_piecewise.runtime import torch_private_graph_inputs, torch_private_sizes
from sgl_piecewise.runtime.capture.call_padding import (
    EXPANDED,
    NAMED_DIFFER,
    NO_NAMED_INPUT,
    NOT_SYMBOLIC,
    NUMBER,
    ROWS_NOT_APART,
    UNNAMED_INPUT,
    VIEW_OUTPUT,
    CallPadding,
    Form,
)
from sgl_piecewise.runtime.capture.call_policy import CallPolicy
from sgl_piecewise.runtime.capture.captured import UNCUTTABLE_OUTPUT
from sgl_piecewise.runtime.capture.flat_inputs import InputFacts
from sgl_piecewise.runtime.capture.input_leaf import check_pad_value
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.torch_private import storage_key

from .padded_rows import what_padded_rows_may_reach

_logger = logging.getLogger(__name__)


class _UnsoundError(Exception):
    """Why a forward cannot be padded; the message is the reason."""


def reach_of_padding(split: GraphModule, facts: InputFacts, policy: CallPolicy) -> str | None:
    """Returns what padded rows may reach, as `what_padded_rows_may_reach`; None where that is not asked.

    Args:
        split: Pieces and marked calls, before the pieces are compiled.
        facts: Of its inputs.
        policy: With the named dimensions.

    Raises:
        ConfigError: A dimension that a named input cannot have.
    """
    if policy.dynamic_dims is None or policy.padded_rows != "checked":
        return None
    inputs = [node for node in split.graph.nodes if node.op == "placeholder"]
    for index, name in _named_inputs(inputs, facts, policy.dynamic_dims)[0].items():
        example = _example(inputs[index])
        try:
            size = example.shape[_named_dim(name, policy.dynamic_dims[name], example)]
        except _UnsoundError:
            return None  # Told as what it is once the pieces are compiled.
        symbol = torch_private_sizes.symbol_of(size)
        return None if symbol is None else what_padded_rows_may_reach(split, symbol)
    return None


def padding_of(
    split: GraphModule, facts: InputFacts, policy: CallPolicy, reached: str | None = None
) -> CallPadding | str | None:
    """Returns how calls are padded, or why they are not; None where nobody asked for it.

    Args:
        split: Pieces and marked calls, all compiled by now or none.
        facts: Of its inputs.
        policy: With the named dimensions.
        reached: From `reach_of_padding`.

    Raises:
        ConfigError: A dimension or a pad value that a named input cannot have.
    """
    if policy.dynamic_dims is None:
        return None
    try:
        padding = _padding_of(split, facts, policy, policy.dynamic_dims)
    except _UnsoundError as unsound:
        return str(unsound)
    if reached is not None:
        _logger.warning(
            "Calls are not padded, because padded rows may reach what eager does not have: %s. If they do no harm in "
            "this model (they are masked, or a marked function knows them), say so with padded_rows='trusted'.",
            reached,
        )
        return ROWS_NOT_APART
    return padding


def _padding_of(
    split: GraphModule, facts: InputFacts, policy: CallPolicy, named: Mapping[str, int]
) -> CallPadding:
    inputs = [node for node in split.graph.nodes if node.op == "placeholder"]
    names, paths = _named_inputs(inputs, facts, named)
    if not names:
        _logger.warning(
            "dynamic_dims names %s; tensors that a compiled forward takes are %s: its calls are not padded.",
            ", ".join(map(repr, named)),
            ", ".join(map(repr, paths)) or "no arguments",
        )
        raise _UnsoundError(NO_NAMED_INPUT)
    dims = {index: _named_dim(name, named[name], _example(inputs[index])) for index, name in names.items()}
    sizes = {index: _example(inputs[index]).shape[dim] for index, dim in dims.items()}
    symbols = {torch_private_sizes.symbol_of(size) for size in sizes.values()}
    if None in symbols:
        raise _UnsoundError(NOT_SYMBOLIC)
    if len(symbols) > 1:
        raise _UnsoundError(NAMED_DIFFER)
    (symbol,) = symbols
    places = {
        torch_private_sizes.symbol_of(_example(inputs[index])): index
        for index in facts.keyed
        if torch_private_sizes.symbol_of(_example(inputs[index])) is not None
    }
    numbers = [
        index
        for index in facts.keyed
        if torch_private_sizes.symbol_of(_example(inputs[index])) == symbol
        and torch_private_graph_inputs.is_tensor_size(inputs[index])
    ]
    _refuse_followers(inputs, facts, symbol, dims, numbers)
    pad_values = {}
    for index, name in names.items():
        if name in (policy.pad_values or {}):
            pad_values[index] = (policy.pad_values or {})[name]
            check_pad_value(name, pad_values[index], _example(inputs[index]).dtype)
    guards = torch_private_sizes.SizeGuards(next(iter(sizes.values())))

    def values_at(args: Sequence[Any], size: int) -> dict[Any, int]:
        return {one: size if one == symbol else args[index] for one, index in places.items()}

    return CallPadding(
        size=numbers[0],
        sizes=tuple(numbers),
        dims=dims,
        pad_values=pad_values,
        output_dims=tuple(_output_dims(split, symbol, [inputs[index] for index in dims])),
        forms=_forms({index: _example(inputs[index]) for index in dims}, values_at),
        admits=lambda args, size: guards.hold_at(symbol, values_at(args, size)),
    )


def _example(node: Node) -> Any:
    return node.meta.get("example_value")


def _named_inputs(
    inputs: Sequence[Node], facts: InputFacts, named: Collection[str]
) -> tuple[dict[int, str], list[str]]:
    """Returns the name that stands for each input that is named, by place, and the paths of all inputs.

    That is its path from an argument of the traced function, or just its key where it came in a ``**kwargs``.
    """
    names: dict[int, str] = {}
    paths: list[str] = []
    for index in facts.copied:
        path = torch_private_graph_inputs.argument_path(inputs[index])
        if path is None or torch_private_graph_inputs.MODULE_PART in path:
            continue
        paths.append(path)
        keyword = re.fullmatch(r"\w+\['(\w+)'\]", path)
        for name in (path, *(keyword.groups() if keyword else ())):
            if name in named:
                names[index] = name
                break
    return names, paths


def _named_dim(name: str, dim: int, value: torch.Tensor) -> int:
    """Returns the named dimension of an input, counted from 0."""
    if not -value.dim() <= dim < value.dim():
        raise ConfigError(
            f"dynamic_dims[{name!r}] is {dim}, but its shape is {tuple(map(str, value.shape))}. Dimensions count "
            "from 0, or backwards from -1."
        )
    if type(value.stride(dim)) is int and value.stride(dim) == 0:
        raise _UnsoundError(EXPANDED)
    return dim % value.dim()


def _refuse_followers(
    inputs: Sequence[Node], facts: InputFacts, symbol: Any, dims: Mapping[int, int], numbers: Sequence[int]
) -> None:
    """Raises for an input, but the padded dimensions and the size itself, that follows the size."""
    if not numbers:
        raise _UnsoundError(NUMBER)
    for index, node in enumerate(inputs):
        value = _example(node)
        if symbol not in torch_private_sizes.free_symbols(value) or index in numbers:
            continue
        if not isinstance(value, torch.Tensor):
            raise _UnsoundError(NUMBER)
        following = [
            dim for dim, size in enumerate(value.shape) if symbol in torch_private_sizes.free_symbols(size)
        ]
        if following != [dims.get(index)] or index in facts.varying:
            raise _UnsoundError(UNNAMED_INPUT)
    if set(dims) & set(facts.varying):
        raise _UnsoundError(UNNAMED_INPUT)


def _output_dims(split: GraphModule, symbol: Any, padded: Sequence[Node]) -> list[int | None]:
    """Returns the dimension of each output that follows the size."""
    (output,) = (node for node in split.graph.nodes if node.op == "output")
    memory = {storage_key(_example(node)) for node in padded if _example(node).layout is torch.strided}
    dims: list[int | None] = []
    for node in output.args[0]:
        value = _example(node) if isinstance(node, Node) else node
        if not isinstance(value, torch.Tensor):
            if symbol in torch_private_sizes.free_symbols(value):
                raise _UnsoundError(UNCUTTABLE_OUTPUT)
            dims.append(None)
            continue
        following = [
            dim for dim, size in enumerate(value.shape) if symbol in torch_private_sizes.free_symbols(size)
        ]
        if len(following) > 1 or any(
            torch_private_sizes.symbol_of(value.shape[dim]) != symbol for dim in following
        ):
            raise _UnsoundError(UNCUTTABLE_OUTPUT)
        if node not in padded and value.layout is torch.strided and storage_key(value) in memory:
            raise _UnsoundError(VIEW_OUTPUT)
        dims.append(following[0] if following else None)
    return dims


def _forms(
    examples: Mapping[int, torch.Tensor], values_at: Callable[[Sequence[Any], int], dict[Any, int]]
) -> Callable[[Sequence[Any], int], dict[int, Form]]:
    """Returns what gives the form of each padded input at a size; it keeps no tensor of the trace alive."""
    at = {
        index: (
            tuple(map(torch_private_sizes.size_expression, value.shape)),
            tuple(map(torch_private_sizes.size_expression, value.stride())),
        )
        for index, value in examples.items()
    }

    def at_size(args: Sequence[Any], size: int) -> dict[int, Form]:
        values = values_at(args, size)
        found: dict[int, Form] = {}
        for index, (shape, strides) in at.items():
            found[index] = (
                tuple(torch_private_sizes.value_at(one, values) for one in shape),
                tuple(torch_private_sizes.value_at(one, values) for one in strides),
            )
        return found

    return at_size
