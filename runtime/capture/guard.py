"""A guard over copies of outside memory: nothing may write into them.

When a marked function returns memory that someone else holds (a double buffer it flips, a cache),
captured code gets a copy. Eager code that writes into such a result changes the original; captured
code would change the copy, silently. The guard is a dispatch mode, entered only once a capture has
met such a result, so ordinary captures do not pay for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import torch_private
from ..errors import OutsideWriteError


class OutsideWriteGuard(TorchDispatchMode):
    """Raises when an operator writes into a guarded storage."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """An ordinary mode would switch torch.compile off silently."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._guarded: dict[int, tuple[Any, str]] = {}

    def add(self, copy: torch.Tensor, origin: str) -> None:
        """Guards the storage of ``copy``; ``origin`` names mark and path for the error."""
        self._guarded[torch_private.storage_key(copy)] = (torch_private.storage_weak_ref(copy), origin)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in torch_private.written_arguments(func, args, kwargs):
                self._check(func, tensor)
        return func(*args, **kwargs)

    def _check(self, func: Callable[..., Any], tensor: torch.Tensor) -> None:
        found = self._guarded.get(torch_private.storage_key(tensor))
        if found is None or found[0].expired():
            return
        raise OutsideWriteError(
            f"{func} would write into {found[1]}, which is a copy: the marked function returned memory that "
            "something else still holds. Outside capture this write changes the original. Return a fresh "
            "tensor from the marked function, pass the buffer as an argument, or register it with "
            "static_tensors={...} if its address never changes."
        )
