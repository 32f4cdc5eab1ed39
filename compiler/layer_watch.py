"""Whether a shared layer is still what a recording holds of it: asked at every call, since a replay runs no Python.

The guards of the forward around shared layers do not look into them, and those of a layer are asked where it is
run. So what could make a layer run otherwise is looked at here: guards of its traces, which modules it is made of, and
where their tensors lie. This module must not know what is done about a change.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch

from sgl_piecewise.runtime import torch_private_entries

_values = operator.methodcaller("values")


class RecordedLayer:
    """What was seen of a layer while it was recorded. It does not hold the layer itself.

    Args:
        layer: As it is now.
        entries: What ran it.
        arguments: Names of the parameters of what ran it that are other values at every call.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        entries: list[torch_private_entries.CompiledEntry],
        arguments: tuple[str, ...],
    ) -> None:
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
        self._guards = [entry.check_without(arguments) for entry in entries]

    def is_unchanged(self, values: dict[str, Any]) -> bool:
        """Tells whether the layer would run as it was recorded.

        Args:
            values: What it is run with by name, without the arguments that differ at every call.
        """
        if self._ids() != self._child_ids or self._places() != self._addresses:
            return False
        return all(holds(values) for holds in self._guards)

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
