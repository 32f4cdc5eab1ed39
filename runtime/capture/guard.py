"""A guard over copies of outside memory: no write into them is lost, and none is read when stale.

When a marked function returns memory that someone else holds (a double buffer it flips, a cache),
captured code gets a copy. Eager code that writes into such a result changes the original, and sees
what others write there; captured code would change, and see, the copy. The guard is a dispatch mode,
entered only once a capture has met such a result, so ordinary captures do not pay for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import torch_private
from ..errors import OutsideWriteError

_REMEDY = (
    "Return a fresh tensor from the marked function, pass the buffer as an argument, or register it with "
    "static_tensors={...} if its address never changes."
)


@dataclass(kw_only=True)
class _Copy:
    """One guarded copy.

    Attributes:
        ref: Weak reference to its storage.
        original: Weak reference to the storage that was copied; while it is held, no other storage
            can have that one's key.
        origin: Mark and path, for errors.
        written_by: What wrote to the original since.
    """

    ref: Any
    original: Any
    origin: str
    written_by: str | None = None


class OutsideWriteGuard(TorchDispatchMode):
    """Raises when an operator writes into a guarded storage, or reads one whose original changed."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """An ordinary mode would switch torch.compile off silently."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, _Copy] = {}
        self._by_original: dict[int, list[_Copy]] = defaultdict(list)

    def add(self, copy: torch.Tensor, origin: str, original: Any) -> None:
        """Guards a copy.

        Args:
            copy: What captured code has.
            origin: Mark and path, for the error.
            original: Weak reference to the storage that was copied.
        """
        entry = _Copy(ref=torch_private.storage_weak_ref(copy), original=original, origin=origin)
        self._copies[torch_private.storage_key(copy)] = entry
        self._by_original[torch_private.key_of_weak_ref(original)].append(entry)

    def check_read(self, reader: str, value: Any) -> None:
        """Raises if a tensor is a copy whose original was written since it was made.

        Raises:
            OutsideWriteError: Names the copy, what wrote and what would read.
        """
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return
        entry = self._copies.get(torch_private.storage_key(value))
        if entry is None or entry.written_by is None or entry.ref.expired():
            return
        raise OutsideWriteError(
            f"{reader} would read {entry.origin}, which is a copy made before {entry.written_by} wrote to the "
            "original: the marked function returned memory that something else still holds. Outside capture "
            f"the write would be seen. {_REMEDY}"
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch_private.is_higher_order(func):
            return func(*args, **kwargs)
        for value in _items((*args, *kwargs.values())):
            self.check_read(str(func), value)
        if func._schema.is_mutable:
            for tensor in torch_private.written_arguments(func, args, kwargs):
                self._note_write(str(func), tensor)
        return func(*args, **kwargs)

    def _note_write(self, writer: str, tensor: torch.Tensor) -> None:
        key = torch_private.storage_key(tensor)
        for entry in self._by_original.get(key, ()):
            entry.written_by = writer
        entry_written = self._copies.get(key)
        if entry_written is None or entry_written.ref.expired():
            return
        raise OutsideWriteError(
            f"{writer} would write into {entry_written.origin}, which is a copy: the marked function returned "
            f"memory that something else still holds. Outside capture this write changes the original. {_REMEDY}"
        )


def _items(values: Iterable[Any]) -> Iterator[Any]:
    """Yields arguments, lists taken apart."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
