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

from . import torch_private, torch_private_sizes, tree
from . import torch_private_tracing as dynamo
from .mark import ActiveCapture, MarkedFunction, use_capture
from .mark_call_site import ArgumentLeaf, CallSite, FreshTensor, ResultLeaf, register_call_site
from .mark_handles import handle_of
from .mark_operator import SHAPE_ONLY, operator_returning
from .object_state import unchanged_objects

_BAKED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


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
            variable.source is None or kind in (tuple, list, torch.Size) or _is_named(kind)
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


class Results:
    """What a marked call returns: a plan for each leaf."""

    def __init__(self, call: TracedCall) -> None:
        self.leaves: list[ResultLeaf] = []
        self._call = call
        examples = [dynamo.example_value(tensor) for tensor in call.tensors]
        self._examples = examples
        self._sizes = torch_private_sizes.SizeExpressions(examples, call.symbolic_ints, call.add_symbol)

    def run_body(self, arguments: tree.Spec, capture: ActiveCapture | None = None) -> tree.Spec:
        """Runs the body on fake tensors and plans what it returns.

        Args:
            arguments: Structure of the arguments.
            capture: Serves the marks that the body meets; None runs theirs too.

        Returns:
            The structure of the result.

        Raises:
            TracingError: The body cannot run so, or returns what a graph cannot follow.
        """
        mark = self._call.callee
        args, kwargs = tree.unflatten(arguments, self._call.values)
        try:
            with (
                unchanged_objects((args, kwargs), mark.fn),
                use_capture(capture),
                dynamo.on_fake_tensors(self._call.tx),
            ):
                result = mark.fn(*args, **kwargs)
        except Exception as err:
            raise dynamo.TracingError(
                f"Mark {mark.name!r}: its body cannot run on fake tensors ({type(err).__name__}: {err}), so a "
                "compiler cannot know what it returns. Say it in two lines, for example for one result like x:\n"
                f"    @eager_on_graph(fake=lambda x, *args, **kwargs: torch.empty_like(x))\n    def {mark.name}(...):"
            ) from err
        leaves, spec = tree.flatten(result)
        for leaf in leaves:
            self._add_leaf(leaf)
        return spec

    def _add_leaf(self, leaf: Any) -> None:
        mark = self._call.callee
        if not isinstance(leaf, torch.Tensor):
            if torch_private_sizes.free_symbols(leaf):
                raise dynamo.TracingError(
                    f"Mark {mark.name!r} returns a number that follows from a size which varies ({leaf}), and a scalar "
                    "result is a constant to compiled code. Take it from a tensor's shape outside the marked function, "
                    "or compile with dynamic=False."
                )
            if not isinstance(leaf, _BAKED):
                raise dynamo.TracingError(
                    f"Mark {mark.name!r} returns a {type(leaf).__name__}. A marked function may return tensors, None, "
                    "plain scalars and strings, and tuples, lists, dicts or dataclasses of those."
                )
            self.leaves.append(ResultLeaf(kind="constant", value=leaf))
            return
        for index, example in enumerate(self._examples):
            if leaf is example:
                self.leaves.append(ResultLeaf(kind="argument", index=index))
                return
            if torch_private.is_same_storage(leaf, example):
                raise dynamo.TracingError(
                    f"Mark {mark.name!r} returns a view of an argument, which a compiler cannot follow. Return the "
                    "argument itself and take the view outside, or return a copy."
                )
        if not torch_private.is_fake_type(type(leaf)):
            raise dynamo.TracingError(
                f"Mark {mark.name!r} returns a tensor that existed before the call. A compiler needs to know who owns "
                "it: pass it to the marked function as an argument, or return a copy."
            )
        if leaf.layout is not torch.strided:
            raise dynamo.TracingError(
                f"Mark {mark.name!r} returns a {leaf.layout} tensor; only strided ones work."
            )
        try:
            fresh = FreshTensor(
                shape=tuple(self._sizes.of(size) for size in leaf.shape),
                stride=tuple(self._sizes.of(stride) for stride in leaf.stride()),
                dtype=leaf.dtype,
                device=leaf.device,
            )
        except ValueError as err:
            raise dynamo.TracingError(
                f"Mark {mark.name!r} returns a tensor of shape {tuple(leaf.shape)}, and {err}. Where the size follows "
                "from the arguments say so with fake=; where only the data gives it, return a tensor of fixed size."
            ) from err
        self.leaves.append(ResultLeaf(kind="fresh", fresh=fresh))

    def add_traced(self, variable: Any) -> tree.Spec:
        """Plans what the traced ``fake`` returned; returns its structure."""
        tx = self._call.tx
        variable = variable.realize()
        if dynamo.is_tensor_variable(variable):
            for index, tensor in enumerate(self._call.tensors):
                if tensor.as_proxy().node is variable.as_proxy().node:
                    self.leaves.append(ResultLeaf(kind="argument", index=index))
                    return tree.LEAF
            self._add_leaf(dynamo.example_value(variable))
            return tree.LEAF
        if dynamo.is_symbolic_scalar(variable):
            self._add_leaf(dynamo.scalar_constant(tx, variable))
            return tree.LEAF
        kind = dynamo.python_type(variable)
        if issubclass(kind, (tuple, list)) and kind is not torch.Size:
            children = dynamo.list_of(tx, variable)
            return tree.Spec(kind, tuple(range(len(children))), tuple(map(self.add_traced, children)))
        if issubclass(kind, dict):
            items = dynamo.dict_of(tx, variable)
            return tree.Spec(kind, tuple(items), tuple(map(self.add_traced, items.values())))
        if dataclasses.is_dataclass(kind):
            names = tuple(field.name for field in dataclasses.fields(kind))
            children = [dynamo.attribute_of(tx, variable, name) for name in names]
            return tree.Spec(kind, names, tuple(map(self.add_traced, children)))
        self._add_leaf(variable.as_python_constant() if dynamo.is_constant(variable) else variable)
        return tree.LEAF

    def variable(self, spec: tree.Spec, fresh: list[Any]) -> Any:
        """Returns the variable of the whole result."""
        tensors = iter(fresh)
        leaves = []
        for leaf in self.leaves:
            if leaf.kind == "fresh":
                leaves.append(next(tensors))
            elif leaf.kind == "argument":
                leaves.append(self._call.tensors[leaf.index])
            else:
                leaves.append(dynamo.constant(leaf.value))
        return _build(self._call.tx, spec, iter(leaves))


def _build(tx: Any, spec: tree.Spec, leaves: Any) -> Any:
    """Traces the making of a nested value."""
    if spec.kind is None:
        return next(leaves)
    children = [_build(tx, child, leaves) for child in spec.children]
    if spec.kind is tuple:
        return dynamo.tuple_of(children)
    if spec.kind is list:
        return dynamo.python_call(tx, list, dynamo.tuple_of(children))
    make = dynamo.python_call if spec.kind is dict else dynamo.class_call
    if issubclass(spec.kind, dict):
        named = zip(spec.keys, children, strict=True)
        pairs = [dynamo.tuple_of([dynamo.constant(key), child]) for key, child in named]
        return make(tx, spec.kind, dynamo.tuple_of(pairs))
    if dataclasses.is_dataclass(spec.kind):
        by_name = dict(zip(spec.keys, children, strict=True))
        fields = [field.name for field in dataclasses.fields(spec.kind) if field.init]
        return make(tx, spec.kind, *[by_name[name] for name in fields])
    return make(tx, spec.kind, *(children if _is_named(spec.kind) else [dynamo.tuple_of(children)]))


def _is_named(kind: type) -> bool:
    return tree.named_tuple_maker(kind) is not None


dynamo.trace_calls_with(trace_marked_call, _trace)
