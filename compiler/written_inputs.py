"""Which inputs of a split forward may be written: found by running each distinct piece on fake tensors once.

Marked calls count as writing every tensor that they are given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_piecewise.passes.split_at_marks import pieces_of
from sgl_piecewise.runtime import torch_private, torch_private_compiling, tree
from sgl_piecewise.runtime.mark_operator import is_marked_call

_logger = logging.getLogger(__name__)

# Operators that give a tensor other memory or another shape; views in place have a tag.
_RESHAPING = ("aten::set_", "aten::resize_", "aten::resize_as_")


@dataclass(kw_only=True)
class Writes:
    """What a forward may do to its inputs.

    Attributes:
        written: Places of inputs whose memory it may write.
        reshaped: Places of inputs whose shape or memory it changes in place.
    """

    written: set[int] = field(default_factory=set)
    reshaped: set[int] = field(default_factory=set)


class _Watch(TorchDispatchMode):
    """Notes the storages that operators write, and the tensors whose form they change."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.reshaped: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch_private.is_higher_order(func):
            # What its body does to tensors is its own business.
            written = tree.flatten((args, kwargs))[0]
        elif torch.Tag.inplace_view in func.tags or func._schema.name in _RESHAPING:
            self.reshaped.append(args[0])
            written = [args[0]]
        else:
            written = torch_private.written_arguments(func, args, kwargs)
        for tensor in written:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self.storages.add(torch_private.storage_key(tensor))
        return func(*args, **kwargs)


def writes_of(split: GraphModule) -> Writes:
    """Returns what a split forward may do to its inputs.

    Args:
        split: Pieces and marked calls, before the pieces are compiled.
    """
    pieces = {name: (piece, _Result()) for name, piece in pieces_of(split).items()}
    places: dict[int, set[int]] = {}
    inputs = [node for node in split.graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(inputs):
        for key in _storage_keys(node):
            places.setdefault(key, set()).add(index)
    writes = Writes()
    for node in split.graph.nodes:
        if is_marked_call(node.target):
            touched: Sequence[Any] = node.args[0]
        elif node.op == "call_module":
            piece, result = pieces[str(node.target)]
            result.fill(str(node.target), piece, node)
            touched = [node.args[index] for index in result.written]
            writes.reshaped.update(
                inputs.index(node.args[index]) for index in result.reshaped if node.args[index] in inputs
            )
        else:
            continue
        for value in touched:
            for key in _storage_keys(value):
                writes.written |= places.get(key, set())
    return writes


class _Result:
    """What one piece does to its inputs, found at its first call."""

    def __init__(self) -> None:
        self.is_known = False
        self.written: list[int] = []
        self.reshaped: list[int] = []

    def fill(self, name: str, piece: GraphModule, call: Node) -> None:
        if self.is_known:
            return
        self.is_known = True
        values = [
            value.meta.get("example_value") if isinstance(value, Node) else value for value in call.args
        ]
        examples = torch_private_compiling.example_inputs(values)
        watch = _Watch()
        try:
            with (
                torch.inference_mode(False),
                torch_private_compiling.on_fake_tensors_of(examples) as fakes,
                watch,
            ):
                piece(*fakes)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            _logger.info("%s cannot run on fake tensors (%s): all its inputs count as written", name, error)
            self.written = [i for i, value in enumerate(examples) if isinstance(value, torch.Tensor)]
            return
        for index, value in enumerate(examples):
            if isinstance(value, torch.Tensor):
                if value.layout is torch.strided and torch_private.storage_key(value) in watch.storages:
                    self.written.append(index)
                if any(value is one for one in watch.reshaped):
                    self.reshaped.append(index)


def _storage_keys(value: Any) -> list[int]:
    example = value.meta.get("example_value") if isinstance(value, Node) else None
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return []
    return [torch_private.storage_key(example)]
