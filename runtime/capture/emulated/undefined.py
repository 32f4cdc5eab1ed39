"""Runs an operator whose arguments hold undefined values, for the shapes of its results only.

While recording, memory that a graph would have written holds poison. CUDA looks at no value then;
a CPU operator may refuse one (an index out of range, a probability that is NaN). It is run again
on copies filled with harmless values: the results are undone at the end of the recording anyway.
"""

from __future__ import annotations

from typing import Any

import torch

# (for floating and complex types, for integers): indices want 0, divisors and counts want 1.
_HARMLESS = ((0.5, 0), (0.5, 1))


def run_on_defined_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """Runs ``func`` on stand-ins of its tensors.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
        error: What it raised on the real values; raised again if no stand-in helps.

    Returns:
        What the operator returns, with arguments in the place of their stand-ins.
    """
    for floating, integer in _HARMLESS:
        stand_ins = _StandIns(floating, integer)
        try:
            result = func(*stand_ins.put(args), **stand_ins.put(kwargs))
        except (RuntimeError, IndexError, ValueError):
            continue
        return stand_ins.take_back(result)
    raise error


class _StandIns:
    """Copies of tensors with other values; tensors that share a storage share one copy."""

    def __init__(self, floating: float, integer: int) -> None:
        self._floating = floating
        self._integer = integer
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def put(self, value: Any) -> Any:
        """Replaces the tensors in an argument."""
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        if isinstance(value, dict):
            return {name: self.put(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.put(item) for item in value)
        return value

    def take_back(self, result: Any) -> Any:
        """Puts the original where the operator returned an argument."""
        if isinstance(result, torch.Tensor):
            return self._originals.get(id(result), (result, result))[0]
        if isinstance(result, list | tuple):
            return type(result)(self.take_back(item) for item in result)
        return result

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage.clone()
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
        copy.fill_(self._floating if tensor.is_floating_point() or tensor.is_complex() else self._integer)
        self._originals[id(copy)] = (tensor, copy)
        return copy
