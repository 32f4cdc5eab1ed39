"""Copies of a call's inputs and outputs as part of its graphs, whose ends a replay sets before the launch.

To set both ends of a copy costs the host less than to launch one. One invariant: a graph does its copies at every
launch, so each reads and writes memory that is there then: what was set before the launch, or, where the device cannot
set ends, what it was captured with. Whoever remembers an end forgets it before setting another: an exception that
comes out of the call that sets it (Ctrl-C) leaves it unknown which one holds. This module must not know what a call is
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .device import DEVICE_TO_DEVICE, EndsSetter, GraphDevice, SettableCopy
from .extents import bytes_of
from .session import CaptureSession

SETTING_ENDS = "set where a copy of an input or an output reads and writes"
"""What a device was to do that did not take ends, for `GraphDevice.refusal`."""


class CopiesIn:
    """Copies of inputs at the start of a call's first graph.

    Make it before the session: what `record` records the copies with must not lie in the pool, where an input may lie
    that is an earlier output come back.

    Args:
        buffers: Place and buffer of each input; plain memory (`extents.is_plain_memory`). Only addresses are kept: the
            buffers must live as long as the graphs are launched.
    """

    def __init__(self, buffers: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._buffers = [(place, buffer.data_ptr(), buffer.nbytes) for place, buffer in buffers]
        targets = [_bytes(buffer) for _, buffer in buffers]
        self._ends = [(target, torch.empty_like(target)) for target in targets]
        self._copies: list[SettableCopy] = []
        self._device: GraphDevice | None = None

    def record(self, session: CaptureSession) -> None:
        """Records the copies; nothing was captured in the session yet."""
        self._device = session.pool.device
        self._copies = [session.record_copy(*ends) for ends in self._ends]
        self._ends.clear()

    def setter(self) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        """Returns ``set_sources(args) -> tensors``, which makes the next launch copy a call's inputs.

        Ask once the recording is done, and only once: it remembers what it set. The tensors that a call of it returns
        are what the launch reads; keep them until then. It raises `ReplayError` where the device refuses.
        """
        setters = _ends_setters(self._copies)
        if setters is None:
            return self._slow_setter()
        plan = [(*buffer, set_ends) for buffer, set_ends in zip(self._buffers, setters, strict=True)]
        sources, device = [0] * len(plan), self._device
        assert device is not None, "recorded"

        def set_sources(args: Sequence[Any]) -> list[torch.Tensor]:
            held = []
            for index, (place, target, num_bytes, set_ends) in enumerate(plan):
                value = args[place]
                if not value.is_contiguous() or value.is_neg():
                    value = in_order(value)
                held.append(value)
                source = value.data_ptr()
                if source != sources[index]:  # Inputs often lie where they lay before.
                    sources[index] = 0
                    if error := set_ends(target, source, num_bytes, DEVICE_TO_DEVICE):
                        raise device.refusal(error, SETTING_ENDS)
                    sources[index] = source
            return held

        return set_sources

    def _slow_setter(self) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        """Returns the same for a device that recorded a copy as something whose ends cannot be set."""
        places, setters = [place for place, _, _ in self._buffers], [one.setter() for one in self._copies]

        def set_sources(args: Sequence[Any]) -> list[torch.Tensor]:
            held = [_bytes(in_order(args[place])) for place in places]
            for set_source, value in zip(setters, held, strict=True):
                set_source(value)
            return held

        return set_sources

    def only(self) -> tuple[int, int, int, EndsSetter] | None:
        """Returns place, buffer's address, bytes and setter of ends of the one input.

        None where there is not exactly one, or its ends cannot be set. Ask once the recording is done, and use this or
        `setter`.
        """
        setters = _ends_setters(self._copies)
        return (*self._buffers[0], setters[0]) if setters is not None and len(setters) == 1 else None


class CopiesOut:
    """Copies of outputs at the end of a call's last graph.

    Args:
        session: Open, all else is captured.
        outputs: What was captured; each is all of its memory, in whatever order, and none is empty.
    """

    def __init__(self, session: CaptureSession, outputs: Sequence[torch.Tensor]) -> None:
        self._outputs = [(output.data_ptr(), output.nbytes) for output in outputs]
        sources = [_bytes(output) for output in outputs]
        self._targets = [torch.empty_like(source) for source in sources]
        self._copies = [session.record_copy(*ends) for ends in zip(self._targets, sources, strict=True)]

    def plan(self) -> list[tuple[int, int, EndsSetter]] | None:
        """Returns address, bytes and setter of ends of each output; ask once the recording is done.

        Every launch then needs targets that were set. None where the ends of one cannot be set: launches go on writing
        to memory that this object owns, so it must live as long as they happen.
        """
        setters = _ends_setters(self._copies)
        if setters is None:
            return None
        self._targets.clear()
        return [(*output, set_ends) for output, set_ends in zip(self._outputs, setters, strict=True)]


def in_order(value: torch.Tensor) -> torch.Tensor:
    """Returns a copy whose bytes are the tensor's values in order."""
    return value.resolve_neg().clone(memory_format=torch.contiguous_format)


def _ends_setters(copies: Sequence[SettableCopy]) -> list[EndsSetter] | None:
    """Returns what sets the ends of each copy; None where one has nothing that does."""
    setters = [set_ends for one in copies if (set_ends := one.ends_setter()) is not None]
    return setters if len(setters) == len(copies) else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Views all bytes of a tensor, in the order in which they lie."""
    return bytes_of(tensor, tensor.data_ptr(), tensor.nbytes)
