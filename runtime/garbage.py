"""Python's garbage collector, kept from running where it would do harm or only cost time.

One invariant: what a block asks for holds while any thread is in such a block, and afterwards everything is as it was
before the first.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_Setting = TypeVar("_Setting")

_NEVER = 2**31 - 1  # A threshold that no count reaches; the collector keeps it in a C int.


class _SharedSetting(Generic[_Setting]):
    """A setting of the whole process that overlapping blocks of several threads change together.

    Args:
        read: Returns what is set.
        change: Sets what blocks ask for; once a block.
        put_back: Sets again what ``read`` returned.
    """

    def __init__(
        self, read: Callable[[], _Setting], change: Callable[[], None], put_back: Callable[[_Setting], None]
    ) -> None:
        self._read = read
        self._change = change
        self._put_back = put_back
        self._lock = threading.Lock()
        self._open: dict[object, _Setting] = {}  # Blocks, with what was set before the first of them.

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Keeps the setting changed in the block, whichever thread looks."""
        block = object()
        try:
            with self._lock:
                self._open[block] = next(iter(self._open.values())) if self._open else self._read()
                self._change()
            yield
        finally:
            with self._lock:
                if block in self._open:  # It is not if an interrupt came before it was noted.
                    before = self._open.pop(block)
                    if not self._open:
                        self._put_back(before)


def _turn_on(was_enabled: bool) -> None:
    if was_enabled:
        gc.enable()


def _put_off_full() -> None:
    gc.set_threshold(*gc.get_threshold()[:2], _NEVER)


def _allow_full(before: tuple[int, int, int]) -> None:
    young, middle, old = gc.get_threshold()
    if old == _NEVER:  # Else somebody set it meanwhile, who knows better.
        gc.set_threshold(young, middle, before[2])


_collection = _SharedSetting(gc.isenabled, gc.disable, _turn_on)
_full_collections = _SharedSetting(gc.get_threshold, _put_off_full, _allow_full)


def collection_paused() -> contextlib.AbstractContextManager[None]:
    """Keeps Python's collector from running in a block, in whatever thread; blocks may overlap.

    In the middle of a capture it would free device objects. While something is traced or compiled it would look again
    and again through all that PyTorch has imported, and find nothing. It is neither run (a collection per segment took
    two thirds of the build in `pytorch#158193`) nor frozen (`vllm#24128`).
    """
    return _collection.changed()


def full_collections_put_off() -> contextlib.AbstractContextManager[None]:
    """Keeps the collector from walking old objects in a block, in whatever thread; blocks may overlap.

    One such walk takes 0.2 s once PyTorch's compiler is imported, and imports and builds set off several. Young objects
    are collected as ever, so that what forwards leave in cycles is freed.
    """
    return _full_collections.changed()
