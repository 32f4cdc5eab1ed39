"""Autocast at breaks and in captured code: as it was where the marked call stood, and without its cache.

Autocast is not an argument, yet it decides what a body computes. Graphs keep what it did to
captured code; bodies, which run again, need it told.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class AutocastState:
    """Autocast of one device type around a marked call.

    Attributes:
        device_type: For example ``cuda``.
        dtype: What operators are cast to; None where autocast is off.
    """

    device_type: str
    dtype: torch.dtype | None

    @classmethod
    def now(cls, device_type: str) -> AutocastState:
        """Returns the state of this thread."""
        is_on = torch.is_autocast_enabled(device_type)
        return cls(device_type=device_type, dtype=torch.get_autocast_dtype(device_type) if is_on else None)

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``fn`` under this state, for a replay: there autocast is off."""
        if self.dtype is None:
            return fn
        return functools.partial(self._call, fn)

    def _call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=False):
            return fn(*args, **kwargs)


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Keeps autocast from handing captured code a weight that it cast earlier.

    Such a copy was made outside the graph: a replay would not cast the weight again, and it is
    freed when the autocast block ends. ``torch.cuda.make_graphed_callables`` refuses the cache.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
