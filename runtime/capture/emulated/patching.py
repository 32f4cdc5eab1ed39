"""Replaces functions of PyTorch for the threads that asked for it, and puts them back.

An attribute can only be replaced for the whole process, so what is put there asks first whether
its thread is being watched and otherwise calls the original. The last watcher that leaves puts
the originals back. This module must not know what is patched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute to replace.

    Attributes:
        owner: The class or module that has it.
        name: The attribute.
        replacement: Called as ``replacement(watcher, original, *args, **kwargs)``.
    """

    owner: Any
    name: str
    replacement: Callable[..., Any]


class ThreadPatches:
    """A set of patches that is in place while at least one thread is watched."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        self._lock = threading.Lock()
        self._watchers: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []

    def watch(self, watcher: Any) -> None:
        """Patches for this thread; the replacements are given ``watcher``."""
        with self._lock:
            if not self._watchers:
                self._install()
            self._watchers[threading.get_ident()] = watcher

    def unwatch(self) -> None:
        """Ends what `watch` began in this thread; harmless without it."""
        with self._lock:
            if self._watchers.pop(threading.get_ident(), None) is not None and not self._watchers:
                self._uninstall()

    def watcher(self) -> Any:
        """Returns this thread's watcher, or None."""
        return self._watchers.get(threading.get_ident())

    def _install(self) -> None:
        for patch in self._patches:
            self._undo.append(_undo_of(patch.owner, patch.name))
            setattr(patch.owner, patch.name, self._wrapped(patch))

    def _uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _wrapped(self, patch: Patch) -> Callable[..., Any]:
        original = getattr(patch.owner, patch.name)
        watchers, replacement = self._watchers, patch.replacement

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            watcher = watchers.get(threading.get_ident())
            if watcher is None:
                return original(*args, **kwargs)
            return replacement(watcher, original, *args, **kwargs)

        return wrapper


def _undo_of(owner: Any, name: str) -> Callable[[], None]:
    """Returns what makes the attribute as it is now: set on the owner itself, or inherited."""
    if name in vars(owner):
        return functools.partial(setattr, owner, name, vars(owner)[name])
    return functools.partial(delattr, owner, name)
