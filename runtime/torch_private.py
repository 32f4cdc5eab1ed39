"""The one file that touches PyTorch APIs without a stability promise; tried on 2.11 and 2.13.

Each function is small, says what it relies on, and is the only caller of it. Nothing here knows
what the rest of the library does.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def alias_without_owning(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor over the same bytes that does not keep them alive.

    The caller must know what else keeps the memory mapped, and say so where it calls this.

    Args:
        tensor: A dense tensor on CPU or CUDA.

    Returns:
        A tensor of the same address, shape, strides, dtype, conjugate and negative bits. Version
        counters are not shared.
    """
    storage = tensor.untyped_storage()
    raw = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        alias = torch._conj(alias)
    if tensor.is_neg():
        alias = torch._neg_view(alias)
    return alias


def storage_key(tensor: torch.Tensor) -> int:
    """Returns an identity of the tensor's storage, valid while the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_weak_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """Returns a weak reference to the tensor's storage; ``expired()`` tells whether it died."""
    return StorageWeakRef(tensor.untyped_storage())


def begin_allocating_to_pool(device_index: int, pool_id: tuple[int, int]) -> None:
    """Routes this thread's CUDA allocations to a graph pool until ``end_allocating_to_pool``.

    As ``torch.cuda.use_mem_pool`` does, which only takes a ``MemPool`` (whose destructor asserts
    that no graph uses the pool any more).
    """
    torch._C._cuda_beginAllocateCurrentThreadToPool(device_index, pool_id)


def end_allocating_to_pool(device_index: int, pool_id: tuple[int, int]) -> None:
    """Undoes ``begin_allocating_to_pool``; the pool lives on while a graph or a block uses it."""
    torch._C._cuda_endAllocateToPool(device_index, pool_id)
    torch._C._cuda_releasePool(device_index, pool_id)


def stop_routing_to_pool(device_index: int, pool_id: tuple[int, int]) -> None:
    """Ends the allocation routing that a failed ``capture_end`` left behind; no-op without one."""
    try:
        torch._C._cuda_endAllocateToPool(device_index, pool_id)
    except RuntimeError:
        # Nothing was routed there any more: what was wanted.
        return


_SNAPSHOT_KWARGS: dict[str, Any] = (
    {"include_traces": False} if "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters else {}
)


def pool_segments(pool_id: tuple[int, int]) -> list[dict[str, Any]]:
    """Lists the allocator's segments of one pool: ``address``, ``total_size``, ``allocated_size``."""
    segments = torch.cuda.memory_snapshot(pool_id, **_SNAPSHOT_KWARGS)
    return [segment for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool_id)]


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Lists the tensor arguments that an operator call writes to, by its schema."""
    written: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else (value,)
        written.extend(item for item in values if isinstance(item, torch.Tensor))
    return written
