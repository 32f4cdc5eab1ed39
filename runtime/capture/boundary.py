"""Boundary buffers: where a break's results live, and how replay puts fresh ones there.

Ownership (design 5.4). The captured code gets tensors that own their boundary memory, so the
memory lives exactly as long as captured code holds it and is reused afterwards, in this size and
in smaller ones. `BreakOutputs` keeps non-owning aliases only. Those stay valid because the
recording's graphs hold the pool, and the pool never gives its memory back to the device before.

This module must not know of sessions or devices beyond a pool's ``allocate`` and ``owns``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_private, tree
from ..errors import BreakMismatchError, CaptureError
from .device import GraphPool, SettableCopy
from .statics import StaticTensors

# A boundary keeps the address of its source modulo this, since kernels choose code by alignment
# and another choice may round differently.
_ALIGNMENT_KEPT_BYTES = 16

_BAKED_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, kw_only=True)
class LeafPlan:
    """What replay does with one leaf of a break's result.

    Attributes:
        path: Where the leaf is in the result, for errors.
        target: For a copied leaf the non-owning boundary alias, else None.
        address: Device address that captured code reads; None for a baked value.
        shape: Shape at capture.
        stride: Strides of what captured code reads.
        dtype: Element type at capture.
        device: Device at capture.
        lazy_bits: Whether captured code reads it lazily conjugated, and lazily negated.
        value: The baked value of a leaf that is not a device tensor.
    """

    path: str
    target: torch.Tensor | None = None
    address: int | None = None
    shape: torch.Size | None = None
    stride: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    lazy_bits: tuple[bool, bool] = (False, False)
    value: Any = None


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Leaves that lie in one memory: several views of a storage, or one that overlaps itself.

    They are copied as bytes, all at once, which keeps every overlap as it was.

    Attributes:
        members: (leaf index, byte offset from the first byte that any member uses).
        target: Non-owning alias of the boundary bytes (uint8[span]).
    """

    members: tuple[tuple[int, int], ...]
    target: torch.Tensor


class BreakOutputs:
    """The captured results of one marked call, and the check-and-copy that replay needs.

    Attributes:
        mark_name: For errors.
        where: Recording and segment, for errors.
        spec: Structure of the result.
        leaves: One plan per leaf.
        shared: Leaves that lie in one memory.
    """

    def __init__(
        self,
        mark_name: str,
        where: str,
        spec: tree.Spec,
        leaves: list[LeafPlan],
        shared: list[SharedMemory],
    ) -> None:
        self.mark_name = mark_name
        self.where = where
        self.spec = spec
        self.leaves = leaves
        self.shared = shared
        self._in_shared = frozenset(index for memory in shared for index, _ in memory.members)
        self._copies: dict[int, SettableCopy] = {}

    def use_copy(self, leaf_index: int, copy: SettableCopy) -> None:
        """Leaves the copy of a leaf to the graph that reads it; replay only sets the source."""
        self._copies[leaf_index] = copy

    def num_copied_bytes(self) -> int:
        """Bytes that one replay copies at most."""
        return sum(memory.target.nbytes for memory in self.shared) + sum(
            leaf.target.nbytes
            for index, leaf in enumerate(self.leaves)
            if leaf.target is not None and index not in self._in_shared
        )

    def receive(self, result: Any) -> None:
        """Puts a fresh result where captured code reads it.

        Raises:
            BreakMismatchError: Structure, shape, dtype, device or a baked value differs from capture.
        """
        values, spec = tree.flatten(result)
        if spec != self.spec:
            raise self._mismatch(tree.difference(self.spec, spec, "result") or "result")
        for plan, value in zip(self.leaves, values, strict=True):
            self._check(plan, value)
        sources = [self._shared_source(memory, values) for memory in self.shared]
        for memory, source in zip(self.shared, sources, strict=True):
            if source.data_ptr() != memory.target.data_ptr():
                memory.target.copy_(source)
        for index, (plan, value) in enumerate(zip(self.leaves, values, strict=True)):
            if plan.target is None or index in self._in_shared:
                continue
            if index in self._copies:
                # The graph copies whatever happens, and wants dense memory other than its target.
                is_ready = _is_plain_memory(value) and value.data_ptr() != plan.address
                self._copies[index].setter()(value if is_ready else value.resolve_neg().clone().contiguous())
            elif not _is_in_place(plan, value):
                plan.target.copy_(value)

    def receiver(self) -> Callable[[Any], None]:
        """Returns the fastest function that does what ``receive`` does."""
        if self.spec == tree.LEAF:
            plan = self.leaves[0]
            if plan.target is not None and not self.shared:
                return self._single_tensor_receiver(plan, plan.target)
            if plan.address is None and plan.value is None:
                return self._none_receiver()
        return self.receive

    def _single_tensor_receiver(self, plan: LeafPlan, target: torch.Tensor) -> Callable[[Any], None]:
        shape, dtype, device, address = plan.shape, plan.dtype, plan.device, plan.address
        slow = self.receive
        tensor_type = torch.Tensor
        if self._copies:
            set_source = self._copies[0].setter()

            def receive_into_graph(result: Any) -> None:
                if (
                    type(result) is tensor_type
                    and result.shape == shape
                    and result.dtype is dtype
                    and result.device == device
                    and result.is_contiguous()
                    and not result.is_neg()
                    and result.data_ptr() != address
                ):
                    set_source(result)
                else:
                    slow(result)

            return receive_into_graph
        copy = target.copy_

        def receive(result: Any) -> None:
            if (
                type(result) is tensor_type
                and result.shape == shape
                and result.dtype is dtype
                and result.device == device
                and result.data_ptr() != address
            ):
                copy(result)
            else:
                slow(result)

        return receive

    def _none_receiver(self) -> Callable[[Any], None]:
        slow = self.receive

        def receive(result: Any) -> None:
            if result is not None:
                slow(result)

        return receive

    def _check(self, plan: LeafPlan, value: Any) -> None:
        if plan.address is None:
            if not _same_baked(plan.value, value):
                raise self._mismatch(
                    f"{plan.path}: captured {plan.value!r}, now {value!r}. "
                    "A value that is not a device tensor is baked into the graph; return a tensor instead"
                )
            return
        if not isinstance(value, torch.Tensor):
            raise self._mismatch(f"{plan.path}: captured a tensor, now {type(value).__name__}")
        for label, captured, now in (
            ("shape", tuple(plan.shape or ()), tuple(value.shape)),
            ("dtype", plan.dtype, value.dtype),
            ("device", plan.device, value.device),
        ):
            if captured != now:
                raise self._mismatch(f"{plan.path}: captured {label} {captured}, now {now}")
        if plan.target is None and not _is_in_place(plan, value):
            raise self._mismatch(
                f"{plan.path}: was a view of an argument or a static tensor at 0x{plan.address:x} with strides "
                f"{plan.stride}, now at 0x{value.data_ptr():x} with strides {value.stride()}"
                f"{_lazy_change(plan, value)}. Captured code reads the old address; return a fresh tensor instead"
            )

    def _shared_source(self, memory: SharedMemory, values: list[Any]) -> torch.Tensor:
        """Returns the bytes of a result whose leaves must overlap as they did at capture."""
        first_index, first_offset = memory.members[0]
        first = values[first_index]
        storage = first.untyped_storage()
        origin = first.data_ptr() - first_offset
        for index, offset in memory.members:
            value, plan = values[index], self.leaves[index]
            if (
                value.untyped_storage().data_ptr() != storage.data_ptr()
                or value.data_ptr() - origin != offset
                or value.stride() != plan.stride
                or _lazy_bits(value) != plan.lazy_bits
            ):
                names = ", ".join(self.leaves[i].path for i, _ in memory.members)
                raise self._mismatch(
                    f"{names} were views of one memory at capture, and {plan.path} no longer lies in it the "
                    f"same way (captured strides {plan.stride}, now {value.stride()}{_lazy_change(plan, value)})"
                )
        return _bytes(first, origin, memory.target.numel())

    def _mismatch(self, what: str) -> BreakMismatchError:
        return BreakMismatchError(
            f"Break {self.mark_name!r} ({self.where}) returned something else than at capture: {what}. "
            "The graph after it cannot take this; nothing was copied. "
            "Make the result's structure and shapes depend on the capture size only, or capture again."
        )


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are its bytes, in order: what a plain memory copy can move."""
    return (
        bool(tensor.numel())
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.dtype.is_complex  # which may be conjugated lazily
    )


def _is_in_place(plan: LeafPlan, value: torch.Tensor) -> bool:
    return (
        value.data_ptr() == plan.address
        and value.stride() == plan.stride
        and _lazy_bits(value) == plan.lazy_bits
    )


def _lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _lazy_change(plan: LeafPlan, value: torch.Tensor) -> str:
    """Says for an error how the reading of a tensor's bytes changed, if it did."""
    if _lazy_bits(value) == plan.lazy_bits:
        return ""
    return f"; captured lazily (conjugated, negated) {plan.lazy_bits}, now {_lazy_bits(value)}"


def _same_baked(captured: Any, now: Any) -> bool:
    if isinstance(captured, torch.Tensor):
        return (
            isinstance(now, torch.Tensor)
            and captured.dtype == now.dtype
            and captured.device == now.device
            and torch.equal(torch.nan_to_num(captured), torch.nan_to_num(now))
        )
    if type(captured) is not type(now):
        return False
    if isinstance(captured, float) and math.isnan(captured):
        return math.isnan(now)
    return bool(captured == now)


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
        owners, memory = _allocate_boundary(sources, pool)
        if memory is not None:
            start = min(source.data_ptr() for source in sources)
            memory.copy_(_bytes(sources[0], start, memory.numel()))
        elif pool.sets_copy_sources and _is_plain_memory(sources[0]):
            staging = _view(pool.allocate(sources[0].nbytes), sources[0], 0)
            if is_launched:
                staging.copy_(sources[0])
            staged.append(StagedLeaf(leaf_index=indices[0], target=owners[0], source=staging))
        else:
            for source, owner in zip(sources, owners, strict=True):
                owner.copy_(source)
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
    outputs = BreakOutputs(mark_name, where, spec, done, shared)
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
        lazy_bits=_lazy_bits(tensor),
    )


def _baked(leaf: Any, path: str, mark_name: str, where: str) -> LeafPlan:
    if isinstance(leaf, torch.Tensor):
        if leaf.dim():
            raise CaptureError(
                f"Break {mark_name!r} ({where}) returned a host tensor of shape {tuple(leaf.shape)} at {path}. "
                "A graph cannot read it again at replay; return it on the device, or use it inside the mark."
            )
        return LeafPlan(path=path, value=leaf.clone())
    if not isinstance(leaf, _BAKED_TYPES):
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
    if leaf.requires_grad and torch.is_grad_enabled():
        raise CaptureError(
            f"Break {mark_name!r} ({where}) returned a tensor that requires grad at {path}. Graphs hold "
            "no autograd history; capture under torch.inference_mode() or torch.no_grad()."
        )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices of the tensor may name one element (expanded or overlapping strides)."""
    if tensor.is_contiguous():
        return False
    expected = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= expected:
            return True
        expected += (size - 1) * stride
    return False


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
    span = max(source.data_ptr() + _span_bytes(source) for source in sources) - start
    lead = start % _ALIGNMENT_KEPT_BYTES
    memory = pool.allocate(lead + span)
    owners = [_view(memory, source, lead + source.data_ptr() - start) for source in sources]
    is_plain = len(sources) == 1 and not _overlaps_itself(sources[0])
    return owners, None if is_plain else memory[lead:]


def _bytes(tensor: torch.Tensor, address: int, num_bytes: int) -> torch.Tensor:
    """Views ``num_bytes`` of the tensor's storage from ``address`` on (uint8)."""
    storage = tensor.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, address - storage.data_ptr(), (num_bytes,), (1,))


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _view(memory: torch.Tensor, like: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """Makes a tensor with ``like``'s metadata in ``memory``; it owns the memory's storage."""
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    tensor.set_(memory.untyped_storage(), offset_bytes // like.element_size(), like.shape, like.stride())
    return torch_private.with_lazy_bits_of(like, tensor)
