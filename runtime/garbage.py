"""Python's garbage collector, kept from running where it would do harm or only cost time.

One invariant: it is off while any thread is in such a block, and afterwards as it was before the first.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_open: dict[object, bool] = {}  # Blocks, with whether the collector was on before the first of them.


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Keeps Python's collector from running in the block, in whatever thread; blocks may overlap.

    In the middle of a capture it would free device objects. While something is traced or compiled it would look again
    and again through all that PyTorch has imported, and find nothing. It is neither run (a collection per segment took
    two thirds of the build in `pytorch#158193`) nor frozen (`vllm#24128`).
    """
    block = object()
    try:
        with _lock:
            _open[block] = next(iter(_open.values())) if _open else gc.isenabled()
            gc.disable()
        yield
    finally:
        with _lock:
            was_enabled = _open.pop(block, False)  # False if an interrupt came before it was noted.
            if was_enabled and not _open:
                gc.enable()
