"""Whether a shared layer is still what a recording holds of it: asked at every call, since a replay runs no Python.

The guards of the forward around shared layers do not look into them, and those of a layer are asked where it is
run. So what could make a layer run otherwise is looked at here: guards of its traces, which modules it is made of, and
where their tensors lie. This module must not know what is done about a change.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_piecewise.runtime import torch_private_entries, tree

_values = operator.methodcaller("values")


class RecordedLayer:
    """What was seen of a layer while it was recorded. It holds neither the layer itself nor what it was called with.

    Args:
        layer: As it is now.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        modules = list(layer.modules())
        self._children = [module._modules for module in modules if module._modules]
        self._child_ids = self._ids()
        self._tensors = [
            values
            for module in modules
            for values in (module._parameters, module._buffers)
            if any(value is not None for value in values.values())
        ]
        self._attributes = [
            (vars(module), name)
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        ]
        self._addresses = self._places()
        self._guards: list[tuple[Callable[[dict[str, Any]], bool], _StandIns]] = []
        self._entries: list[tuple[torch_private_entries.CompiledEntry, Any]] = []

    def add(self, entry: torch_private_entries.CompiledEntry, arguments: dict[str, Any]) -> None:
        """Notes one call of the layer.

        Args:
            entry: What ran it.
            arguments: What it was called with, by the parameters of what ran it; other values at every call.
        """
        stand_ins = _StandIns(arguments)
        if (entry, stand_ins.forms) not in self._entries:
            self._entries.append((entry, stand_ins.forms))
            self._guards.append((entry.check_without(tuple(arguments)), stand_ins))

    def is_unchanged(self, values: dict[str, Any]) -> bool:
        """Tells whether the layer would run as it was recorded.

        Args:
            values: What it is run with by name, without the arguments that differ at every call.
        """
        if self._ids() != self._child_ids or self._places() != self._addresses:
            return False
        return all(holds({**values, **stand_ins.arguments()}) for holds, stand_ins in self._guards)

    def _ids(self) -> list[int]:
        """Returns which modules the layer is made of."""
        return list(map(id, itertools.chain.from_iterable(map(_values, self._children))))

    def _places(self) -> list[Any]:
        """Returns where the layer's tensors lie."""
        places: list[Any] = [
            value if value is None else value.data_ptr()
            for values in self._tensors
            for value in values.values()
        ]
        for attributes, name in self._attributes:
            value = attributes.get(name)
            places.append(value.data_ptr() if isinstance(value, torch.Tensor) else None)
        return places


class _StandIns:
    """Arguments with the sizes of those of a call, for guards that compare sizes: they cannot be left out.

    Args:
        arguments: Of the call, by name.

    Attributes:
        forms: What they are like, to compare.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        leaves, self._spec = tree.flatten(arguments)
        self._leaves = [_form(leaf) for leaf in leaves]
        self.forms = (self._spec, tuple(self._leaves))
        self._has_objects = any(isinstance(leaf, weakref.ref) for leaf in self._leaves)
        self._made: dict[str, Any] | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns them; not while something is captured, since they are made when first asked for."""
        if self._made is None:
            self._leaves = [leaf.make() if isinstance(leaf, _Form) else leaf for leaf in self._leaves]
        if self._made is None or self._has_objects:
            leaves = [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in self._leaves]
            self._made = tree.unflatten(self._spec, leaves)
        return self._made


@dataclass(frozen=True, kw_only=True)
class _Form:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _Form(shape=tuple(leaf.shape), stride=tuple(leaf.stride()), dtype=leaf.dtype)
    if leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device):
        return leaf
    try:
        return weakref.ref(leaf)
    except TypeError:
        return leaf
