"""Handles: Python objects as integers that graphs can carry, looked up again where the marked call runs.

One invariant: a handle keeps no object alive that can be referred to weakly, and dies with it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import torch_private, torch_private_tracing
from .errors import CompileError

_PLAIN = (int, float, bool, complex, str, bytes, type(None))


class _Handles:
    """Objects by number, and the tensor that carries each number through a graph.

    An object that can be referred to weakly has one handle for life; it and its handle are forgotten with the
    object. Plain values that are equal have one handle, as long as few others came since. Anything else is held
    by its handle, and gets a new one each time.
    """

    _MAX_PLAIN = 4096

    def __init__(self) -> None:
        self._lock = threading.RLock()  # A collection may run a callback below while it is held.
        self._numbers = itertools.count(1)
        self.by_id: dict[int, tuple[Any, torch.Tensor]] = {}
        self.by_value: collections.OrderedDict[tuple[type, str], torch.Tensor] = collections.OrderedDict()
        self._references: dict[int, Callable[[], Any]] = {}

    def new(self, value: Any) -> torch.Tensor:
        """Makes a handle for an object, unless another thread just did."""
        with self._lock:
            known = self.by_id.get(id(value))
            if known is not None and known[0]() is value:
                return known[1]
            plain = (type(value), repr(value)) if type(value) in _PLAIN else None
            if plain is not None and plain in self.by_value:
                self.by_value.move_to_end(plain)
                return self.by_value[plain]
            number = next(self._numbers)
            handle = torch_private.host_int64(number)
            try:
                reference = weakref.ref(value, functools.partial(self._forget, id(value), number))
            except TypeError:
                self._references[number] = lambda: value
                weakref.finalize(handle, self._references.pop, number, None)
                if plain is not None:
                    self.by_value[plain] = handle
                    if len(self.by_value) > self._MAX_PLAIN:
                        self.by_value.popitem(last=False)
                return handle
            self._references[number] = reference
            self.by_id[id(value)] = (reference, handle)
            return handle

    def _forget(self, key: int, number: int, _: Any) -> None:
        with self._lock:
            reference = self._references.pop(number, None)
            known = self.by_id.get(key)
            if known is not None and known[0] is reference:
                del self.by_id[key]

    def object_of(self, handle: torch.Tensor) -> Any:
        """Returns the object of a handle, or of a copy of one.

        Raises:
            CompileError: The object is gone.
        """
        reference = self._references.get(torch_private.read_host_int64(handle))
        if reference is None or (isinstance(reference, weakref.ref) and reference() is None):
            raise CompileError("A compiled forward was called for an object that no longer exists.")
        return reference()

    def __len__(self) -> int:
        return len(self._references)


_HANDLES = _Handles()


def handle_of(value: Any) -> torch.Tensor:
    """Returns the handle (host int64[]) of an object: an integer that graphs can carry.

    Compiled code calls this for each object argument before its graph runs, so that one graph serves every
    object of a type. The object is not kept alive, unless it cannot be referred to weakly.
    """
    known = _HANDLES.by_id.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    return _new_handle(value)


_new_handle = torch_private_tracing.untraced(_HANDLES.new)
# Called from compiled code, where Dynamo would compile it too; this costs nothing, where ``untraced`` does.
torch_private_tracing.skip_frame(handle_of)


def object_of(handle: torch.Tensor) -> Any:
    """Returns the object of a handle, or of a copy of one.

    Raises:
        CompileError: The object is gone.
    """
    return _HANDLES.object_of(handle)


def has_handle(value: Any) -> bool:
    """Tells whether compiled code reaches an object by a handle, which does not keep it alive."""
    known = _HANDLES.by_id.get(id(value))
    return known is not None and known[0]() is value


def num_handles() -> int:
    """Returns how many objects have a handle now."""
    return len(_HANDLES)
