"""Boundary buffers at replay: how a break's fresh results get where captured code reads them.

Ownership (``docs/capture-semantics.md``, point 4). The captured code gets tensors that own their
boundary memory, so the memory lives exactly as long as captured code holds it and is reused
afterwards, in this size and in smaller ones. `BreakOutputs` keeps non-owning aliases only. Those
stay valid because the recording's graphs hold the pool, and the pool never gives its memory back to
the device before.

How the buffers come to be is in `placement`. This module must not know of sessions, or of a device
beyond a copy whose source can be set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import tree
from ..errors import BreakMismatchError
from .device import SettableCopy
from .extents import bytes_of, is_plain_memory, lazy_bits


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
        stand_in: What ran at capture in place of the body: ``fake``, ``capture_stub``, or None for the body.
    """

    def __init__(
        self,
        mark_name: str,
        where: str,
        spec: tree.Spec,
        leaves: list[LeafPlan],
        shared: list[SharedMemory],
        stand_in: str | None = None,
    ) -> None:
        self.mark_name = mark_name
        self.where = where
        self.spec = spec
        self.leaves = leaves
        self.shared = shared
        self.stand_in = stand_in
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
                is_ready = is_plain_memory(value) and value.data_ptr() != plan.address
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
                or lazy_bits(value) != plan.lazy_bits
            ):
                names = ", ".join(self.leaves[i].path for i, _ in memory.members)
                raise self._mismatch(
                    f"{names} were views of one memory at capture, and {plan.path} no longer lies in it the "
                    f"same way (captured strides {plan.stride}, now {value.stride()}{_lazy_change(plan, value)})"
                )
        return bytes_of(first, origin, memory.target.numel())

    def _mismatch(self, what: str) -> BreakMismatchError:
        cause, cure = "", "Make"
        if self.stand_in is not None:
            cause = f", where its {self.stand_in} ran in its place"
            cure = f"Make {self.stand_in} return what the body returns; if it does, make"
        return BreakMismatchError(
            f"Break {self.mark_name!r} ({self.where}) returned something else than at capture{cause}: {what}. "
            f"The graph after it cannot take this; nothing was copied. "
            f"{cure} the result's structure and shapes depend on the capture size only, or capture again."
        )


def _is_in_place(plan: LeafPlan, value: torch.Tensor) -> bool:
    return (
        value.data_ptr() == plan.address
        and value.stride() == plan.stride
        and lazy_bits(value) == plan.lazy_bits
    )


def _lazy_change(plan: LeafPlan, value: torch.Tensor) -> str:
    """Says for an error how the reading of a tensor's bytes changed, if it did."""
    if lazy_bits(value) == plan.lazy_bits:
        return ""
    return f"; captured lazily (conjugated, negated) {plan.lazy_bits}, now {lazy_bits(value)}"


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
