"""How many tensors are copied at once: in one launch where PyTorch has a kernel for their type, else one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .. import torch_private

# Of which CUDA's kernel for lists knows how to copy; it raises for a list of others, such as unsigned integers.
_IN_ONE_LAUNCH = frozenset(
    {
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    }
)


def copier_for(tensors: Iterable[torch.Tensor]) -> Callable[..., None]:
    """Returns ``copy_each(targets, sources)`` for targets of the types of these tensors; sources have the same."""
    return torch_private.copy_each if _IN_ONE_LAUNCH.issuperset(one.dtype for one in tensors) else _one_by_one


def _one_by_one(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
