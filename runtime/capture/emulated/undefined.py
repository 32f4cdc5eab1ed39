"""Stand-ins for undefined values, for runs that only have to give shapes.

While recording, memory that a graph would have written holds poison. CUDA looks at no value then;
code on a CPU may refuse one (an index out of range, a probability that is NaN). It is then run on
copies filled with harmless values: all results are undone at the end of the recording anyway.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import torch_private
from .arena import holds_poison

# (for floating and complex types, for integers): indices want 0, divisors and counts want 1.
_HARMLESS = ((0.5, 0), (0.5, 1))
_INTEGERS = (torch.int64, torch.int32)


def run_on_defined_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """Runs an operator that refused its values on stand-ins of all its tensors.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
        error: What it raised on the real values; raised again if no stand-in helps.

    Returns:
        What the operator returns, with arguments in the place of their stand-ins.
    """
    for floating, integer in _HARMLESS:
        stand_ins = StandIns(floating, integer)
        try:
            result = func(*stand_ins.put(args), **stand_ins.put(kwargs))
        except (RuntimeError, IndexError, ValueError):
            continue
        return stand_ins.take_back(result)
    raise error


class StandIns:
    """Copies of tensors with other values; tensors that share a storage share one copy.

    Args:
        floating: Value for floating and complex types.
        integer: Value for the others.
        only_poisoned_integers: Leaves everything else as it is. For compiled code, which ends the
            process at an index out of range where an operator raises.
    """

    def __init__(self, floating: float, integer: int, *, only_poisoned_integers: bool = False) -> None:
        self._floating = floating
        self._integer = integer
        self._only_poisoned_integers = only_poisoned_integers
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._originals: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def put(self, value: Any) -> Any:
        """Replaces the tensors in an argument."""
        if isinstance(value, torch.Tensor):
            if self._only_poisoned_integers and not (value.dtype in _INTEGERS and holds_poison(value)):
                return value
            return self._stand_in(value)
        if isinstance(value, dict):
            return {name: self.put(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.put(item) for item in value)
        return value

    def take_back(self, result: Any) -> Any:
        """Puts the original where an argument, or a view of one, was returned."""
        if isinstance(result, torch.Tensor):
            if id(result) in self._tensors:
                return self._tensors[id(result)][0]
            original = self._originals.get(torch_private.storage_key(result))
            if original is None:
                return result
            view = torch.empty(0, dtype=result.dtype)
            return view.set_(original, result.storage_offset(), result.shape, result.stride())
        if isinstance(result, list | tuple):
            return type(result)(self.take_back(item) for item in result)
        return result

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        original = tensor.untyped_storage()
        key = torch_private.storage_key(tensor)
        if key not in self._copies:
            self._copies[key] = original.clone()
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(self._copies[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        is_floating = tensor.is_floating_point() or tensor.is_complex()
        copy.fill_(self._floating if is_floating else self._integer)
        self._originals[torch_private.storage_key(copy)] = original
        self._tensors[id(copy)] = (tensor, copy)
        return copy
