"""At which size a forward is traced, so that the trace takes its token dimension for nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


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
