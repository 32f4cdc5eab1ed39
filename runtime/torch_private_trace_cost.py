"""Private PyTorch APIs of what a trace pays for and nobody here reads: timings, names for logs, a cache of shapes.

As in ``torch_private`` each piece is small, says what it relies on, and knows nothing of the rest of the
library; tried on 2.11 and 2.13. Only what runs while something is compiled imports this file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch._dynamo import config as dynamo_config
from torch._dynamo import guards, symbolic_convert
from torch._inductor import codecache
from torch._logging._internal import trace_log

from .torch_private_settings import settings

_IS_PLAIN: ContextVar[bool] = ContextVar("sgl_piecewise_plain_trace", default=False)


@contextlib.contextmanager
def plain_traces(*, keeps_shapes: bool) -> Iterator[None]:
    """Lets traces of the block, and what compiles them, leave out what decides nothing.

    Args:
        keeps_shapes: Whether results of operators on fake tensors are kept for equal calls, as PyTorch does. With
            symbolic sizes keeping one costs twice what the operator costs, and finding it about once that, so it
            pays only where most calls come several times.

    Left out:

    - Dynamo times the guards that it made, after flushing the CPU's caches, for its own metrics.
    - For lines of its log it looks up which function each line stands in, for which it tokenizes whole files; where
      that log is off, the lines are not written.
    - What Dynamo makes asks at each call whether a profiler wants to see how long the call took to get to its graph.
    - Inductor's caches pickle each part of a key once more for their own log (PyTorch 2.11).

    Relies on the functions being looked up in their modules and classes at each call.
    """
    token = _IS_PLAIN.set(True)
    try:
        keeps_shapes = keeps_shapes and dynamo_config.fake_tensor_cache_enabled
        with settings(dynamo_config, fake_tensor_cache_enabled=keeps_shapes, record_runtime_overhead=False):
            yield
    finally:
        _IS_PLAIN.reset(token)


def _without_timing(profile: Callable[..., float]) -> Callable[..., float]:
    def profile_guard_manager(*args: Any) -> float:
        return 0.0 if _IS_PLAIN.get() else profile(*args)

    return profile_guard_manager


def _without_names(look_up: Callable[..., str | None]) -> Callable[..., str | None]:
    logs = (symbolic_convert.trace_call_log, symbolic_convert.trace_source_log)

    def get_funcname(filename: str, lineno: int) -> str | None:
        is_read = not _IS_PLAIN.get() or any(log.isEnabledFor(logging.DEBUG) for log in logs)
        return look_up(filename, lineno) if is_read else None

    return get_funcname


def _without_lines(describe: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def debug_lines(pickler: Any, details: Any) -> list[str]:
        is_read = not _IS_PLAIN.get() or codecache.log.isEnabledFor(logging.DEBUG) or bool(trace_log.handlers)
        return describe(pickler, details) if is_read else []

    return debug_lines


# Once, and for other traces as before: threads that compile beside each other could not patch and put back in turns.
guards.profile_guard_manager = _without_timing(guards.profile_guard_manager)
symbolic_convert.get_funcname = _without_names(symbolic_convert.get_funcname)
codecache.FxGraphCachePickler.debug_lines = _without_lines(codecache.FxGraphCachePickler.debug_lines)  # type: ignore[method-assign]
