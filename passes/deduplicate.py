"""Makes equal pieces one, so that equal layers compile once.

Two pieces are equal when their keys are: operators, how values flow, constants, and of each input the shape,
strides, dtype, device and which inputs share memory. Parameters are inputs, so their values do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sgl_piecewise.runtime import torch_private

from .split_at_marks import pieces_of


def deduplicate(gm: GraphModule, example_inputs: Sequence[Any], *, options_text: str = "") -> GraphModule:
    """Calls the first of equal pieces in place of every other.

    Args:
        gm: A split module; changed in place.
        example_inputs: Not used.
        options_text: What else decides how a piece is compiled.

    Returns:
        The same module, with pieces that nothing calls taken out.
    """
    first: dict[str, str] = {}
    replaced: dict[str, str] = {}
    for name, piece in pieces_of(gm).items():
        replaced[name] = first.setdefault(piece_text(piece, options_text), name)
    if len(first) == len(replaced):
        return gm
    for node in gm.graph.nodes:
        if node.op == "call_module":
            node.target = replaced.get(str(node.target), node.target)
    for name, kept in replaced.items():
        if name != kept:
            delattr(gm, name)
    gm.graph.lint()
    gm.recompile()
    return gm


def piece_text(piece: GraphModule, options_text: str = "") -> str:
    """Returns all that decides what a piece compiles to, as text; equal for equal pieces of one trace."""
    numbers: dict[Node, int] = {}
    storages: dict[int, int] = {}
    lines = [f"options {options_text}"]
    for number, node in enumerate(piece.graph.nodes):
        numbers[node] = number
        if node.op == "placeholder":
            lines.append(f"%{number} = input {_value_text(node.meta.get('example_value'), storages)}")
            continue
        target = _target_text(piece, node)
        arguments = ", ".join(_argument_text(piece, value, numbers) for value in node.args)
        keywords = ", ".join(
            f"{key}={_argument_text(piece, value, numbers)}" for key, value in node.kwargs.items()
        )
        lines.append(f"%{number} = {node.op} {target}({arguments}; {keywords})")
    return "\n".join(lines)


def _value_text(value: Any, storages: dict[int, int]) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    memory = ""
    if value.layout is torch.strided:
        group = storages.setdefault(torch_private.storage_key(value), len(storages))
        memory = f" memory {group} at {value.storage_offset()}"
    return (
        f"{value.dtype}{list(value.shape)} strides {list(value.stride())} on {value.device} {value.layout}"
        f" grad {value.requires_grad} lazy {value.is_conj()} {value.is_neg()}{memory}"
    )


def _target_text(piece: GraphModule, node: Node) -> str:
    if node.op in ("get_attr", "call_module"):
        return f"{node.target} {_identity(piece, str(node.target))}"
    if isinstance(node.target, str):
        return node.target
    # Two callables may have one name, so which object it is counts.
    name = getattr(node.target, "__qualname__", None) or str(node.target)
    return f"{getattr(node.target, '__module__', '')}.{name} #{id(node.target)}"


def _identity(piece: GraphModule, path: str) -> str:
    value: Any = piece
    for part in path.split("."):
        value = getattr(value, part)
    return f"#{id(value)}"


def _argument_text(piece: GraphModule, value: Any, numbers: dict[Node, int]) -> str:
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if isinstance(value, list | tuple):
        items = ", ".join(_argument_text(piece, item, numbers) for item in value)
        return f"{type(value).__name__}({items})"
    if isinstance(value, dict):
        items = ", ".join(f"{key!r}: {_argument_text(piece, item, numbers)}" for key, item in value.items())
        return f"dict({items})"
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return f"slice({', '.join(_argument_text(piece, part, numbers) for part in parts)})"
    if isinstance(value, torch.SymInt | int | float | complex | bool | str | bytes | type(None)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    return f"{type(value).__name__} {value!r} #{id(value)}"
