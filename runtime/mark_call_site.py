"""How the arguments and results of a marked call fit together, under a text that names it.

A call site takes what the operator in a graph gets (tensors, objects, integers), calls the mark with it, and
checks what comes back against what tracing was told. Nothing here knows Dynamo or the operator.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from . import torch_private, torch_private_sizes, tree
from .errors import CompileError, MarkResultError

# Sizes and strides of results: constants, or functions of the call's tensors and integers.
Size = int | torch_private_sizes.SizeExpression


@dataclass(frozen=True, kw_only=True)
class ArgumentLeaf:
    """Where one leaf of the arguments comes from.

    Attributes:
        kind: The list of the operator that holds it, or ``constant``.
        index: Its place in that list.
        value: The constant.
    """

    kind: Literal["tensor", "object", "int", "constant"]
    index: int = 0
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class FreshTensor:
    """A result that the marked function makes.

    Attributes:
        shape: Its sizes.
        stride: Its strides; a result with others is copied into these.
        dtype: Its dtype.
        device: Its device.
    """

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self, tensors: Sequence[torch.Tensor], ints: Sequence[Any]) -> torch.Tensor:
        """Returns a tensor like it, contents undefined."""
        return torch.empty_strided(
            torch_private_sizes.evaluated(self.shape, tensors, ints),
            torch_private_sizes.evaluated(self.stride, tensors, ints),
            dtype=self.dtype,
            device=self.device,
        )


@dataclass(frozen=True, kw_only=True)
class ResultLeaf:
    """What one leaf of the result is.

    Attributes:
        kind: ``fresh`` (the operator returns it), ``argument`` (one of the tensor arguments itself) or
            ``constant`` (baked into what follows the call).
        fresh: Its metadata, if fresh.
        index: Which tensor argument.
        value: The constant.
    """

    kind: Literal["fresh", "argument", "constant"]
    fresh: FreshTensor | None = None
    index: int = 0
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """How the arguments and results of a marked call fit together.

    Attributes:
        name: The mark's name.
        arguments: Structure of (args, kwargs).
        argument_leaves: Its leaves.
        results: Structure of the result.
        result_leaves: Its leaves.
        is_break: Whether a breakable capture stops for the call.
    """

    is_break: ClassVar[bool] = True

    name: str
    arguments: tree.Spec
    argument_leaves: tuple[ArgumentLeaf, ...]
    results: tree.Spec
    result_leaves: tuple[ResultLeaf, ...]

    def call(
        self, mark: Any, tensors: Sequence[torch.Tensor], objects: Sequence[Any], ints: Sequence[int]
    ) -> Any:
        """Calls the mark with its arguments put together again.

        Raises:
            CompileError: The body changed a list or dict argument, which traced code cannot see.
        """
        sources = {"tensor": tensors, "object": objects, "int": ints}
        leaves = [
            leaf.value if leaf.kind == "constant" else sources[leaf.kind][leaf.index]
            for leaf in self.argument_leaves
        ]
        arguments = tree.unflatten(self.arguments, leaves)
        before = [
            (container, _items(container))
            for container in (_containers(arguments, self.arguments) if self._has_containers else ())
        ]
        args, kwargs = arguments
        result = mark.call_compiled(args, kwargs, lambda: self.stand_in(tensors, ints))
        for container, items in before:
            now = _items(container)
            if len(now) != len(items) or any(one is not other for one, other in zip(now, items, strict=True)):
                raise CompileError(
                    f"Mark {self.name!r} changed a {type(container).__name__} argument. Compiled code around it would "
                    "go on with what it held before; return the values instead."
                )
        return result

    @functools.cached_property
    def _has_containers(self) -> bool:
        return any(map(_holds_containers, self.arguments.children))

    @functools.cached_property
    def _returns_arguments(self) -> bool:
        return any(one.kind == "argument" for one in self.result_leaves)

    @functools.cached_property
    def _has_fresh(self) -> bool:
        return any(one.fresh is not None for one in self.result_leaves)

    @functools.cached_property
    def _sizes(self) -> torch_private_sizes.SizesOfCall:
        return torch_private_sizes.SizesOfCall(
            [None if one.fresh is None else (one.fresh.shape, one.fresh.stride) for one in self.result_leaves]
        )

    def stand_in(self, tensors: Sequence[torch.Tensor], ints: Sequence[int]) -> Callable[..., Any]:
        """Returns what gives results as tracing was told, contents undefined, for calls of this shape.

        It keeps none of the tensors.
        """
        sizes = self._sizes.of(tensors, ints)

        def results(*args: Any, **kwargs: Any) -> Any:
            by_index = self._tensors_in(args, kwargs) if self._returns_arguments else {}
            leaves = [
                torch.empty_strided(*form, dtype=plan.fresh.dtype, device=plan.fresh.device)
                if plan.fresh is not None
                else by_index[plan.index]
                if plan.kind == "argument"
                else plan.value
                for plan, form in zip(self.result_leaves, sizes, strict=True)
            ]
            return tree.unflatten(self.results, leaves)

        return results

    def _tensors_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Returns the tensors among a call's arguments, by the operator's index of them."""
        given = tree.flatten((args, kwargs))[0]
        pairs = zip(self.argument_leaves, given, strict=True)
        return {leaf.index: value for leaf, value in pairs if leaf.kind == "tensor"}

    def fresh_results(self, result: Any, tensors: Sequence[torch.Tensor], ints: Sequence[int]) -> list[Any]:
        """Checks a result against what tracing was told, and returns its fresh tensors.

        Raises:
            MarkResultError: They differ; the message names the mark, the path and both sides.
        """
        leaves = tree.leaves_of(self.results, result)
        if leaves is None:
            found = tree.difference(self.results, tree.flatten(result)[1], "result")
            assert found is not None, "structures differ and are equal"
            raise self._mismatch(found.replace("captured", "traced"))
        fresh: list[Any] = []
        sizes = self._sizes.of(tensors, ints)
        memory = torch_private.memory_of(tensors) if self._has_fresh else frozenset()
        for index, (leaf, plan) in enumerate(zip(leaves, self.result_leaves, strict=True)):
            problem = _problem(leaf, plan, None if sizes[index] is None else sizes[index][0], tensors, memory)
            if problem is not None:
                raise self._mismatch(f"{tree.paths(self.results, 'result')[index]}: {problem}")
            if plan.fresh is not None:
                fresh.append(_with_strides(leaf, sizes[index][1]))
        return fresh

    def _mismatch(self, what: str) -> MarkResultError:
        return MarkResultError(
            f"Mark {self.name!r} gave compiled code another result than tracing was told: {what}. "
            "Tracing asks fake=, and without one runs the body on fake tensors. Make `fake` return what the "
            "body returns: the same structure, scalars, shapes and dtypes, torch.empty for a fresh tensor, and an "
            "argument itself only where the body returns that argument."
        )


def _problem(
    leaf: Any,
    plan: ResultLeaf,
    shape: tuple[Any, ...] | None,
    tensors: Sequence[torch.Tensor],
    memory: frozenset[Any],
) -> str | None:
    """Says how a leaf differs from its plan and, if it is to be fresh, its shape; or returns None.

    ``memory`` is that of ``tensors``.
    """
    if plan.kind == "constant":
        if type(leaf) is type(plan.value) and (leaf is plan.value or leaf == plan.value):
            return None
        return f"traced {plan.value!r:.80}, now {leaf!r:.80}"
    if not isinstance(leaf, torch.Tensor):
        return f"traced a tensor, now {leaf!r:.80}"
    if plan.kind == "argument":
        argument = tensors[plan.index]
        if leaf is argument or torch_private.is_same_view(leaf, argument):
            return None
        return f"traced tensor argument {plan.index} itself, now another tensor"
    assert plan.fresh is not None
    is_same_kind = leaf.dtype == plan.fresh.dtype and leaf.device.type == plan.fresh.device.type
    if not is_same_kind or leaf.shape != shape:
        traced = (shape, plan.fresh.dtype, plan.fresh.device.type)
        return f"traced {traced}, now {(tuple(leaf.shape), leaf.dtype, leaf.device.type)}"
    if leaf.numel() and not memory.isdisjoint(torch_private.memory_of((leaf,))):
        return "traced a fresh tensor, now one that shares memory with an argument"
    return None


def _with_strides(leaf: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Returns the tensor with the strides that compiled code relies on, a copy where they differ."""
    if leaf.stride() == stride:
        return leaf
    pairs = zip(leaf.shape, leaf.stride(), stride, strict=True)
    if leaf.numel() < 2 or all(one == other for size, one, other in pairs if size != 1):
        return leaf
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


def _containers(value: Any, spec: tree.Spec) -> Iterator[Any]:
    """Yields the lists and dicts of a value that its structure names."""
    for key, child in zip(spec.keys, spec.children, strict=True):
        if child.kind is None:
            continue
        item = getattr(value, key) if dataclasses.is_dataclass(spec.kind) else value[key]
        if child.kind is list or child.kind is dict:
            yield item
        yield from _containers(item, child)


def _holds_containers(spec: tree.Spec) -> bool:
    return any(child.kind in (list, dict) or _holds_containers(child) for child in spec.children)


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


# By signature --------------------------------------------------------------------------------------

_CALL_SITES: dict[str, CallSite] = {}


def register_call_site(site: CallSite) -> str:
    """Returns the signature of a call site, the same for equal ones.

    A text made from the contents, so that equal graphs are equal text in every process.
    """
    text = _signature(site)
    known = _CALL_SITES.setdefault(text, site)
    if known is not site and not _is_same_site(known, site):
        text = f"{text} #{uuid.uuid4().hex}"
        _CALL_SITES[text] = site
    return text


def call_site(signature: str) -> CallSite:
    """Returns what a signature names.

    Raises:
        CompileError: This process never traced such a call.
    """
    site = _CALL_SITES.get(signature)
    if site is None:
        raise CompileError(
            f"The marked call {signature!r} was traced in another process. A graph that holds one cannot be "
            "carried over: trace it again here."
        )
    return site


def _is_same_site(one: CallSite, other: CallSite) -> bool:
    """Equality that also asks for the same constants, not just equal ones."""
    constants = zip(_constants(one), _constants(other), strict=True)
    return (
        one.arguments == other.arguments
        and one.results == other.results
        and all(left is right or (type(left) is type(right) and left == right) for left, right in constants)
    )


def _constants(site: CallSite) -> list[Any]:
    return [leaf.value for leaf in site.argument_leaves] + [leaf.value for leaf in site.result_leaves]


def _signature(site: CallSite) -> str:
    arguments = iter([_argument_text(leaf) for leaf in site.argument_leaves])
    results = iter([_result_text(leaf) for leaf in site.result_leaves])
    args, kwargs = site.arguments.children
    shown = [_text(child, arguments) for child in args.children]
    shown += [
        f"{key}={_text(child, arguments)}" for key, child in zip(kwargs.keys, kwargs.children, strict=True)
    ]
    return f"{site.name}({', '.join(shown)}) -> {_text(site.results, results)}"


def _text(spec: tree.Spec, leaves: Any) -> str:
    if spec.kind is None:
        return next(leaves)
    children = [_text(child, leaves) for child in spec.children]
    if spec.kind is tuple:
        return f"({', '.join(children)})"
    if spec.kind is list:
        return f"[{', '.join(children)}]"
    pairs = ", ".join(f"{key!r}: {child}" for key, child in zip(spec.keys, children, strict=True))
    return (
        f"{{{pairs}}}" if spec.kind is dict else f"{spec.kind.__module__}.{spec.kind.__qualname__}{{{pairs}}}"
    )


def _argument_text(leaf: ArgumentLeaf) -> str:
    return repr(leaf.value) if leaf.kind == "constant" else f"{leaf.kind}{leaf.index}"


def _result_text(leaf: ResultLeaf) -> str:
    if leaf.kind == "constant":
        return repr(leaf.value)
    if leaf.fresh is None:
        return f"tensor{leaf.index}"
    dtype = str(leaf.fresh.dtype).removeprefix("torch.")
    sizes, strides = (", ".join(map(str, part)) for part in (leaf.fresh.shape, leaf.fresh.stride))
    return f"{dtype}[{sizes}; {strides}; {leaf.fresh.device}]"
