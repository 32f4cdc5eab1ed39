"""What Dynamo does when it meets a shared layer: one node, run by the `LayerRunner` of the compiled forward.

The node is a marked call's operator with another call site, so passes split there as they do at marks. Only
it is no break: the layer is compiled apart, and the marks inside it break. What it returns is learnt by
running the layer on fake tensors, once for layers of one structure.

Imported for its effect on Dynamo.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sgl_piecewise.runtime import torch_private, tree
from sgl_piecewise.runtime import torch_private_tracing as dynamo
from sgl_piecewise.runtime.errors import MarkResultError
from sgl_piecewise.runtime.mark import MarkedFunction, use_capture
from sgl_piecewise.runtime.mark_call_site import CallSite, ResultLeaf, call_site
from sgl_piecewise.runtime.mark_operator import is_marked_call
from sgl_piecewise.runtime.mark_results import Results
from sgl_piecewise.runtime.mark_tracing import TracedCall, emit_call
from sgl_piecewise.runtime.torch_private_entries import without_dynamic_marks

from .layer_runner import current_layer_runner
from .layer_sharing import call_as_node, forward_of, original_class
from .traced_function import NOT_KNOWN

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LayerCallSite(CallSite):
    """The call of a shared layer.

    Attributes:
        dynamic_dims: Of each tensor, the dimensions that are symbolic in the forward around the layer.
    """

    is_break: ClassVar[bool] = False

    dynamic_dims: tuple[tuple[int, ...], ...]

    def call(
        self, mark: Any, tensors: Sequence[torch.Tensor], objects: Sequence[Any], ints: Sequence[int]
    ) -> Any:
        """Runs the layer, which stands where a mark would."""
        runner = current_layer_runner()
        if runner.skips_guards:
            known = functools.partial(runner.run_known, mark)
            result = super().call(_LayerCall(known), tensors, objects, ints)
            if result is not NOT_KNOWN:
                return result
        # Guards tell tensors made in inference mode, and marked ones, from others: inputs of the forward are either.
        tensors = torch_private.as_normal_tensors(list(map(without_dynamic_marks, tensors)))
        run = functools.partial(runner.run, mark, self.dynamic_dims, tensors)
        return super().call(_LayerCall(run), tensors, objects, ints)

    def _mismatch(self, what: str) -> MarkResultError:
        return MarkResultError(
            f"Layer {self.name!r} returned another result than an equal layer did while the forward was traced: "
            f"{what}. Layers whose classes, tensors and flags are equal must return alike; keep this model's layers "
            "apart with shares_layers=False, or give those that return otherwise another class."
        )


class _LayerCall:
    """Runs a layer where a call site expects a mark; no capture asks for a stand-in, since it is no break."""

    def __init__(self, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._run = run

    def call_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any], stand_in: Any) -> Any:
        """Runs the layer with these arguments."""
        return self._run(args, kwargs)


def is_layer_call(node: torch.fx.Node) -> bool:
    """Tells whether a node of a graph is the call of a shared layer."""
    return is_marked_call(node.target) and isinstance(call_site(str(node.args[3])), LayerCallSite)


class _Layer:
    """A layer as tracing wants it: with a function that runs it on fake tensors."""

    def __init__(self, layer: torch.nn.Module, name: str) -> None:
        self.name = name
        self.fake: Callable[..., Any] | None = None
        forward = forward_of(layer)

        def run(*args: Any, **kwargs: Any) -> Any:
            return forward(layer, *args, **kwargs)

        self.fn = run


class _FakeMarks:
    """Gives what marks would return, for a run that only has to give shapes."""

    def call_marked(self, mark: MarkedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with use_capture(None):
            return (mark.fn if mark.fake is None else mark.fake)(*args, **kwargs)


_Plan = tuple[tree.Spec, list[ResultLeaf]]
# By the symbols of a trace: the result of a call, by the layer's structure and what it is called with.
_PLANS: weakref.WeakKeyDictionary[Any, dict[Any, _Plan]] = weakref.WeakKeyDictionary()
# By the symbols of a trace: names and reasons of layers that are no nodes in it.
_TOLD: weakref.WeakKeyDictionary[Any, set[tuple[str, str]]] = weakref.WeakKeyDictionary()


def _trace(tx: Any, layer_variable: Any, args: Any, kwargs: Any) -> Any:
    """Handles a traced call of `call_as_node`; returns the variable of its result."""
    layer = dynamo.real_object(tx, layer_variable)
    name = original_class(layer).__qualname__
    try:
        result = _trace_as_node(tx, layer, layer_variable.source, args, kwargs)
    except dynamo.TracingError as err:
        _warn_once_a_trace(tx, name, str(err))
        return dynamo.tuple_of([dynamo.constant(False), dynamo.constant(None)])
    return dynamo.tuple_of([dynamo.constant(True), result])


def _warn_once_a_trace(tx: Any, name: str, reason: str) -> None:
    """Says why a layer is no node: once for equal ones, in words of layers where the reason speaks of marks."""
    told = _TOLD.setdefault(tx.fake_mode.shape_env, set())
    if (name, reason) in told:
        return
    told.add((name, reason))
    reason = reason.removeprefix(f"Mark {name!r}: ").replace(f"Mark {name!r}", "it")
    reason = reason.replace("the marked function", "the layer").replace("a marked call", "such a call")
    _logger.warning("Layer %s is traced where it stands, not once for all equal ones: %s", name, reason)


def _trace_as_node(tx: Any, layer: torch.nn.Module, source: Any, args: Any, kwargs: Any) -> Any:
    name = original_class(layer).__qualname__
    if source is None:
        raise dynamo.TracingError(f"Layer {name} is made inside the function that is being compiled.")
    call = TracedCall(tx, _Layer(layer, name))
    call.take_object(layer, source)
    arguments = call.take_arguments(dynamo.list_of(tx, args), dynamo.dict_of(tx, kwargs))
    examples = [dynamo.example_value(tensor) for tensor in call.tensors]
    results, spec = _planned(call, arguments, layer, examples)
    dims = tuple(
        tuple(dim for dim, size in enumerate(example.shape) if isinstance(size, torch.SymInt))
        for example in examples
    )
    # Call sites are told apart by their text, which the name begins.
    call.callee.name = f"{name}, dynamic {dims}"
    return emit_call(call, results, spec, arguments, functools.partial(LayerCallSite, dynamic_dims=dims))


def _planned(
    call: TracedCall, arguments: tree.Spec, layer: torch.nn.Module, examples: list[torch.Tensor]
) -> tuple[Results, tree.Spec]:
    """Returns what the call gives, from an equal call if there was one."""
    plans = _PLANS.setdefault(call.tx.fake_mode.shape_env, {})
    called_with = (layer_structure(layer), arguments, tuple(call.leaves))
    key = (*called_with, _sizes_of(call, examples))
    results = Results(call)
    if key in plans:
        spec, leaves = plans[key]
        results.leaves.extend(leaves)
        return results, spec
    num_ints = len(call.ints)
    spec = results.run_body(arguments, _FakeMarks())
    if len(call.ints) == num_ints:
        # The run may have found that two sizes are one; the next layer's tensors have it from the start.
        for sizes in (key[-1], _sizes_of(call, examples)):
            plans[*called_with, sizes] = spec, list(results.leaves)
    return results, spec


def _sizes_of(call: TracedCall, examples: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Returns what results can hang on of the tensors and symbolic integers of a call, as text."""
    metas = [f"{one.dtype} {one.device} {one.shape} {one.stride()}" for one in examples]
    return (*metas, *map(str, call.symbolic_ints))


def layer_structure(layer: torch.nn.Module) -> str:
    """Returns what a layer's results can hang on, as text: classes, tensors, flags; not numbers or objects.

    A number or object that decides what a layer returns (not what is in it) is found when the layer runs.
    """
    lines = []
    for name, module in layer.named_modules():
        kind = original_class(module)
        lines.append(f"{name} {kind.__module__}.{kind.__qualname__} #{id(kind)}")
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            described = (
                None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            )
            lines.append(f" {key} {described}")
        for key, value in vars(module).items():
            if value is None or isinstance(value, bool | str | torch.dtype | torch.device):
                lines.append(f" {key}={value!r}")
            elif isinstance(value, torch.Tensor):
                lines.append(f" {key} {value.shape} {value.dtype} {value.device}")
    return "\n".join(lines)


dynamo.trace_calls_with(call_as_node, _trace)
