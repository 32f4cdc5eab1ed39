"""Functions that Dynamo traces when first called, and that run without Dynamo wherever its guards hold.

One invariant: what Dynamo made runs only where its guards were checked for these arguments, at this call or,
while a build trusts its own calls, at an earlier one like it.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from sgl_piecewise.runtime import torch_private_entries, torch_private_trace_cost
from sgl_piecewise.runtime.errors import CompileError, RecompileError, SglPiecewiseError
from sgl_piecewise.runtime.garbage import collection_paused
from sgl_piecewise.runtime.records import COMPILE_PIECES, FIRST_RUN, TRACE, LapClock
from sgl_piecewise.runtime.time_line import span

_logger = logging.getLogger(__name__)

OnRecompile = Literal["error", "eager"]
Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# As many compiles of one function as Dynamo makes before it gives up.
_MANY_TRACES = 8
# How Dynamo begins to say that a mode or another setting of the process is not what it was.
_GLOBAL_STATE = "GLOBAL_STATE changed"

NOT_KNOWN = object()
"""Stands for the result of a call that was not made; see `TracedFunction.run_known`."""


@dataclass
class CompileCounts:
    """What was compiled so far.

    Attributes:
        num_traces: Traces of the whole forward.
        num_layer_traces: Traces of shared layers.
        num_pieces: Pieces in those traces.
        num_compiled_pieces: Distinct ones, each compiled once.
    """

    num_traces: int = 0
    num_layer_traces: int = 0
    num_pieces: int = 0
    num_compiled_pieces: int = 0


_COUNTS: contextvars.ContextVar[CompileCounts | None] = contextvars.ContextVar(
    "sgl_piecewise_compile_counts", default=None
)


def current_counts() -> CompileCounts:
    """Returns the counts that a compile going on now adds to; nobody looks at those made outside an entry of ours."""
    return _COUNTS.get() or CompileCounts()


@dataclass
class CompileState:
    """What the functions of one compiled forward share.

    Attributes:
        on_recompile: What a call does that nothing fits: None traces, the others are for a frozen forward.
        is_trusting: Whether calls like an earlier one skip the guards.
        counts: What was compiled so far.
        fallbacks: Calls of a frozen forward that ran eager, by function.
        must_be_dynamic: Whether a trace that bakes in a dynamic dimension is an error; else it serves one size.
        clock: Where the time of compiles went, by the names above.
        has_repeats: Whether a trace may hold many equal layers, because they are not shared.
    """

    on_recompile: OnRecompile | None = None
    is_trusting: bool = False
    counts: CompileCounts = field(default_factory=CompileCounts)
    fallbacks: collections.Counter[str] = field(default_factory=collections.Counter)
    clock: LapClock = field(default_factory=LapClock)
    must_be_dynamic: bool = False
    has_repeats: bool = False
    epoch: int = 0  # Of trust: what was noted in another is void.

    @contextlib.contextmanager
    def trusting(self) -> Iterator[None]:
        """Lets calls in the block skip the guards where an earlier call in it was like them.

        For a build, whose calls differ in nothing but sizes: nobody changes the model meanwhile.
        """
        before = self.is_trusting
        self.is_trusting = True
        self.epoch += 1
        try:
            yield
        finally:
            self.is_trusting = before
            self.epoch += 1


@dataclass
class _InputSources:
    """Where the latest trace of a function found its inputs, as Dynamo writes it."""

    tensors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


class TracedFunction:
    """One function and what Dynamo made of it.

    Args:
        function: Takes its arguments by position.
        backend: Compiles a trace.
        name: For errors, and for Dynamo's own messages.
        state: Shared by the functions of one compiled forward.
        is_layer: Whether a trace counts as one of a layer.

    Attributes:
        python_effects: What of Python's objects a call changes, over all traces.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Backend,
        *,
        name: str,
        state: CompileState,
        is_layer: bool,
    ) -> None:
        assert isinstance(function, types.FunctionType)
        self.name = name
        self._function = torch_private_entries.with_own_code(function, name)
        self._parameters = tuple(inspect.signature(function).parameters)
        held: list[list[Callable[..., Any]]] = []
        self.python_effects: list[str] = []
        self._sources = _InputSources()
        self._compiled = torch.compile(
            self._function,
            backend=_counted(backend, state, is_layer, held, self.python_effects, self._sources),
            fullgraph=True,
        )
        weakref.finalize(self, _release, self._function.__code__, held)
        self._state = state
        self._entries: list[torch_private_entries.CompiledEntry] = []
        self._trusted: dict[Any, Callable[..., Any]] = {}
        self._epoch = -1
        self._lock = threading.RLock()

    def __call__(self, *values: Any, before_trace: Callable[..., tuple[Any, ...]]) -> Any:
        """Calls the function, compiled.

        Args:
            *values: Its arguments.
            before_trace: Returns the arguments to trace with, from these.

        Raises:
            RecompileError: Frozen, and nothing fits.
            CompileError: Dynamo cannot trace it.
        """
        if not self._state.is_trusting:
            entry = self.entry_for(values)
            return entry.run(*values) if entry is not None else self._trace(values, before_trace)
        trusted, key = self._trusted_now(), _call_key(values)
        run = trusted.get(key)
        if run is None:
            entry = self.entry_for(values)
            if entry is None:
                return self._trace(values, before_trace)
            run = trusted[key] = entry.run
        return run(*values)

    def run_known(self, values: tuple[Any, ...]) -> Any:
        """Calls the function, compiled, if a call of this build was like this one; else returns `NOT_KNOWN`.

        No guard is asked, so tensors may be as no guard would have them: made in inference mode, for one.
        """
        run = self._trusted_now().get(_call_key(values))
        return NOT_KNOWN if run is None else run(*values)

    def _trusted_now(self) -> dict[Any, Callable[..., Any]]:
        """Returns what ran the calls of this build, by how they were."""
        if self._epoch != self._state.epoch:
            self._trusted.clear()
            self._epoch = self._state.epoch
        return self._trusted

    def entry_for(self, values: tuple[Any, ...]) -> torch_private_entries.CompiledEntry | None:
        """Returns what a call with these arguments runs; None where it would be traced."""
        named = dict(zip(self._parameters, values, strict=True))
        for entry in self._entries:
            if entry.fits(named):
                return entry
        return None

    def _trace(self, values: tuple[Any, ...], before_trace: Callable[..., tuple[Any, ...]]) -> Any:
        if self._state.on_recompile == "error":
            raise RecompileError(
                f"{self.name} was frozen and is called as it was never compiled for: {self.why_none_fits(values)}. "
                "Call it so before freeze(), or freeze(on_recompile='eager') to run such calls uncompiled."
            )
        if self._state.on_recompile == "eager":
            if self.name not in self._state.fallbacks:
                _logger.warning("%s runs uncompiled (counted): %s", self.name, self.why_none_fits(values))
            self._state.fallbacks[self.name] += 1
            return self._function(*values)
        phase = self._state.clock.phase(TRACE)
        once = torch_private_entries.one_compile_for_all_sizes()
        plainly = torch_private_trace_cost.plain_traces(keeps_shapes=self._state.has_repeats)
        with self._lock, once, plainly, collection_paused(), phase:
            token = _COUNTS.set(self._state.counts)
            try:
                return self._compiled(*before_trace(*values))
            except SglPiecewiseError:
                raise
            except torch_private_entries.TRACING_FAILURES as err:
                raise self._failure(err) from err
            finally:
                _COUNTS.reset(token)
                known = self._entries
                self._entries = torch_private_entries.compiled_entries(self._function, known)
                for entry in self._entries:
                    if entry not in known:
                        entry.tensor_sources = self._sources.tensors
                        entry.number_sources = self._sources.numbers
                self._warn_of_many(values)

    def why_none_fits(self, values: tuple[Any, ...]) -> str:
        """Returns the guards that a call does not meet, as text."""
        named = dict(zip(self._parameters, values, strict=True))
        reasons = [entry.failed_guard(named) for entry in self._entries]
        return " / ".join(dict.fromkeys(filter(None, reasons))) or "nothing was compiled"

    def _failure(self, err: Exception) -> Exception:
        inner = torch_private_entries.failure_inside_backend(err)
        if isinstance(inner, SglPiecewiseError):
            return inner
        return CompileError(
            f"{self.name} cannot be compiled in one trace. Dynamo says: {err}\nIf the line that it names needs the "
            "host or Python, put it into a function marked @eager_on_graph; if it bakes a size in, let it compute "
            "with the size as it is."
        )

    def _warn_of_many(self, values: tuple[Any, ...]) -> None:
        if len(self._entries) == _MANY_TRACES:
            named = dict(zip(self._parameters, values, strict=True))
            _logger.warning(
                "%s was traced and compiled %d times; PyTorch alone would run it uncompiled from now on. What "
                "differed: %s. A number or object that is no part of the shapes is compiled once for all if only a "
                "function marked @eager_on_graph reads it, or if it is a tensor.",
                self.name,
                _MANY_TRACES,
                _difference([entry.failed_guard(named) for entry in self._entries]),
            )


def _difference(failed_guards: Sequence[str]) -> str:
    """Returns what told calls of one function apart, from the guards that a call did not meet."""
    found = list(dict.fromkeys(" ".join(text.split()) for text in failed_guards if text))
    of_call = [text for text in found if not text.startswith(_GLOBAL_STATE)]
    if of_call:
        return of_call[0]
    states = [text.partition(":")[2].strip() for text in found]
    return f"PyTorch's settings around the calls ({states[0]})" if states else "nothing that guards name"


# Dynamo keeps what it compiled by a name in our module until its code dies, and code lives in its own table and in
# the stacks that guards of other compiles note. So what it keeps may not lead back to the function, and is empty
# once the function is gone.


def _release(code: types.CodeType, held: list[list[Callable[..., Any]]]) -> None:
    """Frees what was compiled for a function that is gone: graphs, handles, and the model that they hold."""
    torch_private_entries.forget_compiles(code)
    for forward in held:
        forward.clear()


def _counted(
    backend: Backend,
    state: CompileState,
    is_layer: bool,
    held: list[list[Callable[..., Any]]],
    python_effects: list[str],
    sources: _InputSources,
) -> Backend:
    """Returns a backend that counts its traces, tells the clock what the time goes into, and notes what it made."""

    def counted(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if is_layer:
            state.counts.num_layer_traces += 1
        else:
            state.counts.num_traces += 1
        python_effects.extend(torch_private_entries.python_effects())
        sources.tensors = tuple(torch_private_entries.tensor_sources(gm.graph))
        sources.numbers = tuple(torch_private_entries.number_sources(gm.graph))
        with state.clock.phase(COMPILE_PIECES):
            forward = [backend(gm, example_inputs)]
        held.append(forward)
        return _with_first_run(forward, state)

    return counted


def _with_first_run(forward: list[Callable[..., Any]], state: CompileState) -> Callable[..., Any]:
    """Lets the clock know when Dynamo is done, and what it was called for begins."""
    has_run = False

    def run(*args: Any) -> Any:
        nonlocal has_run
        if has_run:
            return forward[0](*args)
        has_run = True
        with state.clock.phase(FIRST_RUN), span(FIRST_RUN, "warm_up"):
            return forward[0](*args)

    return run


def ready_to_trace(value: torch.Tensor, dynamic_dims: Sequence[int], state: CompileState) -> torch.Tensor:
    """Returns a tensor to trace with: its dynamic dimensions marked, and no view.

    A trace with a view would guard on the tensor that it is a view of. The caller's tensor stays unmarked.
    """
    is_view = torch_private_entries.base_of_view(value) is not None
    fresh = value.detach() if is_view or dynamic_dims else value
    torch_private_entries.mark_dynamic(fresh, dynamic_dims, must_be=state.must_be_dynamic)
    return fresh


def _call_key(values: Any) -> Any:
    """Returns what a call of a build can differ in from another: tensors' metadata, which objects, modes."""
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cuda"))
    return (*modes, torch.is_autocast_enabled("cpu"), *map(_value_key, values))


def _value_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if type(value) in (tuple, list):
        return tuple(map(_value_key, value))
    if type(value) is dict:
        return tuple((key, _value_key(item)) for key, item in value.items())
    if value is None or type(value) in (int, float, bool, str):
        return value
    return id(value)
