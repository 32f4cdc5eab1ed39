"""What a marked call returns, as far as a trace of the code around it has to know: a plan for each leaf.

It comes from the mark's traced ``fake``, or from one run of the body on fake tensors. This module must not know how
arguments go into the node.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from . import torch_private, torch_private_sizes, tree
from . import torch_private_tracing as dynamo
from .mark import ActiveCapture, use_capture
from .mark_call_site import FreshTensor, ResultLeaf
from .object_state import unchanged_objects

if TYPE_CHECKING:
    from .mark_tracing import TracedCall

_BAKED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


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
    return make(tx, spec.kind, *(children if tree.is_named_tuple(spec.kind) else [dynamo.tuple_of(children)]))
