"""At which size a forward is traced, so that the trace takes its token dimension for nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sgl_piecewise.runtime import tree
from sgl_piecewise.runtime.capture.arguments import ArgumentBinder
from sgl_piecewise.runtime.capture.sizes import validate_capture_sizes


def arguments_to_trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    capture_sizes: Sequence[int],
    dynamic_dims: Mapping[str, int] | None,
    *,
    at_most: int | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, int]]:
    """Returns arguments of a size to trace with, and which dimensions follow the size.

    Args:
        fn: What is traced: a module, a method of one, or a function.
        args: Positional arguments at the largest size, as calls will pass them.
        kwargs: Keyword arguments likewise.
        capture_sizes: Ascending.
        dynamic_dims: As for ``capture``.
        at_most: Traces at about this size where capture sizes are larger: for what only looks at a trace.

    Returns:
        Positional and keyword arguments, and for the index of a leaf among them its dimension.
    """
    sizes = validate_capture_sizes(capture_sizes)
    leaves, spec = tree.flatten((args, dict(kwargs)))
    dims = _dynamic_leaves(leaves, ArgumentBinder(fn).leaf_paths(args, kwargs), sizes[-1], dynamic_dims)
    others = [
        leaf if index not in dims else leaf.select(dims[index], 0)
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    ]
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    taken = sizes_in_use(owner if isinstance(owner, torch.nn.Module) else None, others)
    size = trace_size(sizes if at_most is None else (min(sizes[-1], at_most),), taken)
    for index, dim in dims.items():
        rows = torch.arange(size, device=leaves[index].device) % sizes[-1]
        leaves[index] = leaves[index].index_select(dim, rows)
    args, kwargs = tree.unflatten(spec, leaves)
    return args, dict(kwargs), dims


def _dynamic_leaves(
    leaves: Sequence[Any], paths: Sequence[str], largest: int, dynamic_dims: Mapping[str, int] | None
) -> dict[int, int]:
    """Returns which dimension of which leaf follows the capture size, by the rule of `StaticInputs`."""
    found: dict[int, int] = {}
    for index, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            continue
        if dynamic_dims is None:
            if leaf.shape[0] == largest:
                found[index] = 0
        elif path in dynamic_dims:
            dim = dynamic_dims[path]
            # What cannot be such a dimension is refused with a reason when inputs are made static.
            if type(dim) is int and -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == largest:
                found[index] = dim % leaf.dim()
    return found


def trace_size(sizes: Sequence[int], taken: Iterable[int]) -> int:
    """Returns the size to trace at: the largest capture size that equals nothing else.

    Large, because compilers choose tile sizes by what they are traced with. Where every capture size is taken
    (or 0 or 1, which traces treat as special), the nearest number that is not.

    Args:
        sizes: Ascending capture sizes.
        taken: Numbers that mean something else: dimensions, head counts.
    """
    not_these = set(taken) | {0, 1}
    for size in reversed(sizes):
        if size not in not_these:
            return size
    largest = sizes[-1]
    below = (size for size in range(largest - 1, 1, -1) if size not in not_these)
    above = (size for size in range(largest + 1, largest + 2 + len(not_these)) if size not in not_these)
    return next(below, None) or next(above)


def sizes_in_use(module: torch.nn.Module | None, tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns every dimension of a module's tensors and of these, and every number that its parts keep."""
    found = {size for tensor in tensors for size in tensor.shape}
    for part in module.modules() if module is not None else ():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                found.update(tensor.shape)
        for value in vars(part).values():
            found.update(_numbers(value))
    return found


def _numbers(value: Any) -> Iterator[int]:
    """Yields the integers in a value and one level into containers and dataclasses."""
    if type(value) is int:
        yield value
    elif isinstance(value, list | tuple):
        yield from (item for item in value if type(item) is int)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        yield from (item for item in fields if type(item) is int)
