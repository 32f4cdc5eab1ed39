"""Writes down the operators that run while a graph is being recorded.

One dispatch mode for a whole capture; a break only clears ``recording``, since a break may begin
inside a dispatched operator, where the mode cannot be popped. Every result of a recorded operator
is moved into the pool, storage by storage, with the tensor object kept. This module must not know
how a recording is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ... import torch_private
from ...errors import CaptureError, CaptureForbiddenError, SglPiecewiseError
from . import rules
from .arena import Arena, Block
from .recording import Recording, replayed, tensors_in
from .refusals import REFUSALS
from .streams import CAPTURE_STREAM, StreamOrder
from .torch_streams import StreamWatch
from .undefined import StandIns, run_on_defined_values

_EMPTY = frozenset(
    ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


class Recorder(TorchDispatchMode):
    """Records for one pool.

    Attributes:
        arena: The pool's memory.
        recording: The recording in the making, or None (in a break).
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """An ordinary mode would switch torch.compile off silently."""
        return True

    def __init__(self, arena: Arena, streams: StreamWatch) -> None:
        super().__init__()
        self.arena = arena
        self.recording: Recording | None = None
        self._streams = streams
        self._open_forks: list[int] = []
        self._freed_between: list[Block] = []
        self._opaque: str | None = None

    # Beginning and ending

    def begin(self) -> Recording:
        """Starts a recording; what was freed since the last one is poisoned at its start."""
        with torch_private.without_dispatch_modes():
            self.drain()
            recording = Recording(arena=self.arena, order=StreamOrder(self._open_forks))
            for address, num_bytes, is_bool in self._still_free(self._freed_between):
                recording.add_poison_range(address, num_bytes, is_bool, CAPTURE_STREAM)
            self._freed_between.clear()
        self.recording = recording
        self._streams.begin(recording)
        REFUSALS.watch(recording)
        return recording

    def end(self) -> Recording:
        """Stops recording and undoes what it did to memory and generators.

        Raises:
            CaptureForbiddenError: Captured code did something forbidden and went on.
            UnjoinedStreamError: The same, with streams.
        """
        with torch_private.without_dispatch_modes():
            recording = self._stop()
            try:
                if recording.error is None:
                    recording.generators.check_all()
                self._open_forks = recording.join()
            finally:
                recording.undo()
                self.recording = None
        if recording.error is not None:
            raise type(recording.error)(
                "The graph is invalid: captured code did what a graph cannot hold and went on after the "
                f"error. {recording.error}"
            ) from recording.error
        return recording

    def abort(self) -> None:
        """Drops the recording, if there is one; nothing of it stays."""
        if self.recording is not None:
            self._opaque = None
            with torch_private.without_dispatch_modes():
                recording = self._stop()
                recording.join()
                recording.undo()
            self.recording = None
        self._open_forks = []

    def _stop(self) -> Recording:
        """Ends the watching. ``recording`` stays until all is undone, in case that is interrupted."""
        recording = self.recording
        if recording is None:
            raise CaptureError("No graph is being recorded: begin() comes before end().")
        if self._opaque is not None:
            raise CaptureForbiddenError(
                f"A break inside {self._opaque}: compiled code is one operation to a recording and cannot be "
                "left in its middle. Compile with a backend that splits at marks, or mark the caller."
            )
        REFUSALS.unwatch()
        self._streams.end()
        self.drain()
        return recording

    def forget_frees(self) -> None:
        """Takes back what died outside a capture; nobody replays that."""
        self.arena.drain()
        self._freed_between.clear()

    def drain(self) -> None:
        """Takes note of the blocks that were freed since the last call."""
        recording = self.recording
        if recording is None:
            self._freed_between.extend(self.arena.drain())
            return
        for block in self.arena.drain(keep=recording.shared):
            recording.add_free(block)

    def _still_free(self, blocks: Iterable[Block]) -> list[tuple[int, int, bool]]:
        """Cuts what was handed out again out of freed blocks."""
        live = sorted((block.address, block.num_bytes) for block in self.arena.live_blocks())
        pieces: list[tuple[int, int, bool]] = []
        for block in blocks:
            start, end = block.address, block.address + block.num_bytes
            for address, num_bytes in live:
                if address + num_bytes <= start or address >= end:
                    continue
                if address > start:
                    pieces.append((start, address - start, block.is_bool))
                start = address + num_bytes
            if start < end:
                pieces.append((start, end - start, block.is_bool))
        return pieces

    # Operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        recording = self.recording
        if recording is None or torch_private.is_compiling_now():
            return func(*args, **kwargs)
        # Views of another dtype, and `data` of a parameter, announce plain tensors as if they were a subclass.
        kinds = tuple(kind for kind in types if torch_private.takes_part_in_dispatch(kind))
        if any(torch_private.is_fake_type(kind) for kind in kinds):
            return func(*args, **kwargs)
        if kinds:
            return NotImplemented  # A wrapper subclass takes itself apart first.
        try:
            if torch_private.is_higher_order(func):
                return self._enter_higher_order(func, args, kwargs)
            if torch_private.is_composite(func):
                with torch_private.reentered(self):
                    return torch_private.call_composite(func, args, kwargs)
            if torch_private.has_python_kernel(func):
                with torch_private.reentered(self):
                    return torch_private.call_cpu_kernel(func, args, kwargs)
            return self._record(recording, func, args, kwargs)
        except CaptureError as err:
            if self.recording is not None:
                self.recording.invalidate(err)
            raise

    def _enter_higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body = torch_private.higher_order_cpu_kernel(func)
        if body is None:
            raise rules.forbidden(
                f"{func} (a higher-order operator)",
                "it has no eager body that the emulated device could look into",
            )
        with torch_private.reentered(self):
            return body(*args, **kwargs)

    def _record(self, recording: Recording, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operator, moves its results into the pool and writes it down."""
        self.drain()
        rules.check_operator(func, args, kwargs)
        stream = self._streams.stream_of_work(recording)
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        written = torch_private.written_arguments(func, args, kwargs)
        for tensor in written:
            recording.save(tensor)
        addresses = [tensor.untyped_storage().data_ptr() for tensor in written]
        generator = kwargs.get("generator") or torch.default_generator
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random:
            recording.generators.check(generator)

        result = self._run(func, args, kwargs)

        draws = is_random and recording.generators.note_draw(generator)
        is_bytes_only = func._schema.name.partition("::")[2] in _EMPTY
        self._move_grown(recording, written, addresses, stream)
        outputs = tensors_in(result)
        targets = self._move_fresh(recording, func, outputs, tensors_in(args) + tensors_in(kwargs), stream)
        if is_bytes_only:
            for _, alias in targets:
                block = self.arena.live_block(alias.untyped_storage().data_ptr())
                if block is not None:
                    recording.add_poison(block, stream)
        elif targets or written:
            run = replayed(str(func), func, recording.alias(args), _alias_kwargs(recording, kwargs), targets)
            recording.add(str(func), run, stream, draws_random=draws)
        return result

    def record_opaque(
        self,
        call: Callable[[list[Any]], Any],
        inputs: list[Any],
        name: str,
        mutated: Collection[int] | None,
    ) -> Any:
        """Records code that does not dispatch; see `opaque.record_opaque`."""
        recording = self.recording
        if recording is None:
            return call(inputs)
        with torch_private.without_dispatch_modes():
            self.drain()
            stream = self._streams.stream_of_work(recording)
            for index, value in enumerate(inputs):
                if mutated is None or index in mutated:
                    for tensor in tensors_in(value):
                        recording.save(tensor)
            recording.generators.check(torch.default_generator)
            kept = recording.alias(list(inputs))
            stand_ins = StandIns(0.5, 0, only_poisoned_integers=True)
            self._opaque = name
            REFUSALS.unwatch()
            try:
                result = stand_ins.take_back(call(stand_ins.put(list(inputs))))
            finally:
                REFUSALS.watch(recording)
                self._opaque = None
            draws = recording.generators.note_draw(torch.default_generator)
            result, targets = self._copy_fresh(recording, result, tensors_in(inputs), stream)
            run = replayed(name, lambda: call(list(kept)), (), {}, targets)
            recording.add(name, run, stream, draws_random=draws)
        return result

    def _copy_fresh(
        self, recording: Recording, result: Any, inputs: list[torch.Tensor], stream: int
    ) -> tuple[Any, list[tuple[int, torch.Tensor]]]:
        """As `_move_fresh`, with new tensor objects: compiled code may keep what it returns."""
        originals = tensors_in(result)
        fresh = {id(tensor): torch.empty(0, dtype=tensor.dtype) for tensor in originals}
        known = {torch_private.storage_key(tensor) for tensor in inputs}
        for tensor in originals:
            copy = fresh[id(tensor)]
            if torch_private.storage_key(tensor) in known:
                fresh[id(tensor)] = tensor
            else:
                copy.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        copies = [fresh[id(tensor)] for tensor in originals]
        targets = self._move_fresh(recording, "compiled code", copies, inputs, stream)
        return _replace(result, iter(copies)), targets

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator; if the values refuse it, on other values: a recording has no values."""
        try:
            return func(*args, **kwargs)
        except (SglPiecewiseError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, IndexError, ValueError) as err:
            return run_on_defined_values(func, args, kwargs, err)

    def _move_fresh(
        self,
        recording: Recording,
        func: Any,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        stream: int,
    ) -> list[tuple[int, torch.Tensor]]:
        """Moves results with storages of their own into the pool.

        Returns:
            For each such storage: the index of a result that has it, and an alias over its block.
        """
        groups: dict[int, list[int]] = {}
        known = {torch_private.storage_key(tensor) for tensor in inputs}
        for index, output in enumerate(outputs):
            if output.layout is not torch.strided or output.is_quantized:
                raise rules.forbidden(
                    str(func), f"the emulated device only holds dense tensors, this result is {output.layout}"
                )
            key = torch_private.storage_key(output)
            if key not in known and output.is_cpu and output.untyped_storage().nbytes():
                groups.setdefault(key, []).append(index)
        targets: list[tuple[int, torch.Tensor]] = []
        for members in groups.values():
            self._move(recording, [outputs[index] for index in members], stream)
            targets.append((members[0], recording.alias(outputs[members[0]])))
        return targets

    def _move_grown(
        self, recording: Recording, written: list[torch.Tensor], addresses: list[int], stream: int
    ) -> None:
        """Moves ``out=`` arguments that the operator had to allocate into the pool."""
        for tensor, address in zip(written, addresses, strict=True):
            if tensor.untyped_storage().data_ptr() != address:
                self._move(recording, [tensor], stream)

    def _move(self, recording: Recording, tensors: list[torch.Tensor], stream: int) -> None:
        """Moves tensors that share one storage into one block, bytes and objects kept."""
        source = tensors[0].untyped_storage()
        target = self._allocate(recording, source.nbytes(), tensors[0].dtype is torch.bool, stream)
        target.copy_(source)
        for tensor in tensors:
            tensor.set_(target, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _allocate(
        self, recording: Recording, num_bytes: int, is_bool: bool, stream: int
    ) -> torch.UntypedStorage:
        recording.poison_freed(stream)
        return self.arena.allocate(num_bytes, stream=stream, is_bool=is_bool, epoch=recording.epoch)


def _replace(result: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Puts other tensors into a result, in the order of `tensors_in`."""
    if isinstance(result, torch.Tensor):
        return next(tensors)
    if isinstance(result, list | tuple):
        return type(result)(_replace(item, tensors) for item in result)
    return result


def _alias_kwargs(recording: Recording, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: recording.alias(value) for name, value in kwargs.items()}
