"""Private PyTorch APIs of compiling: what a backend needs to hand parts of a trace to other compilers.

As in ``torch_private`` each piece is small, says what it relies on, and knows nothing of the rest of the
library; tried on 2.11 and 2.13. Importing Dynamo takes seconds: only what runs while something is compiled
imports this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config, exc
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.decorators import mark_dynamic
from torch._dynamo.utils import preserve_rng_state
from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .errors import CompileError, SglPiecewiseError
from .torch_private import storage_key, with_lazy_bits_of


def registered_backend(name: str) -> Callable[..., Any] | None:
    """Returns the Dynamo backend of a name, or None.

    Looking it up may import its package; what that changes in Dynamo's settings is put back.
    """
    with _kept_dynamo_settings():
        try:
            backend: Callable[..., Any] = lookup_backend(name)
        except exc.InvalidBackend:
            return None
        return backend


@contextlib.contextmanager
def _kept_dynamo_settings() -> Iterator[None]:
    before = config.get_config_copy()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # Some settings are deprecated, and packages touch them.
        try:
            yield
        finally:
            for name, value in config.get_config_copy().items():
                if name in before and value != before[name]:
                    setattr(config, name, before[name])


def _current_fake_mode() -> Any:
    """Returns the mode that compilers called now make their fake tensors in."""
    mode = detect_fake_mode()
    if mode is None:
        raise CompileError("There is no trace in progress: a backend is called by torch.compile only.")
    return mode


@contextlib.contextmanager
def separate_compile() -> Iterator[None]:
    """Lets a compiler run inside the block without touching what the trace around it keeps for its own."""
    with tracing(TracingContext(_current_fake_mode())):
        yield


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Hides the trace in progress from the block: for compilers that would take its symbols for their own."""
    with tracing(None):
        yield


@contextlib.contextmanager
def on_fake_tensors_of(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Runs the block on fake tensors: those given, or fakes of the real ones given.

    Sizes and numbers that only the data gives become symbols, which no compile is left to account for, and nothing
    that the block asks adds a guard to the trace.

    Yields:
        The values to work with.
    """
    own = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    is_apart = own is not None and own is not detect_fake_mode()  # As `examples_at_hints` makes them.
    mode = own if is_apart else detect_fake_mode([one for one in values if isinstance(one, torch.Tensor)])
    if mode is None:
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        values = [mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in values]
    env, was_allowed = mode.shape_env, mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        with contextlib.ExitStack() as stack:
            if is_apart:
                stack.enter_context(outside_of_traces())
            if env is not None:
                stack.enter_context(env.suppress_guards())
                stack.enter_context(env.ignore_fresh_unbacked_symbols())
                stack.enter_context(data_dependence_allowed(env))
            stack.enter_context(torch.no_grad())
            stack.enter_context(preserve_rng_state())
            # As Dynamo does: some kernels take symbolic sizes in Python alone.
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(mode)
            yield list(values)
    finally:
        mode.allow_non_fake_inputs = was_allowed


@contextlib.contextmanager
def data_dependence_allowed(shape_env: Any) -> Iterator[None]:
    """Lets values and sizes that only the data gives be symbols, whatever Dynamo was told to do with them."""
    before = shape_env.settings
    shape_env.settings = dataclasses.replace(
        before, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True
    )
    try:
        yield
    finally:
        shape_env.settings = before


def example_inputs(values: Sequence[Any]) -> list[Any]:
    """Returns inputs for a compiler that are like the trace's values, in the mode that compilers now work in.

    After the trace that is the mode of the values themselves.

    Sizes stay symbolic, and tensors that share memory in the trace share it again. Anything but tensors is
    passed on.
    """
    mode = detect_fake_mode(list(values)) or FakeTensorMode(shape_env=ShapeEnv())
    bases: dict[int, torch.UntypedStorage] = {}
    examples = []
    with mode, torch.inference_mode(False), torch.no_grad():
        for value in values:
            if not isinstance(value, torch.Tensor):
                examples.append(value)
            elif value.layout is not torch.strided:
                examples.append(mode.from_tensor(value))
            else:
                examples.append(_like(value, bases))
    return examples


def _like(value: torch.Tensor, bases: dict[int, Any]) -> torch.Tensor:
    """Makes a tensor with the metadata of another, in the memory that its storage has in ``bases``."""
    key = storage_key(value)
    if key not in bases:
        num_elements = value.untyped_storage().nbytes() // value.element_size()
        bases[key] = torch.empty(num_elements, dtype=value.dtype, device=value.device)
    base = bases[key]
    if base.dtype != value.dtype:
        base = base.view(value.dtype)
    example = base.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, FakeTensor) and isinstance(example, FakeTensor) and value.item_memo is not None:
        # A float that Dynamo hands out as a tensor: its ``item()`` is known, and code may depend on it.
        example.item_memo = value.item_memo
    return with_lazy_bits_of(value, example)


def examples_at_hints(values: Sequence[Any]) -> list[Any] | None:
    """Returns inputs like the trace's values at the sizes that it was traced with, in a fake mode of their own.

    For what asks which operators run: with numbers for sizes that takes a fraction of the time. Tensors that share
    memory share it again.

    Returns:
        The inputs, or None where a size has no such number (only the data gives it), a tensor is not strided, or one
        stands for a Python number.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any(one.layout is not torch.strided or getattr(one, "item_memo", None) is not None for one in tensors):
        return None
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    bases: dict[int, torch.UntypedStorage] = {}
    examples: list[Any] = []
    with mode, torch.inference_mode(False), torch.no_grad():
        for value in values:
            example = _at_hint(value, bases) if isinstance(value, torch.Tensor) else _hint(value)
            if example is None and value is not None:
                return None
            examples.append(example)
    return examples


def _at_hint(value: torch.Tensor, bases: dict[int, Any]) -> torch.Tensor | None:
    form = [_hint(one) for one in (*value.shape, *value.stride(), value.storage_offset())]
    num_bytes = _hint(value.untyped_storage().nbytes())
    if num_bytes is None or any(one is None for one in form):
        return None
    key = storage_key(value)
    if key not in bases:
        bases[key] = torch.empty(num_bytes // value.element_size(), dtype=value.dtype, device=value.device)
    base = bases[key]
    if base.dtype != value.dtype:
        base = base.view(value.dtype)
    dims = value.dim()
    example = base.as_strided(form[:dims], form[dims:-1], form[-1])
    return with_lazy_bits_of(value, example)


def _hint(value: Any) -> Any:
    """Returns the number that a symbolic number had in the trace, None if it had none; others as they are."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint if value.node.has_hint() else None
    return value


def share_memory(values: Sequence[Any]) -> bool:
    """Tells whether two of the tensors have one storage."""
    keys = [storage_key(v) for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided]
    return len(set(keys)) < len(keys)


def memory_is_shared(tensors: Iterable[torch.Tensor]) -> bool:
    """Tells of strided tensors whether two lie in one memory, whoever owns it; a fraction of a microsecond each."""
    starts = list(map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, tensors)))
    if len(set(starts)) == len(starts):
        return False
    starts = [start for start in starts if start]  # Memory of no bytes begins at 0.
    return len(set(starts)) < len(starts)


def with_dynamo_as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what ``torch.compiler.disable`` was wrapped around, where it was, for callers that Dynamo is off for.

    Compilers switch Dynamo off around what they return, which at each call takes as long as a small operator.
    Relies on the attributes that Dynamo itself unwraps such a function by.
    """
    # What wraps such a function copies its attributes: the number tells whose they are.
    attributes = getattr(function, "__dict__", {})
    is_its_own = attributes.get("_torchdynamo_wrapper_id") == id(function)
    if not (is_its_own and attributes.get("_torchdynamo_disable", False)):
        return function
    inner: Callable[..., Any] = attributes["_torchdynamo_orig_callable"]
    return inner


# Failures to trace --------------------------------------------------------------------------------

RESTARTS = (exc.RestartAnalysis, exc.TensorifyScalarRestartAnalysis)
"""What a compiler raises to make Dynamo trace once more, with more baked in; no failure, and none to catch."""

TRACING_FAILURES = (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)
"""What a call of a compiled function raises where Dynamo could not trace or compile it."""


def inner_error(err: BaseException) -> SglPiecewiseError | None:
    """Returns the error of this library that Dynamo passes on, wrapped or not; None if it is not about one."""
    inner = getattr(err, "inner_exception", err)  # Of BackendCompilerFailed.
    return inner if isinstance(inner, SglPiecewiseError) else None


def failure_reason(err: BaseException) -> tuple[str, traceback.StackSummary | None]:
    """Returns in one line why a trace failed, and the stack of the traced code then."""
    return _in_one_line(str(err)), getattr(err, "real_stack", None)


def stop_of_trace(gm: torch.nn.Module) -> tuple[str, traceback.StackSummary] | None:
    """Returns why and where Dynamo ended a trace before its function's end; None if it did not.

    Relies on the reason that Dynamo leaves at the graphs it compiles.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return _in_one_line(reason.reason), traceback.StackSummary.from_list(reason.user_stack)


def _in_one_line(message: str) -> str:
    """Keeps the headline of a message of Dynamo's and its explanation; hints follow for Dynamo's developers."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    explained = [line for line in lines if line.startswith("Explanation:")]
    return " ".join(lines[:1] + explained[:1])


# Sizes ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def dynamic_sizes(dims: Sequence[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """Makes Dynamo trace these dimensions as symbols; the block does not see earlier traces."""
    before = [(tensor, dict(vars(tensor))) for tensor, _ in dims]
    for tensor, dim in dims:
        mark_dynamic(tensor, dim)
    try:
        yield
    finally:
        for tensor, attributes in before:
            vars(tensor).clear()
            vars(tensor).update(attributes)


def compile_name() -> str:
    """Returns which compile of the process is in progress, as PyTorch's own reports name it."""
    found = CompileContext.current_compile_id()
    return "?" if found is None else str(found)
