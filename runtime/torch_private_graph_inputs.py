"""Private PyTorch APIs of a traced graph's inputs: what Dynamo says of them to a backend.

As in ``torch_private`` each piece is small, says what it relies on, and knows nothing of the rest of the
library; tried on 2.11 and 2.13. Only what runs while something is compiled imports this file.
"""

from __future__ import annotations

import re
from typing import Any

from torch._dynamo.source import TensorPropertySource

from .torch_private_tracing import CallSource, source_name


def is_handle_input(node: Any) -> bool:
    """Tells whether a graph input is a handle that `node_argument` made."""
    argument = node.meta.get("grapharg")
    return argument is not None and isinstance(argument.source, CallSource)


MODULE_PART = "._modules["
"""What stands in the path of something that belongs to a module."""


def argument_path(node: Any) -> str | None:
    """Names the argument of the traced function that a graph input is, as in ``x``, ``batch.ids`` or ``kwargs['x']``.

    None for what is no argument, and no part of one.
    """
    argument = node.meta.get("grapharg")
    if argument is None or isinstance(argument.source, CallSource):
        return None
    found = re.fullmatch(r"L\['(\w+)'\](.*)", source_name(argument.source))
    return None if found is None else "".join(found.groups())


def number_of_caller(node: Any) -> str | None:
    """Names the Python number that a graph input is, which Dynamo hands over as a host tensor; None for others."""
    argument = node.meta.get("grapharg")
    if argument is None or not argument.pass_arg_as_tensor:
        return None
    return argument_path(node) or str(node.target)


def is_tensor_size(node: Any) -> bool:
    """Tells whether a graph input is the size of another: no number that somebody passes."""
    argument = node.meta.get("grapharg")
    return argument is not None and isinstance(argument.source, TensorPropertySource)


def forget_traced_inputs(graph: Any) -> None:
    """Lets go of the real values that a graph was traced with: handles would live as long as compiled code."""
    for node in graph.nodes:
        node.meta.pop("grapharg", None)


def is_static_input(node: Any) -> bool:
    """Tells whether Dynamo takes a graph input for a tensor that stays where it is.

    Those are parameters, buffers and other tensors that a module holds, and what was given to
    ``torch._dynamo.mark_static_address``.
    """
    return (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None
