"""Ctrl-C while capturing: it waits until this library's bookkeeping is whole again.

Python raises KeyboardInterrupt between any two bytecodes, also where half a set of functions is
replaced, or a capture is open and nobody knows of it yet. In code of the user it is raised at
once. This module must not know what the bookkeeping is, only where its code lies.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# In a finalizer it would be printed and lost.
_FINALIZERS = ("weakref", "_weakrefset")
_BOOKKEEPING = (
    tuple(f"{__package__}.{name}" for name in ("capture", "mark", "garbage", "interrupts")) + _FINALIZERS
)
# What bookkeeping calls. Whose it is shows further out; torch.nn is the user's forward.
_HELPERS = ("torch", "contextlib", "functools", "threading", "ctypes", "signal", "enum")
_OWN_HELPERS = tuple(
    f"{__package__}.{name}" for name in ("build_profile", "object_state", "records", "time_line", "tree")
)
_PRIVATE = f"{__package__}.torch_private"
_USER_HELPERS = ("torch.nn",)


class HeldInterrupts:
    """Holds an interrupt back that arrives in bookkeeping, until `deliver` or the block's end.

    Does nothing outside the main thread, where Python raises no interrupts, and where the program
    handles or ignores SIGINT in a way that is not Python's.

    Args:
        is_everywhere: Hold it back wherever it arrives: for a short stretch that must be whole.
    """

    def __init__(self, *, is_everywhere: bool = False) -> None:
        self._is_everywhere = is_everywhere
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._pending: int | None = None

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self.deliver()

    def deliver(self) -> None:
        """Lets an interrupt through that was held back. Call it where all is whole."""
        pending, self._pending = self._pending, None
        if pending is not None and self._previous is not None:
            self._previous(pending, None)  # No frame: another holder further out lets it through.

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._previous is None or self._is_everywhere or _is_bookkeeping(frame):
            self._pending = number
        else:
            self._previous(number, frame)


def _is_bookkeeping(frame: FrameType | None) -> bool:
    """Tells whether the innermost code that is not a helper's is this library's."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if _is_of(module, _BOOKKEEPING):
            return True
        is_helper = _is_of(module, (*_HELPERS, *_OWN_HELPERS)) or module.startswith(_PRIVATE)
        if not is_helper or _is_of(module, _USER_HELPERS):
            return False
        frame = frame.f_back
    return False


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
