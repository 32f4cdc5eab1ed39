"""What Dynamo does when it meets a marked call: one opaque node, whatever the arguments.

Tensors and symbolic integers go into the node as they are; other objects go in as handles, which compiled
code looks up before its graph runs, so that one trace serves equal layers that carry different objects.
Shapes come from the mark's ``fake``, traced so that Dynamo guards on just what it reads, or else from one
run of the body on fake tensors, after which Python objects are put back as they were.

Imported by Dynamo at trace time only; see `mark.MarkedFunction.__call__`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from . import torch_private_tracing as dynamo
from . import tree
from .mark import MarkedFunction
from .mark_call_site import ArgumentLeaf, CallSite, register_call_site
from .mark_handles import handle_of
from .mark_operator import SHAPE_ONLY, operator_returning
from .mark_results import Results


def trace_marked_call(mark: MarkedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Puts the call into the graph as one node; runs only where Dynamo gave a trace up in its middle."""
    return dynamo.untraced(mark.call_untraced)(*args, **kwargs)


dynamo.skip_frame(trace_marked_call)


class Callee(Protocol):
    """What tracing needs of something whose calls are one node: a mark, or what stands for another call.

    Attributes:
        fn: Runs on fake tensors, to see what it returns.
        name: For errors.
        fake: Gives results of the right structure without computing, or None.
    """

    fn: Callable[..., Any]
    name: str
    fake: Callable[..., Any] | None


def _trace(tx: Any, mark_variable: Any, args: Any, kwargs: Any) -> Any:
    """Handles a traced call of `trace_marked_call`; returns the variable of the mark's result."""
    mark = dynamo.real_object(tx, mark_variable)
    source = mark_variable.source
    if source is None:
        raise dynamo.TracingError(
            f"Mark {mark.name!r} is made inside the function that is being compiled. Mark it outside."
        )
    dynamo.guard_on_identity(source)
    call = TracedCall(tx, mark)
    call.take_object(mark, source)
    given, keywords = dynamo.list_of(tx, args), dynamo.dict_of(tx, kwargs)
    told = None if mark.fake is None else _trace_fake(tx, mark, source, given, keywords)
    arguments = call.take_arguments(given, keywords)
    results = Results(call)
    if told is None:
        spec = results.run_body(arguments)
    else:
        with dynamo.failures_told(lambda reason: _fake_fails(mark, reason)):
            spec = results.add_traced(told)
    return emit_call(call, results, spec, arguments, CallSite)


def emit_call(
    call: TracedCall,
    results: Results,
    spec: tree.Spec,
    arguments: tree.Spec,
    make_site: Callable[..., CallSite],
) -> Any:
    """Puts a call into the graph as one node.

    Args:
        call: Its arguments, taken.
        results: Its results, planned.
        spec: Their structure.
        arguments: Structure of the arguments.
        make_site: `CallSite`, or what makes one of another kind from the same fields.

    Returns:
        The variable of the whole result.
    """
    site = make_site(
        name=call.callee.name,
        arguments=arguments,
        argument_leaves=tuple(call.leaves),
        results=spec,
        result_leaves=tuple(results.leaves),
    )
    proxies = [tensor.as_proxy() for tensor in call.tensors]
    num_fresh = sum(leaf.kind == "fresh" for leaf in site.result_leaves)
    node_arguments = (proxies, call.handles, call.ints, register_call_site(site))
    fresh = dynamo.emit_call(call.tx, operator_returning(num_fresh), node_arguments, num_fresh)
    return results.variable(spec, fresh)


def _trace_fake(
    tx: Any, mark: MarkedFunction, source: Any, given: list[Any], keywords: dict[str, Any]
) -> Any:
    """Traces ``fake``; what it adds to the graph is marked as needed for shapes only."""
    before = set(dynamo.traced_nodes(tx))
    with dynamo.failures_told(lambda reason: _fake_fails(mark, reason)):
        result = dynamo.traced_attribute(tx, mark, "fake", source).call_function(tx, given, keywords)
    for node in dynamo.traced_nodes(tx):
        if node not in before and node.op not in ("placeholder", "get_attr"):
            node.meta[SHAPE_ONLY] = True
    return result


def _fake_fails(mark: MarkedFunction, reason: str) -> str:
    return (
        f"Mark {mark.name!r}: its fake cannot be traced, so a compiler cannot know what the call returns. Dynamo says: "
        f"{reason}\nIt takes the arguments of the body, and may look at shapes, dtypes and numbers, not at values: for "
        "one result like x, fake=lambda x, *args, **kwargs: torch.empty_like(x)."
    )


class TracedCall:
    """The arguments of one call, sorted into what the operator takes."""

    def __init__(self, tx: Any, callee: Callee) -> None:
        self.tx = tx
        self.callee = callee
        self.tensors: list[Any] = []
        self.handles: list[Any] = []
        self.ints: list[Any] = []
        self.symbolic_ints: list[torch.SymInt] = []
        self.leaves: list[ArgumentLeaf] = []
        self.values: list[Any] = []  # What the body gets when it runs on fake tensors.

    def take_object(self, value: Any, source: Any) -> None:
        """Makes an object the next handle of the call; the first is what is called."""
        self.handles.append(dynamo.node_argument(self.tx, value, source, handle_of))

    def take_arguments(self, given: list[Any], keywords: dict[str, Any]) -> tree.Spec:
        """Takes all arguments; returns the structure of (args, kwargs).

        Raises:
            TracingError: One cannot be handed to a call that is one node, or autograd would record it.
        """
        args = tuple(self.add(value, str(index)) for index, value in enumerate(given))
        kwargs = tuple(self.add(value, key) for key, value in keywords.items())
        self.refuse_autograd()
        children = (tree.Spec(tuple, tuple(range(len(args))), args), tree.Spec(dict, tuple(keywords), kwargs))
        return tree.Spec(tuple, (0, 1), children)

    def add(self, variable: Any, path: str) -> tree.Spec:
        """Takes one argument apart; returns its structure."""
        tx = self.tx
        number = dynamo.unread_number(variable)
        if number is not None and self.callee.fake is not None:
            # ``fake`` did not look at it, so no shape hangs on it: one trace serves every value.
            dynamo.guard_on_type(variable.source)
            return self._add_object(number, variable.source)
        variable = variable.realize()
        if dynamo.is_tensor_variable(variable):
            return self._add_tensor(variable)
        if dynamo.is_symbolic_scalar(variable):
            symbolic = dynamo.symbolic_int(variable)
            if symbolic is None:
                return self._add_constant(dynamo.scalar_constant(tx, variable))
            self.ints.append(variable.as_proxy())
            self.symbolic_ints.append(symbolic)
            self._add_leaf(ArgumentLeaf(kind="int", index=len(self.ints) - 1), symbolic)
            return tree.LEAF
        kind = dynamo.python_type(variable)
        if issubclass(kind, (tuple, list)) and (
            variable.source is None or kind in (tuple, list, torch.Size) or tree.is_named_tuple(kind)
        ):
            children = dynamo.list_of(tx, variable)
            return self._add_container(kind, range(len(children)), children, path)
        if issubclass(kind, dict) and (variable.source is None or kind is dict):
            items = dynamo.dict_of(tx, variable)
            return self._add_container(kind, items, items.values(), path)
        if variable.source is not None and not dynamo.is_constant(variable):
            value = dynamo.real_object(tx, variable)
            self._refuse_changed(variable, path)
            return self._add_object(value, dynamo.source_of(variable))
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind)]
            return self._add_container(
                kind, names, [dynamo.attribute_of(tx, variable, name) for name in names], path
            )
        if dynamo.is_constant(variable):
            return self._add_constant(variable.as_python_constant())
        raise dynamo.TracingError(
            f"Mark {self.callee.name!r}: argument {path} is a {kind.__name__} that the compiled function makes "
            "itself, so it does not exist when the marked function is called. Make it outside and pass it in, "
            "make it a dataclass, or pass its parts."
        )

    def _add_leaf(self, leaf: ArgumentLeaf, value: Any) -> None:
        self.leaves.append(leaf)
        self.values.append(value)

    def _add_tensor(self, variable: Any) -> tree.Spec:
        self.tensors.append(variable)
        self._add_leaf(
            ArgumentLeaf(kind="tensor", index=len(self.tensors) - 1), dynamo.example_value(variable)
        )
        return tree.LEAF

    def _add_constant(self, value: Any) -> tree.Spec:
        self._add_leaf(ArgumentLeaf(kind="constant", value=value), value)
        return tree.LEAF

    def _add_object(self, value: Any, source: Any) -> tree.Spec:
        self.take_object(value, source)
        # The first handle is the mark's.
        self._add_leaf(ArgumentLeaf(kind="object", index=len(self.handles) - 2), value)
        return tree.LEAF

    def _add_container(
        self, kind: type, keys: Iterable[Any], children: Iterable[Any], path: str
    ) -> tree.Spec:
        names = tuple(keys)
        specs = tuple(self.add(child, f"{path}.{name}") for name, child in zip(names, children, strict=True))
        return tree.Spec(kind, names, specs)

    def _refuse_changed(self, variable: Any, path: str) -> None:
        if dynamo.has_pending_changes(self.tx, variable):
            raise dynamo.TracingError(
                f"Mark {self.callee.name!r}: argument {path} is an object that the compiled function changed before "
                "this call. Compiled code changes objects after its graph has run, so the marked function would "
                "not see it. Pass what changed as an argument of its own, or change it inside the mark."
            )

    def add_symbol(self, symbol: Any) -> int | None:
        """Gives the operator one more integer: a symbol that a result's size hangs on; returns its index."""
        proxy = dynamo.proxy_of_symbol(self.tx, symbol)
        if proxy is None:
            return None
        self.ints.append(proxy)
        return len(self.ints) - 1

    def refuse_autograd(self) -> None:
        """Raises if the call would need a gradient."""
        if torch.is_grad_enabled() and any(dynamo.example_value(one).requires_grad for one in self.tensors):
            raise dynamo.TracingError(
                f"Mark {self.callee.name!r} is compiled while autograd records, and a marked call has no gradient "
                "in a graph. Call under torch.inference_mode() or torch.no_grad()."
            )


dynamo.trace_calls_with(trace_marked_call, _trace)
