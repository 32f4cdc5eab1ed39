"""Inputs of a flat call: which are read in place, and buffers for the others that keep strides and aliases.

A compiler hands out a forward that takes one flat list of tensors and numbers, and relies on their strides.
So buffers here have the strides of the call that was captured, and inputs that shared memory share it again where the
forward writes to inputs.
What is copied and what is written back are lists made once; nothing is walked at replay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CaptureError
from .call_padding import CallPadding, Form
from .copiers import copier_for
from .extents import address_of, is_plain_memory, overlaps_itself, span_bytes
from .static_inputs import fill_tail

# A buffer keeps the address of what it stands for modulo this, since kernels choose code by alignment.
_ALIGNMENT_KEPT_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class InputFacts:
    """What is known of the flat inputs of a forward before any call; each number is a place among them.

    Attributes:
        device: Where its graphs would run; None where it has no tensors.
        static: Tensors that are read where they are (parameters, buffers), and handles of objects.
        copied: Every other tensor that lies on the device.
        keyed: Numbers, and host tensors of one element: graphs hold their values.
        are_integers: Whether all numbers are integers, at every call.
        varying: Tensors whose sizes or strides do not follow from the numbers among the inputs.
        written: Tensors whose memory the forward may write.
        refusal: Why no graph can hold this forward, or None.
    """

    device: torch.device | None
    static: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()
    keyed: tuple[int, ...] = ()
    are_integers: bool = False
    varying: tuple[int, ...] = ()
    written: frozenset[int] = field(default_factory=frozenset)
    refusal: str | None = None


def key_maker(facts: InputFacts) -> Callable[[Sequence[Any]], Any] | None:
    """Returns what makes the shape key of a call, from as few looks at its inputs as the facts allow.

    The key holds values of numbers, shapes and strides that vary, and, where the forward writes inputs, which
    of the copied inputs share memory. None where all calls have one key.
    """
    parts: list[Callable[[Sequence[Any]], Any]] = []
    if facts.keyed and facts.are_integers:
        parts.append(operator.itemgetter(*facts.keyed))
    elif facts.keyed:
        parts.append(lambda args: tuple([_value(args[index]) for index in facts.keyed]))
    if facts.varying:
        parts.append(lambda args: tuple([(args[i].shape, args[i].stride()) for i in facts.varying]))
    if facts.written and len(facts.copied) > 1:
        parts.append(lambda args: _alias_pattern([args[index] for index in facts.copied]))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else lambda args: tuple([part(args) for part in parts])


def _value(item: Any) -> Any:
    if type(item) is int:
        return item
    return (item.item(), item.dtype) if isinstance(item, torch.Tensor) else (type(item), item)


def _alias_pattern(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
    """Returns which tensors share memory, and how far apart they lie in it; None where none does."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    if len(set(storages)) == len(storages):
        return None
    first: dict[int, torch.Tensor] = {}
    pattern = []
    for storage, tensor in zip(storages, tensors, strict=True):
        base = first.setdefault(storage, tensor)
        pattern.append((storages.index(storage), address_of(tensor) - address_of(base) if storage else 0))
    return tuple(pattern)


def share_memory(facts: InputFacts, args: Sequence[Any]) -> bool:
    """Tells whether copied inputs share memory in a way that counts: where the forward writes inputs."""
    return bool(facts.written) and _alias_pattern([args[index] for index in facts.copied]) is not None


class FlatInputs:
    """Buffers for one shape of a flat call.

    Args:
        facts: Of the forward.
        args: A call's inputs; buffers hold their values until the first replay.
        padding: How calls are padded, if they are.
        size: The size that the buffers are for; None for that of the call, with what its inputs share kept.

    Attributes:
        size: As given.
        views: The inputs that the forward is captured with.
        addresses: Where each static input lies, by its place.
        aliases: For each storage that a view has: the place of one input that lies in it.
        copy_in: Copies a call's inputs into the buffers, and pads them.
        plain_copies: Place and buffer of each copied input, where ``copy_in`` does no more than to move bytes in
            order; else None.
        can_conflict: Whether `conflicts_with` may hold of any call.

    Raises:
        CaptureError: An input that no buffer can stand in for; names its place.
    """

    def __init__(
        self,
        facts: InputFacts,
        args: Sequence[Any],
        *,
        padding: CallPadding | None = None,
        size: int | None = None,
    ) -> None:
        self.views: list[Any] = list(args)
        self.size = size
        self._padding = padding if size is not None else None
        self.addresses = {index: args[index].data_ptr() for index in facts.static}
        self.aliases: dict[int, int] = {}
        groups: dict[int, list[int]] = {}
        for index in facts.copied:
            _refuse_unusual(index, args[index], is_written=index in facts.written)
            # Where nothing is written, the key does not say which inputs share memory: those of the next call may not.
            storage = args[index].untyped_storage().data_ptr() if facts.written else 0
            groups.setdefault(storage or -index - 1, []).append(index)
        forms: Mapping[int, Form] = {}
        if padding is not None and size is not None:
            forms = padding.forms(args, size)
            self.views = list(padding.at(args, size))
        for index, (shape, strides) in forms.items():
            self.views[index] = _padded_buffer(args[index], shape, strides)
        for members in groups.values():
            rest = [index for index in members if index not in forms]
            for index, view in zip(rest, _buffers([args[i] for i in rest]), strict=True):
                self.views[index] = view
        for index in (*facts.copied, *facts.static):
            storage = self.views[index].untyped_storage().data_ptr()
            if storage:
                self.aliases.setdefault(storage, index)
        self._forms = {index: _form(self.views[index]) for index in facts.copied}
        self._targets = [_dense(self.views[index]) for index in facts.copied]
        self._copy_each = copier_for(self._targets)
        self._pick = _picker(facts.copied)
        self._is_dense = [
            one is self.views[index] for one, index in zip(self._targets, facts.copied, strict=True)
        ]
        written = [index for index in facts.copied if index in facts.written]
        self._written = written
        self._written_views = [self.views[index] for index in written]
        self._pick_written = _picker(written)
        self._conflicts = _conflicts(facts, args, has_written_copies=bool(written))
        self._copied = facts.copied
        self._padded_views = {index: self.views[index] for index in forms}
        self.can_conflict = bool(self._conflicts) and bool(facts.copied)
        copy_in = self._copier()
        self.copy_in = copy_in if self._padding is None else self._padding_copier(self._padding, copy_in)
        self.plain_copies: list[tuple[int, torch.Tensor]] | None = None
        if self._padding is None and all(self._is_dense) and all(map(is_plain_memory, self._targets)):
            self.plain_copies = list(zip(facts.copied, self._targets, strict=True))
        self.copy_in(args)

    def _copier(self) -> Callable[[Sequence[Any]], None]:
        """Returns what copies a call's inputs into the buffers."""
        targets, pick, is_dense = self._targets, self._pick, self._is_dense
        copy_each = self._copy_each
        if not targets:
            return lambda args: None
        if not all(is_dense):
            return lambda args: copy_each(targets, [_dense(value) for value in pick(args)])
        if len(targets) == 1:
            target, index = targets[0], self._copied[0]

            def copy_one(args: Sequence[Any]) -> None:
                target.copy_(args[index])

            return copy_one
        chosen = operator.itemgetter(*self._copied)
        return lambda args: copy_each(targets, chosen(args))

    def _padding_copier(
        self, padding: CallPadding, copy_whole: Callable[[Sequence[Any]], None]
    ) -> Callable[[Sequence[Any]], None]:
        """Returns what copies a call's inputs in and pads what is past them."""

        def copy_in(args: Sequence[Any]) -> None:
            real = args[padding.size]
            if real == self.size:
                copy_whole(args)
                return
            for index, target in zip(self._copied, self._targets, strict=True):
                if index in self._padded_views:
                    view = self._padded_views[index]
                    _dense(padding.real(index, view, real)).copy_(_dense(args[index]))
                    fill_tail(_dense(padding.tail(index, view, real)), padding.pad_values.get(index, 0))
                else:
                    target.copy_(_dense(args[index]))

        return copy_in

    def refuse_reshaped(self) -> None:
        """Call after the forward ran on the buffers.

        Raises:
            CaptureError: It gave one another shape or other memory, which a replay cannot do to the caller's.
        """
        for index, form in self._forms.items():
            if _form(self.views[index]) != form:
                raise CaptureError(
                    f"The compiled function changes the shape or the memory of input {index} in place; a replay "
                    "cannot do that to the caller's tensor."
                )

    def forget_caller(self) -> None:
        """Lets go of the caller's tensors, once the forward was captured."""
        self.views = []
        self.aliases = {}

    def conflicts_with(self, args: Sequence[Any]) -> bool:
        """Tells whether a copied input lies in memory that is read or written in place."""
        conflicts = self._conflicts
        return bool(conflicts) and any(
            args[index].untyped_storage().data_ptr() in conflicts for index in self._copied
        )

    def is_padded(self, args: Sequence[Any]) -> bool:
        """Tells whether a call is of another size than the buffers; ask only where they have one."""
        assert self._padding is not None, "buffers of one size are for padded calls"
        return bool(args[self._padding.size] != self.size)

    @property
    def has_written(self) -> bool:
        """Whether something is to be written back."""
        return bool(self._written_views)

    def copy_back(self, args: Sequence[Any], left_alone: frozenset[int]) -> None:
        """Writes copied inputs that the forward may have changed back to the caller's tensors.

        Args:
            args: The call's inputs.
            left_alone: Storages that are not written to: an earlier output that came back as an input was
                valid until this replay, which left its new outputs there.
        """
        views = self._written_views
        if self._padding is not None and args[self._padding.size] != self.size:
            real, padding = args[self._padding.size], self._padding
            views = [
                padding.real(index, view, real) for index, view in zip(self._written, views, strict=True)
            ]
        pairs = list(zip(self._pick_written(args), views, strict=True))
        if left_alone:
            pairs = [pair for pair in pairs if pair[0].untyped_storage().data_ptr() not in left_alone]
        if pairs:
            # Inference mode may write inference tensors and others.
            with torch.inference_mode():
                self._copy_each([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns what lists the items at these places."""
    if len(indices) < 2:
        return lambda args: [args[index] for index in indices]
    chosen = operator.itemgetter(*indices)
    return lambda args: list(chosen(args))


def _conflicts(facts: InputFacts, args: Sequence[Any], *, has_written_copies: bool) -> frozenset[int]:
    """Returns storages of static inputs in which a copied input must not lie: one side is written."""
    chosen = facts.static if has_written_copies else [i for i in facts.static if i in facts.written]
    return frozenset(args[index].untyped_storage().data_ptr() for index in chosen) - {0}


def _refuse_unusual(index: int, value: torch.Tensor, *, is_written: bool) -> None:
    reason = None
    if value.layout is not torch.strided or value.is_quantized:
        reason = f"is {value.layout}, quantized or not; graphs take dense tensors"
    elif value.is_conj() or value.is_neg():
        reason = "is lazily conjugated or negated"
    elif overlaps_itself(_dense(value)):
        reason = "has overlapping strides"
    elif is_written and overlaps_itself(value):
        reason = "is expanded, and may be written"
    if reason is not None:
        raise CaptureError(
            f"Input {index} {reason}, so no buffer can stand in for it. Pass a contiguous copy of it, or compile "
            "with options={'capture': 'none'}."
        )


def _buffers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Allocates one memory for tensors that share one, and returns views that lie in it as they did."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    with torch.inference_mode(False), torch.no_grad():
        if not filled:
            return [
                torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
                for one in tensors
            ]
        start = min(tensor.data_ptr() for tensor in filled)
        end = max(tensor.data_ptr() + span_bytes(tensor) for tensor in filled)
        lead = start % _ALIGNMENT_KEPT_BYTES
        memory = torch.empty(lead + end - start, dtype=torch.uint8, device=filled[0].device)
        views = []
        for tensor in tensors:
            offset = lead + tensor.data_ptr() - start if tensor.numel() else 0
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            view.set_(
                memory.untyped_storage(), offset // tensor.element_size(), tensor.shape, tensor.stride()
            )
            views.append(view)
    return views


def _padded_buffer(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Allocates a buffer of another form for a tensor, which is given when inputs are copied in."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself, or one element of each dimension along which it is expanded."""
    if 0 not in tensor.stride() or not tensor.numel():
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided([size if stride else 1 for size, stride in pairs], tensor.stride())
