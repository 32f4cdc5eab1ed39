"""Copies of a call's inputs and outputs as part of its graphs, whose ends a replay sets before the launch.

To set both ends of a copy costs the host less than to launch one. One invariant: what is in the graphs is done at every
launch, so a copy has ends that are good for the launch: set for it, or its own. Whoever remembers an end forgets it
before setting another: an exception that comes out of the call that sets it (Ctrl-C) leaves it unknown which one
holds. This module must not know what a call is otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ReplayError
from .device import DEVICE_TO_DEVICE, EndsSetter, SettableCopy
from .extents import bytes_of
from .session import CaptureSession


class CopiesIn:
    """Copies of inputs at the start of a call's first graph.

    Make it before the session: what `record` records the copies with must not lie in the pool, where an input may lie
    that is an earlier output come back.

    Args:
        buffers: Place and buffer of each input.
    """

    def __init__(self, buffers: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._buffers = [(place, buffer.data_ptr(), buffer.nbytes) for place, buffer in buffers]
        targets = [_bytes(buffer) for _, buffer in buffers]
        self._ends = [(target, torch.empty_like(target)) for target in targets]
        self._copies: list[SettableCopy] = []

    def record(self, session: CaptureSession) -> None:
        """Records the copies; nothing was captured in the session yet."""
        self._copies = [session.record_copy(*ends) for ends in self._ends]
        self._ends.clear()

    def setter(self) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        """Returns what makes the next launch copy a call's inputs, once the recording is done.

        What that returns must live until the launch.
        """
        setters = [one.ends_setter() for one in self._copies]
        plan = [
            (*buffer, set_ends)
            for buffer, set_ends in zip(self._buffers, setters, strict=True)
            if set_ends is not None
        ]
        if len(plan) < len(setters):
            return self._slow_setter()
        sources = [0] * len(plan)

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
                    if set_ends(target, source, num_bytes, DEVICE_TO_DEVICE):
                        raise refused()
                    sources[index] = source
            return held

        return set_sources

    def _slow_setter(self) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        """For a device that recorded a copy as something whose ends cannot be set."""
        places, setters = [place for place, _, _ in self._buffers], [one.setter() for one in self._copies]

        def set_sources(args: Sequence[Any]) -> list[torch.Tensor]:
            held = [_bytes(in_order(args[place])) for place in places]
            for set_source, value in zip(setters, held, strict=True):
                set_source(value)
            return held

        return set_sources

    def only(self) -> tuple[int, int, int, EndsSetter] | None:
        """Returns place, buffer's address, bytes and setter of the one input; None where there is another number."""
        if len(self._copies) != 1:
            return None
        set_ends = self._copies[0].ends_setter()
        return None if set_ends is None else (*self._buffers[0], set_ends)


class CopiesOut:
    """Copies of outputs at the end of a call's last graph.

    Args:
        session: Open, all else is captured.
        outputs: What was captured; values are bytes in some order.
    """

    def __init__(self, session: CaptureSession, outputs: Sequence[torch.Tensor]) -> None:
        self._outputs = [(output.data_ptr(), output.nbytes) for output in outputs]
        sources = [_bytes(output) for output in outputs]
        self._targets = [torch.empty_like(source) for source in sources]
        self._copies = [session.record_copy(*ends) for ends in zip(self._targets, sources, strict=True)]

    def plan(self) -> list[tuple[int, int, EndsSetter]] | None:
        """Returns address, bytes and setter of each output; ask once the recording is done.

        None where the ends of one cannot be set; as long as this object lives, the launches write to its memory then.
        """
        setters = [one.ends_setter() for one in self._copies]
        plan = [
            (*output, set_ends)
            for output, set_ends in zip(self._outputs, setters, strict=True)
            if set_ends is not None
        ]
        if len(plan) < len(setters):
            return None
        self._targets.clear()
        return plan


def in_order(value: torch.Tensor) -> torch.Tensor:
    """Returns a copy whose bytes are the tensor's values in order."""
    return value.resolve_neg().clone(memory_format=torch.contiguous_format)


def refused() -> ReplayError:
    """Makes the error for ends that the device did not take."""
    return ReplayError(
        "CUDA refused to set where a copy of an input or an output reads and writes. CUDA reports errors late: run "
        "again with CUDA_LAUNCH_BLOCKING=1, or options={'capture': 'none'}, to see which work failed."
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return bytes_of(tensor, tensor.data_ptr(), tensor.nbytes)
