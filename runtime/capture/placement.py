"""Boundary buffers at capture: the memory that a break's results get.

The one invariant is that captured code sees what eager code would: values, strides, alignment and
which results share memory. This module must not know of sessions, or of a device beyond what a
pool allocates and whether its graphs can copy for themselves.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_private, tree
from ..errors import CaptureError
from .autograd import refuse_history
from .boundary import BreakOutputs, LeafPlan, SharedMemory
from .device import GraphPool
from .extents import bytes_of, is_plain_memory, lazy_bits, overlaps_itself, span_bytes
from .statics import StaticTensors

# A boundary keeps the address of its source modulo this, since kernels choose code by alignment
# and another choice may round differently.
_ALIGNMENT_KEPT_BYTES = 16

# What a graph may hold as it was at capture: it cannot change, nor hold a tensor.
BAKED_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, kw_only=True)
class PlacedResult:
    """A break's result as captured code sees it.

    Attributes:
        result: The same structure; copied leaves own boundary memory.
        outputs: What replay needs.
        copied: Copied leaves as (path, captured tensor, weak reference to the source's storage), so
            that the caller can tell, once it dropped the source, whether someone else holds it.
        staged: Leaves whose copy the next graph must do first.
    """

    result: Any
    outputs: BreakOutputs
    copied: list[tuple[str, torch.Tensor, Any]]
    staged: list[StagedLeaf]


@dataclass(frozen=True, kw_only=True)
class StagedLeaf:
    """A leaf that waits in pool memory for the next graph to copy it.

    Attributes:
        leaf_index: Which leaf.
        target: What captured code reads; not written yet.
        source: The result, in pool memory that may be reused once the copy is recorded.
    """

    leaf_index: int
    target: torch.Tensor
    source: torch.Tensor


def place_result(
    result: Any,
    *,
    mark_name: str,
    where: str,
    pool: GraphPool,
    argument_storages: frozenset[int],
    statics: StaticTensors,
    device: torch.device,
    is_launched: bool,
    stand_in: str | None,
) -> PlacedResult:
    """Gives a break's result its boundary memory.

    A leaf that aliases an argument or a registered static tensor keeps its address (the replay
    closure holds the argument, or an alias of its pool memory). Every other tensor is copied into
    the pool, strides kept; leaves that share a storage share one boundary storage. What is not a
    tensor is baked.

    Args:
        result: What the marked function (or its stub) returned.
        mark_name: For errors.
        where: Recording and segment, for errors.
        pool: Where boundary memory comes from.
        argument_storages: Addresses of the storages of the call's tensor arguments.
        statics: Registered static tensors.
        device: Device of the capture.
        is_launched: Whether the next graph will be launched while capturing, and so needs the result.
        stand_in: As of `BreakOutputs`, for its errors.

    Raises:
        CaptureError: A leaf is of a kind that captured code cannot use.
    """
    leaves, spec = tree.flatten(result)
    names = tree.paths(spec, "result")
    plans: list[LeafPlan | None] = [None] * len(leaves)
    placed: list[Any] = list(leaves)
    by_storage: dict[int, list[int]] = defaultdict(list)
    for index, (path, leaf) in enumerate(zip(names, leaves, strict=True)):
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != device.type:
            plans[index] = _baked(leaf, path, mark_name, where)
            continue
        _refuse_unusable(leaf, path, mark_name, where)
        storage = leaf.untyped_storage().data_ptr()
        is_alias = storage in argument_storages or statics.holds(leaf)
        if leaf.numel() and is_alias:
            plans[index] = _tensor_plan(path, leaf, target=None)
        else:
            by_storage[storage if leaf.numel() else -index - 1].append(index)

    shared: list[SharedMemory] = []
    copied: list[tuple[str, torch.Tensor, Any]] = []
    staged: list[StagedLeaf] = []
    for indices in by_storage.values():
        sources = [leaves[index] for index in indices]
        owners, memory, staging = _filled_boundary(sources, pool, is_launched)
        if staging is not None:
            staged.append(StagedLeaf(leaf_index=indices[0], target=owners[0], source=staging))
        for index, source, owner in zip(indices, sources, owners, strict=True):
            plans[index] = _tensor_plan(names[index], owner, target=torch_private.alias_without_owning(owner))
            placed[index] = owner
            if source.numel():  # A write into an empty tensor changes nothing, whoever holds it.
                copied.append((names[index], owner, torch_private.storage_weak_ref(source)))
        if memory is not None:
            origin = min(source.data_ptr() for source in sources)
            members = tuple(
                (index, source.data_ptr() - origin) for index, source in zip(indices, sources, strict=True)
            )
            shared.append(SharedMemory(members=members, target=torch_private.alias_without_owning(memory)))
    done = [plan for plan in plans if plan is not None]
    outputs = BreakOutputs(mark_name, where, spec, done, shared, stand_in)
    return PlacedResult(result=tree.unflatten(spec, placed), outputs=outputs, copied=copied, staged=staged)


def _tensor_plan(path: str, tensor: torch.Tensor, target: torch.Tensor | None) -> LeafPlan:
    return LeafPlan(
        path=path,
        target=target,
        address=tensor.data_ptr(),
        shape=tensor.shape,
        stride=tensor.stride(),
        dtype=tensor.dtype,
        device=tensor.device,
        lazy_bits=lazy_bits(tensor),
    )


def _baked(leaf: Any, path: str, mark_name: str, where: str) -> LeafPlan:
    if isinstance(leaf, torch.Tensor):
        if leaf.dim():
            raise CaptureError(
                f"Break {mark_name!r} ({where}) returned a host tensor of shape {tuple(leaf.shape)} at {path}. "
                "A graph cannot read it again at replay; return it on the device, or use it inside the mark."
            )
        return LeafPlan(path=path, value=leaf.clone())
    if not isinstance(leaf, BAKED_TYPES):
        raise CaptureError(
            f"Break {mark_name!r} ({where}) returned a {type(leaf).__name__} at {path}. "
            "A marked function may return tensors, None, plain scalars and strings, and tuples, lists, dicts "
            "or dataclasses of those."
        )
    return LeafPlan(path=path, value=leaf)


def _refuse_unusable(leaf: torch.Tensor, path: str, mark_name: str, where: str) -> None:
    if leaf.layout is not torch.strided:
        raise CaptureError(
            f"Break {mark_name!r} ({where}) returned a {leaf.layout} tensor at {path}; only strided tensors "
            "have one address. Convert it inside the marked function."
        )
    refuse_history(leaf, f"{path} of break {mark_name!r} ({where})")


def _filled_boundary(
    sources: list[torch.Tensor], pool: GraphPool, is_launched: bool
) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
    """Allocates and fills one boundary memory for leaves of one storage.

    Returns:
        One owning tensor per leaf; the bytes that are copied at once, or None; and where the leaf waits
        for the next graph to copy it, or None where it is copied already.
    """
    owners, memory = _allocate_boundary(sources, pool)
    if memory is not None:
        start = min(source.data_ptr() for source in sources)
        memory.copy_(bytes_of(sources[0], start, memory.numel()))
    elif pool.edits_graphs and is_plain_memory(sources[0]):
        staging = _view(pool.allocate(sources[0].nbytes), sources[0], 0)
        if is_launched:
            staging.copy_(sources[0])
        return owners, None, staging
    else:
        for source, owner in zip(sources, owners, strict=True):
            owner.copy_(source)
    return owners, memory, None


def _allocate_boundary(
    sources: list[torch.Tensor], pool: GraphPool
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Allocates one boundary memory for leaves of one storage.

    Returns:
        One owning tensor per leaf, and the bytes that must be copied at once (None for a plain leaf).
    """
    if not sources[0].numel():
        return [torch.empty_like(source) for source in sources], None
    start = min(source.data_ptr() for source in sources)
    span = max(source.data_ptr() + span_bytes(source) for source in sources) - start
    lead = start % _ALIGNMENT_KEPT_BYTES
    memory = pool.allocate(lead + span)
    owners = [_view(memory, source, lead + source.data_ptr() - start) for source in sources]
    is_plain = len(sources) == 1 and not overlaps_itself(sources[0])
    return owners, None if is_plain else memory[lead:]


def _view(memory: torch.Tensor, like: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """Makes a tensor with ``like``'s metadata in ``memory``; it owns the memory's storage."""
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    tensor.set_(memory.untyped_storage(), offset_bytes // like.element_size(), like.shape, like.stride())
    return torch_private.with_lazy_bits_of(like, tensor)
