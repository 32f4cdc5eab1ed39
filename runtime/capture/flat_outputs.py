"""Outputs of a flat call: fresh copies, or what they were of the caller's own tensors.

What an output is (an input itself, a view of one, fresh memory) is found out while capturing; a replay
follows a list made once. Fresh outputs that share memory with each other share it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_private
from ..errors import CaptureError
from .call_padding import CallPadding
from .extents import address_of, bytes_of, lazy_bits, overlaps_itself, span_bytes

# Gives one output of a replay from the call's inputs, the recording's outputs, and copied memories.
_Step = Callable[[Sequence[Any], Sequence[Any], Sequence[torch.UntypedStorage]], Any]
_OfCall = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class FlatOutputs:
    """How the outputs of one recording become those of a call.

    Args:
        outputs: What the forward returned while capturing, flat.
        inputs: What it was called with then.
        aliases: For each storage of an input: the place of one that lies in it.
        owns: Tells of fresh memory: that of the pool that was captured on.
        is_copied: Whether calls get copies; else views of graph memory, which this object then owns.
        padding: How calls were padded, if they were.
        detached: Places of outputs that require no gradient though they are views of inputs that do, from
            `detached_outputs`: buffers, which stand for the inputs here, never require one.

    Attributes:
        own_storages: Of the graph memory that calls get.
        are_clones: Whether each output of a call is a copy of that of the recording, of the same form.
        of_call: Gives a call's outputs after a replay, from the call's inputs and the recording's outputs.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        aliases: Mapping[int, int],
        owns: Callable[[torch.Tensor], bool],
        *,
        is_copied: bool,
        padding: CallPadding | None = None,
        detached: Collection[int] = (),
    ) -> None:
        self._padding = padding
        self._memories: list[_SharedMemory] = []
        own: set[int] = set()
        steps: dict[int, _Step] = {}
        groups: dict[int, list[int]] = {}
        for index, output in enumerate(outputs):
            storage = output.untyped_storage().data_ptr() if isinstance(output, torch.Tensor) else 0
            if not isinstance(output, torch.Tensor):
                steps[index] = _constant(output)
            elif storage in aliases:
                self._refuse_padded_view(output, inputs, aliases[storage])
                step = _of_input(output, inputs, aliases[storage])
                steps[index] = _detached(step) if index in detached else step
            elif storage and not owns(output):
                steps[index] = _constant(output)  # Memory of the forward's own, such as a constant.
            elif is_copied:
                groups.setdefault(storage if output.numel() else -index - 1, []).append(index)
            else:
                own.add(storage)
                steps[index] = _view_of(output)
        num_clones = 0
        for members in groups.values():
            if len(members) == 1 and _keeps_strides(outputs[members[0]]):
                num_clones += padding is None
                steps[members[0]] = _clone(members[0]) if padding is None else _cut(members[0], padding)
            else:
                steps.update(self._shared(members, outputs))
        self.own_storages = frozenset(own)
        self.are_clones = num_clones == len(outputs)
        self.of_call = _follow([steps[index] for index in range(len(outputs))], self._memories, padding)

    def _refuse_padded_view(self, output: torch.Tensor, inputs: Sequence[Any], index: int) -> None:
        if self._padding is not None and index in self._padding.dims and output is not inputs[index]:
            raise CaptureError(
                f"An output is a view of input {index}, which is padded: no view of the caller's tensor can stand for "
                "it. Return a copy, or compile without dynamic_dims."
            )

    def _shared(self, members: list[int], outputs: Sequence[torch.Tensor]) -> dict[int, _Step]:
        """Returns the steps of outputs that lie in one memory."""
        tensors = [outputs[index] for index in members]
        start = min(tensor.data_ptr() for tensor in tensors)
        end = max(tensor.data_ptr() + span_bytes(tensor) for tensor in tensors)
        memory = _SharedMemory(
            member=members[0], shift_bytes=start - tensors[0].data_ptr(), num_bytes=end - start
        )
        self._memories.append(memory)
        number = len(self._memories) - 1
        return {
            index: _in_memory(tensor, number, tensor.data_ptr() - start)
            for index, tensor in zip(members, tensors, strict=True)
        }


def detached_outputs(args: Sequence[Any], outputs: Sequence[Any]) -> frozenset[int]:
    """Finds the outputs of a call that share memory with an input that requires a gradient, and require none."""
    memories = {
        one.untyped_storage().data_ptr()
        for one in args
        if isinstance(one, torch.Tensor) and one.requires_grad and one.layout is torch.strided
    } - {0}
    return frozenset(
        index
        for index, one in enumerate(outputs if memories else ())
        if isinstance(one, torch.Tensor)
        and not one.requires_grad
        and one.layout is torch.strided
        and one.untyped_storage().data_ptr() in memories
    )


@dataclass(frozen=True, kw_only=True)
class _SharedMemory:
    """What several outputs lie in.

    Attributes:
        member: One of them.
        shift_bytes: Where the memory begins, from where that one begins.
        num_bytes: Its size.
    """

    member: int
    shift_bytes: int
    num_bytes: int

    def copied(self, recorded: Sequence[Any]) -> torch.UntypedStorage:
        """Returns a copy of the memory."""
        member = recorded[self.member]
        return (
            bytes_of(member, member.data_ptr() + self.shift_bytes, self.num_bytes).clone().untyped_storage()
        )


def _follow(steps: Sequence[_Step], shared: Sequence[_SharedMemory], padding: CallPadding | None) -> _OfCall:
    """Returns what takes one step for each output."""

    def of_call(args: Sequence[Any], recorded: Sequence[Any]) -> list[Any]:
        memories = [memory.copied(recorded) for memory in shared]
        outputs = [step(args, recorded, memories) for step in steps]
        if padding is None:
            return outputs
        real = args[padding.size]
        return [
            output if dim is None or output.shape[dim] == real else padding.cut(index, output, real)
            for index, (output, dim) in enumerate(zip(outputs, padding.output_dims, strict=True))
        ]

    return of_call


def _constant(value: Any) -> _Step:
    return lambda args, recorded, memories: value


def _clone(index: int) -> _Step:
    return lambda args, recorded, memories: recorded[index].clone()


def _cut(index: int, padding: CallPadding) -> _Step:
    return lambda args, recorded, memories: padding.cut(index, recorded[index], args[padding.size]).clone()


def _view_of(owner: torch.Tensor) -> _Step:
    return lambda args, recorded, memories: owner.detach()


def _in_memory(output: torch.Tensor, number: int, offset_bytes: int) -> _Step:
    """Returns the step for an output that lies in a copied memory; keeps nothing of the output."""
    build = _tensor_maker(output)
    return lambda args, recorded, memories: build(memories[number], offset_bytes)


def _of_input(output: torch.Tensor, inputs: Sequence[Any], index: int) -> _Step:
    """Returns the step for an output that lies in the memory of an input; keeps nothing of either."""
    for place, value in enumerate(inputs):
        if value is output:
            return lambda args, recorded, memories: args[place]
    shape, stride, (is_conj, is_neg) = output.shape, output.stride(), lazy_bits(output)
    shift_bytes = address_of(output) - address_of(inputs[index])
    if output.dtype != inputs[index].dtype:
        as_type, size = _as_type(inputs[index].dtype, output.dtype), output.element_size()
        per_element = max(1, size // inputs[index].element_size())

        def other_type(args: Sequence[Any], recorded: Any, memories: Any) -> torch.Tensor:
            value = args[index]
            memory = value.untyped_storage()
            num_elements = memory.nbytes() // value.element_size() // per_element * per_element
            # Through views, so that it is one: a tensor of inference mode only where eager's is.
            whole = as_type(value.as_strided((num_elements,), (1,), 0))
            found = whole.as_strided(
                shape, stride, (address_of(value) + shift_bytes - memory.data_ptr()) // size
            )
            return torch_private.with_lazy_bits(found, is_conj, is_neg)

        return other_type
    shift = shift_bytes // output.element_size()

    def view(args: Sequence[Any], recorded: Any, memories: Any) -> torch.Tensor:
        found = args[index].as_strided(shape, stride, args[index].storage_offset() + shift)
        return torch_private.with_lazy_bits(found, is_conj, is_neg)

    return view


def _as_type(dtype: torch.dtype, other: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what views a flat tensor of the first type as one of the second, as code in Python would."""
    if dtype.is_complex and not other.is_complex and dtype.to_real() is other:
        return torch.view_as_real
    if other.is_complex and not dtype.is_complex and other.to_real() is dtype:
        return lambda flat: torch.view_as_complex(flat.unflatten(0, (-1, 2)))
    return lambda flat: flat.view(other)


def _detached(step: _Step) -> _Step:
    return lambda args, recorded, memories: step(args, recorded, memories).detach()


def _tensor_maker(like: torch.Tensor) -> Callable[[torch.UntypedStorage, int], torch.Tensor]:
    """Returns what makes a tensor of the same form over other memory."""
    dtype, device, shape, stride = like.dtype, like.device, like.shape, like.stride()
    element_size, (is_conj, is_neg) = like.element_size(), lazy_bits(like)

    def make(storage: torch.UntypedStorage, offset_bytes: int) -> torch.Tensor:
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(storage, offset_bytes // element_size, shape, stride)
        return torch_private.with_lazy_bits(tensor, is_conj, is_neg)

    return make


def _keeps_strides(tensor: torch.Tensor) -> bool:
    """Tells whether ``clone`` gives a tensor of the same form."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return not overlaps_itself(tensor) and span_bytes(tensor) == tensor.numel() * tensor.element_size()
