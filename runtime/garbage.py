"""Python's garbage collector, kept from running where it would do harm or only cost time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Keeps Python's collector from running in the block; afterwards it is as it was.

    In the middle of a capture it would free device objects. While something is traced or compiled it would look again
    and again through all that PyTorch has imported, and find nothing. It is neither run (a collection per segment took
    two thirds of the build in `pytorch#158193`) nor frozen (`vllm#24128`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
