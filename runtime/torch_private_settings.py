"""Private PyTorch APIs of settings: values that hold in a block, also where blocks of threads overlap.

Relies on what a setting keeps: in PyTorch 2.13 each thread has values of its own, in 2.11 the process has one, and
``patch`` puts back what it found, which is what another thread's block had set if that one began before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_MISSING = object()
_lock = threading.RLock()
# Of each setting that is the process's: what it was before, and the values of the blocks that are open.
_open: dict[tuple[str, str], tuple[Any, dict[object, Any]]] = {}


@contextlib.contextmanager
def settings(config: Any, **values: Any) -> Iterator[None]:
    """Gives settings other values in the block; where blocks overlap, till the last of them ends.

    Args:
        config: A module of PyTorch's settings.
        **values: By name.
    """
    if isinstance(config._config[next(iter(values))].user_override, ContextVar):
        with config.patch(values):
            yield
        return
    block = object()
    try:
        with _lock:
            for name, value in values.items():
                _, blocks = _open.setdefault((config.__name__, name), (getattr(config, name), {}))
                blocks[block] = value
                setattr(config, name, value)
        yield
    finally:
        with _lock:
            for name in values:
                _close(config, name, block)


def _close(config: Any, name: str, block: object) -> None:
    """Ends a block's value of one setting, if an interrupt did not come before it began."""
    before, blocks = _open.get((config.__name__, name), (None, {}))
    if blocks.pop(block, _MISSING) is _MISSING:
        return
    setattr(config, name, list(blocks.values())[-1] if blocks else before)
    if not blocks:
        del _open[config.__name__, name]
