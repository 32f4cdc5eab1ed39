"""Private PyTorch APIs of tracing, in a file of their own because importing Dynamo takes seconds.

Only what runs while something is compiled imports it. As in ``torch_private`` each piece is small, says what
it relies on, and knows nothing of the rest of the library; tried on 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import exc
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import LazyProxy
from torch._dynamo.source import AttrSource, ChainedSource, GlobalSource, WeakRefCallSource
from torch._dynamo.utils import preserve_rng_state
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import GraphArg, VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.nn_module import NNModuleVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_map_only

from .errors import CompileError
from .torch_private_compiling import data_dependence_allowed


class TracingError(CompileError, exc.TorchRuntimeError):
    """A `CompileError` that Dynamo lets through as it is, and neither wraps nor takes for a graph break."""


@contextlib.contextmanager
def failures_told(tell: Callable[[str], str]) -> Iterator[None]:
    """Makes a `TracingError` of what Dynamo raises in the block because it cannot trace; restarts pass.

    Else Dynamo would take it for a graph break, and run the code around as it is: where that code asks whether it
    is traced, with the wrong answer.

    Args:
        tell: Makes the message of Dynamo's reason, in one line.
    """
    try:
        yield
    except TracingError:
        raise
    except (exc.Unsupported, exc.UserError, exc.ObservedException, exc.TorchRuntimeError) as err:
        kind = type(err).__name__.removeprefix("Observed")
        lines = [line.strip() for line in str(err).splitlines() if line.strip()] or [kind]
        explained = [line for line in lines[1:2] if line.startswith("Explanation:")]
        raise TracingError(tell(" ".join([lines[0], *explained]))) from err


@dataclass(frozen=True)
class CallSource(ChainedSource):
    """A graph input that is a function of something the frame can load; nothing guards on it.

    Compiled code calls the function (found by module and name) before it runs its graph.
    """

    module: str
    function: str

    @property
    def _name_template(self) -> str:
        return f"__import__('importlib').import_module({self.module!r}).{self.function}({{0}})"

    def reconstruct(self, codegen: Any) -> None:
        """Makes compiled code call the function; Dynamo asks for it."""
        codegen.add_push_null(lambda: codegen.load_import_from(self.module, self.function))
        codegen(self.base)
        codegen.extend_output(create_call_function(1, False))


class _HandledFunction(VariableTracker):
    """A function whose calls are traced by a handler of ours."""

    def __init__(self, handler: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._handler = handler

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        return self._handler(tx, *args, **kwargs)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with Dynamo switched off in it and in what it calls."""
    wrapped: Callable[..., Any] = torch.compiler.disable(function)
    return wrapped


def skip_frame(function: Any) -> None:
    """Makes Dynamo leave a function's own frame alone; what it calls in Python is another matter."""
    skip_code(function.__code__)


def trace_calls_with(function: Any, handler: Callable[..., Any]) -> None:
    """Makes Dynamo hand calls of ``function`` to ``handler(tx, *variables)``, which returns a variable.

    Relies on the builder's table of objects with special handling.
    """
    VariableBuilder._id_dispatch()[id(function)] = lambda builder, value: _HandledFunction(
        handler, source=builder.source
    )


def node_argument(tx: Any, value: Any, source: Any, function: Callable[[Any], torch.Tensor]) -> Any:
    """Returns the proxy of a graph input ``function(object)``, one per source; ``function`` must be global."""
    call = CallSource(source, function.__module__, function.__name__)
    tracer = tx.output.root_tracer
    for proxy in tracer.input_name_to_proxy.values():
        argument = proxy.node.meta.get("grapharg")
        if argument is not None and argument.source == call:
            return proxy
    example = function(value)
    fake = tx.fake_mode.from_tensor(example, static_shapes=True)
    proxy = tracer.create_graph_input("handle", torch.Tensor, fake, source=call)
    proxy.node.meta["grapharg"] = GraphArg(call, example, False, fake, example_strong_ref=example)
    return proxy


def emit_call(tx: Any, operator: Any, arguments: tuple[Any, ...], num_results: int) -> list[Any]:
    """Adds a call of an operator that returns so many tensors; returns their variables."""
    result: Any = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", operator, arguments, {}))
    if num_results == 1:
        return [result]
    return list(result.items) if num_results else []


def python_call(tx: Any, function: Any, *arguments: Any) -> Any:
    """Traces a call of a builtin or class."""
    return VariableTracker.build(tx, function).call_function(tx, list(arguments), {})


def class_call(tx: Any, kind: type, *arguments: Any) -> Any:
    """Traces the making of an object; Dynamo wants to know where it can load the class from."""
    source = GlobalSource(tx.output.install_global_by_id("sgl_piecewise_class", kind))
    return VariableTracker.build(tx, kind, source).call_function(tx, list(arguments), {})


def list_of(tx: Any, variable: Any) -> list[Any]:
    """Returns the items of a variable that is a sequence."""
    items: Any = python_call(tx, tuple, variable)
    return list(items.items)


def dict_of(tx: Any, variable: Any) -> dict[Any, Any]:
    """Returns the items of a variable that is a dict with constant keys, and guards on the keys."""
    pairs = [list_of(tx, pair) for pair in list_of(tx, variable.call_method(tx, "items", [], {}))]
    return {key.as_python_constant(): value for key, value in pairs}


def attribute_of(tx: Any, variable: Any, name: str) -> Any:
    """Returns the variable of an attribute."""
    return variable.var_getattr(tx, name)


def constant(value: Any) -> Any:
    """Returns the variable of a constant."""
    return ConstantVariable.create(value)


def tuple_of(items: list[Any]) -> Any:
    """Returns the variable of a new tuple."""
    return TupleVariable(items)


def unread_number(variable: Any) -> int | float | None:
    """Returns an int or float that the trace has not looked at, so that nothing guards on it; or None."""
    if not isinstance(variable, LazyVariableTracker) or variable.is_realized() or variable.source is None:
        return None
    value = variable.peek_value()
    return value if type(value) in (int, float) else None


def guard_on_type(source: Any) -> None:
    """Makes compiled code valid only while what the source loads keeps its type."""
    install_guard(source.make_guard(GuardBuilder.TYPE_MATCH))


def guard_on_identity(source: Any) -> None:
    """Makes compiled code valid only while the source loads the same object."""
    install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def is_tensor_variable(variable: Any) -> bool:
    """Tells whether a variable is a tensor; an array of NumPy's, for which a graph has a tensor too, is none."""
    return isinstance(variable, TensorVariable) and not isinstance(variable, NumpyNdarrayVariable)


def symbolic_int(variable: Any) -> torch.SymInt | None:
    """Returns the symbolic integer of a variable, or None; other symbolic scalars become constants."""
    if not isinstance(variable, SymNodeVariable):
        return None
    return variable.sym_num if isinstance(variable.sym_num, torch.SymInt) else None


def scalar_constant(tx: Any, variable: Any) -> Any:
    """Returns the value of a symbolic float or bool, and guards on it."""
    return variable.evaluate_expr(tx.output)


def is_symbolic_scalar(variable: Any) -> bool:
    """Tells whether a variable is a symbolic integer, float or bool."""
    return isinstance(variable, SymNodeVariable)


def real_object(tx: Any, variable: Any) -> Any:
    """Returns the Python object behind a variable that stands for one.

    Raises:
        NotImplementedError: There is none, or none that tracing can reach.
    """
    if isinstance(variable, NNModuleVariable):
        return tx.output.get_submodule(variable.module_key)
    if isinstance(variable, UserDefinedObjectVariable):
        return variable.value
    if isinstance(variable, UserFunctionVariable):
        return variable.get_function()
    try:
        return variable.as_python_constant()
    except NotImplementedError:
        # It is made of what is no constant, such as a range or a partial call of numbers that vary.
        return _value_at(tx, source_of(variable))


def source_of(variable: Any) -> Any:
    """Returns where the traced function finds the object behind a variable, or None.

    Dynamo has for a weak reference where it finds what that refers to.
    """
    source = variable.source
    return source.base if isinstance(source, WeakRefCallSource) else source


def source_name(source: Any) -> str:
    """Returns a source as Dynamo writes it in guards, which is Python: ``L['x'].ids``."""
    return str(source.name() if callable(source.name) else source.name)  # Older versions have a method.


def _value_at(tx: Any, source: Any) -> Any:
    """Returns what lies at a source when the traced function begins."""
    name = source_name(source)
    try:
        return eval(name, {"L": tx.output.local_scope, "G": tx.output.global_scope})
    except (AttributeError, LookupError, NameError, SyntaxError, TypeError) as err:
        raise NotImplementedError(f"nothing is found at {name}") from err


def traced_attribute(tx: Any, owner: Any, name: str, source: Any) -> Any:
    """Returns the variable of an attribute of a real object."""
    return VariableTracker.build(tx, getattr(owner, name), AttrSource(source, name))


def python_type(variable: Any) -> type:
    """Returns the type of what a variable stands for."""
    try:
        kind: type = variable.python_type()
    except NotImplementedError:
        return object
    return kind


def is_constant(variable: Any) -> bool:
    """Tells whether a variable is a plain constant, which compiled code may hold."""
    return isinstance(variable, ConstantVariable) or (
        variable.source is None and bool(variable.is_python_constant())
    )


def has_pending_changes(tx: Any, variable: Any) -> bool:
    """Tells whether traced code changed an object; compiled code does so only after its graph has run."""
    return bool(tx.output.side_effects.has_pending_mutation(variable))


def example_value(variable: Any) -> torch.Tensor:
    """Returns the fake tensor of a tensor variable."""
    value: torch.Tensor = variable.as_proxy().node.meta["example_value"]
    return value


@contextlib.contextmanager
def on_fake_tensors(tx: Any) -> Iterator[None]:
    """Runs the block on the trace's fake tensors; real tensors it meets are made fake.

    In inference mode, where nothing records: real tensors may have been made in it, and can be written nowhere
    else.
    """
    mode = tx.fake_mode
    with (
        torch.inference_mode(not torch.is_grad_enabled()),
        preserve_rng_state(),
        mode,
        _allowing_real_inputs(mode),
        _RealInputsAsFakes(mode),
        data_dependence_allowed(mode.shape_env),
        mode.shape_env.ignore_fresh_unbacked_symbols(),
    ):
        yield


class _RealInputsAsFakes(TorchDispatchMode):
    """Makes real tensors fake before a fake mode sees them, which runs ``real.add_(1)`` for real (torch 2.13)."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with disable_current_modes():
            fake: torch.Tensor = self._mode.fake_tensor_converter.from_real_tensor(self._mode, tensor)
        return fake


@contextlib.contextmanager
def _allowing_real_inputs(mode: Any) -> Iterator[None]:
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def proxy_of_symbol(tx: Any, symbol: Any) -> Any:
    """Returns the node that gives a symbol's value in the graph, or None."""
    bound = tx.output.current_tracer.bound_symbols
    proxy = bound.get(symbol)
    if isinstance(proxy, LazyProxy):
        proxy = bound[symbol] = proxy()
    return proxy


def traced_nodes(tx: Any) -> list[Any]:
    """Returns the nodes of the graph in the making."""
    return list(tx.output.graph.nodes)
