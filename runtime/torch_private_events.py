"""Private PyTorch APIs of compile-time events: what Dynamo, AOTAutograd and Inductor say that they are doing.

PyTorch times its own steps (``dynamo_timed``) and hands begin and end of each to one logger; here they become
spans of the time lines that listen. As in ``torch_private`` each piece is small, says what it relies on, and
knows nothing of the rest of the library; tried on 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .time_line import CONTAINER, INHERITED, Attribute, TimeLine, listening, span

# Which named work an event's own time counts as, by name or its beginning. An event that is not here counts as
# the named work around it, or under its own name.
_PHASES: tuple[tuple[str, str | None], ...] = (
    (r"dynamo$", CONTAINER),
    (r"entire_frame_compile|backend_compile", CONTAINER),
    (r"compile_attempt_|bytecode_tracing|bytecode_hooks|insert_deferred|pgo\.", "dynamo trace"),
    (r"build_guards", "dynamo guards"),
    (r"gc$", "garbage collection"),
    (r"inductor_import", "import"),
    (r"inductor_codecache_torch_key|CacheBase\.", "cache check"),
    (r"_recursive_(pre|joint|post)_grad|_recursive_joint_graph|pass\.", "graph passes of inductor"),
    (r"create_aot_dispatcher|aot_|compile_fx\.<locals>", "aot autograd"),
    (r"inductor_compile|fx_codegen_and_compile|additional_fake|GraphLowering\.run", "inductor lowering"),
    (
        r"GraphLowering\.|code_gen|Scheduler|generate_kernel|PythonWrapper|CppWrapper",
        "inductor code generation",
    ),
    (r".*(benchmark|autotun|coordinate_descent)|select_algorithm|collective_compute", "autotune"),
    (r"compile_file|async_compile|triton_compile|CachingAutotuner|StaticAutotuner|aoti", "kernel compile"),
    (r"PyCodeCache|reload_kernel", "kernel load"),
    (r"AOTAutogradCache|TritonBundler\.(load|read)|CompiledArtifact.load", "cache load"),
    (r"TritonBundler|CompiledArtifact.save", "cache write"),
)
_KNOWN = tuple((re.compile(pattern), phase) for pattern, phase in _PHASES)

# What is worth keeping of what PyTorch says of an event.
_KEPT = (
    "compile_id",
    "fn_name",
    "co_name",
    "co_filename",
    "co_firstlineno",
    "graph_op_count",
    "guard_count",
    "cache_size",
    "restart_reasons",
    "recompile_reason",
    "fail_type",
    "fail_reason",
    "kernel_name",
    "cached_kernel_names",
    "num_configs",
)

_lock = threading.Lock()
_listeners: list[object] = []


@contextlib.contextmanager
def events_to_time_lines() -> Iterator[None]:
    """Turns PyTorch's compile-time events of the block into spans of the time lines that listen.

    Relies on the singleton logger of events and its one method that every event goes through. Does nothing where
    Dynamo is not loaded: then nothing can compile.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        yield
        return
    logger = utils.get_chromium_event_logger()
    with _lock:
        _listeners.append(listener := object())
        if len(_listeners) == 1:
            logger._log_timed_event = _heard(logger._log_timed_event)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                del logger._log_timed_event


def _heard(log: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the logger's method: ``(name, nanoseconds, "B" or "E", facts)``."""

    def hear(name: str, time_ns: int, kind: str, facts: Mapping[str, Any] | None = None) -> Any:
        for line in listening():
            if kind == "B":
                line.begin(name, phase_of_event(name), _attributes(facts))
            elif kind == "E":
                line.end(line.innermost(name), _attributes(facts))
        return log(name, time_ns, kind, facts)

    return hear


def phase_of_event(name: str) -> str | None:
    """Returns the named work that the own time of one of PyTorch's events counts as."""
    for pattern, phase in _KNOWN:
        if pattern.match(name):
            return phase
    return INHERITED


def _attributes(facts: Mapping[str, Any] | None) -> dict[str, Attribute]:
    kept: dict[str, Attribute] = {}
    for name in _KEPT:
        value = (facts or {}).get(name)
        if isinstance(value, str | int | float) and value not in ("", "None"):
            kept[name] = value
        elif isinstance(value, list | tuple | set) and value:
            kept[name] = sorted(map(str, value))
    return kept


def trace_began_s() -> float | None:
    """Returns when the trace in progress began, in seconds of ``time.perf_counter``; None outside of one."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not utils.get_metrics_context().in_progress():
        return None
    elapsed_ns = time.time_ns() - utils.get_metrics_context()._start_time_ns
    return time.perf_counter() - elapsed_ns / 1e9


def add_events_in_progress(line: TimeLine, began_s: float) -> None:
    """Puts the events that are open now on a time line that was made inside them, as if it had been there.

    Args:
        line: Empty so far.
        began_s: When the trace began, as `trace_began_s` says.
    """
    utils: Any = sys.modules["torch._dynamo.utils"]
    open_events = utils.get_chromium_event_logger().get_stack()
    for name in open_events:
        if name == open_events[-1]:
            line.end(line.begin("bytecode_tracing", "dynamo trace", {}, at_s=began_s))
            began_s = time.perf_counter()
        line.begin(name, phase_of_event(name), {}, at_s=began_s)


@contextlib.contextmanager
def inductor_heard(hear_code: Callable[[str], None]) -> Iterator[None]:
    """Names the steps of Inductor's caches, which PyTorch does not, and tells of the code that comes out.

    Args:
        hear_code: Called with the source of every wrapper that Inductor generates or finds during the block.
    """
    with span("import inductor", "import"):
        from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
        from torch._inductor.codecache import FxGraphCache
        from torch._inductor.graph import GraphLowering

    before = GraphLowering.save_output_code

    def save(code: str) -> None:
        hear_code(code)
        if before is not None:
            before(code)

    with contextlib.ExitStack() as patched:
        for owner, name, phase in (
            (AOTAutogradCache, "try_load", "cache check"),
            (AOTAutogradCache, "save", "cache write"),
            (FxGraphCache, "prepare_key", "cache check"),
            (FxGraphCache, "_save_graph", "cache write"),
        ):
            patched.enter_context(_named_step(owner, name, phase))
        GraphLowering.save_output_code = save
        try:
            yield
        finally:
            GraphLowering.save_output_code = before


@contextlib.contextmanager
def _named_step(owner: type, name: str, phase: str) -> Iterator[None]:
    """Makes a span of each call of a static method."""
    original = owner.__dict__[name]

    @functools.wraps(original.__func__)
    def call(*args: Any, **kwargs: Any) -> Any:
        with span(f"{owner.__name__}.{name}", phase):
            return original.__func__(*args, **kwargs)

    setattr(owner, name, staticmethod(call))
    try:
        yield
    finally:
        setattr(owner, name, original)
