"""One recording of a call, and the replay of it at the least cost to the host.

What a replay does, and which checks a call needs before it, is known once the recording is there; so the code below
decides then and not at the calls, and looks up nothing twice. One invariant: from copying in to copying out a
replay holds the pool. This module must not know when calls are recorded, or why they are not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .call_copies import SETTING_ENDS, CopiesIn, CopiesOut, in_order
from .device import DEVICE_TO_DEVICE, EndsSetter
from .flat_inputs import FlatInputs
from .flat_outputs import FlatOutputs
from .recording import Recording
from .segments import is_raised_by_break

Replay = Callable[[Sequence[Any]], Sequence[Any] | None]
"""Gives a call's outputs from its inputs; the caller does not hold the pool, and no capture is under way.

None where another thread freed the recording before this one had the pool; nothing was done then.
"""


@dataclass(kw_only=True)
class ReplayCounts:
    """Counts of one forward; written while its pool is held.

    Attributes:
        num_replays: Calls that were replays.
        num_padded: Of those, at a larger size than their own.
    """

    num_replays: int = 0
    num_padded: int = 0


class CapturedCall:
    """One recording with what a call needs to use it.

    Args:
        inputs: Its buffers.
        recording: The recording.
        outputs: How its outputs become a call's.
        counts: Where replays are counted.
        copies_in: Copies of inputs that are in the graphs, if they are.
        copies_out: Copies of outputs, likewise.

    Attributes:
        recording: As given.
        addresses: Where static inputs lie, by place, as `torch_private.address_check` wants it.
        places: Of the static inputs.
        conflicts_with: Tells whether a call's inputs share memory so that it cannot be a replay; None where none can.
        is_held: Tells whether this thread is replaying or capturing on the recording's pool.
        memory: Owns the buffers that the graphs read and write by address; never asked, only kept.
        is_for_padding: Whether calls of other sizes may use it.
        replay: The replay.
        owners: Kept here by who made this.
    """

    __slots__ = (
        "__weakref__",
        "addresses",
        "conflicts_with",
        "is_for_padding",
        "is_held",
        "memory",
        "owners",
        "places",
        "recording",
        "replay",
    )

    def __init__(
        self,
        inputs: FlatInputs,
        recording: Recording,
        outputs: FlatOutputs,
        counts: ReplayCounts,
        *,
        copies_in: CopiesIn | None = None,
        copies_out: CopiesOut | None = None,
    ) -> None:
        self.recording = recording
        self.places = list(inputs.addresses)
        self.addresses = [inputs.addresses.get(place) for place in range(max(self.places, default=-1) + 1)]
        self.conflicts_with: Callable[[Sequence[Any]], bool] | None = (
            inputs.conflicts_with if inputs.can_conflict else None
        )
        self.memory = inputs, copies_out
        self.is_held = recording.pool.is_held
        self.is_for_padding = inputs.size is not None
        self.replay: Replay = _replay_of(inputs, recording, outputs, counts, copies_in, copies_out)
        self.owners: list[weakref.ref[torch.Tensor]] = []


def _replay_of(
    inputs: FlatInputs,
    recording: Recording,
    outputs: FlatOutputs,
    counts: ReplayCounts,
    copies_in: CopiesIn | None,
    copies_out: CopiesOut | None,
) -> Replay:
    """Returns the replay that does what this recording needs, and nothing else."""
    only_in = None if copies_in is None or inputs.has_written else copies_in.only()
    plan_out = None if copies_out is None else copies_out.plan()
    if only_in is not None and plan_out is not None and len(plan_out) == 1:
        return _replay_of_one(recording, counts, only_in, plan_out[0])
    pool = recording.pool
    lock, current_stream, order_after_last_use = pool.lock, pool.current_stream, pool.order_after_last_use
    # What it returns must live until the launch.
    copy_in: Callable[[Sequence[Any]], Any] = inputs.copy_in if copies_in is None else copies_in.setter()
    copy_back, of_call, own_storages = (
        inputs.copy_back if inputs.has_written else None,
        None if outputs.are_clones else outputs.of_call,
        outputs.own_storages,
    )
    clone, empty_like = torch.Tensor.clone, torch.empty_like
    is_padded = inputs.is_padded if inputs.size is not None else None
    last_targets = [0] * len(plan_out or ())

    def replay(args: Sequence[Any]) -> Sequence[Any] | None:
        with lock:
            # Asked of the recording each time: another thread may have reset it before this one had the pool.
            launch = recording.launch or recording.first_launch()
            if launch is None:
                return None
            if current_stream() != pool.last_stream:
                order_after_last_use()
            held = copy_in(args)
            copies = None
            if plan_out is not None:
                copies = list(map(empty_like, recording.outputs))
                for index, (source, num_bytes, set_ends) in enumerate(plan_out):
                    target = copies[index].data_ptr()
                    if target != last_targets[index]:
                        last_targets[index] = 0
                        if error := set_ends(target, source, num_bytes, DEVICE_TO_DEVICE):
                            raise pool.device.refusal(error, SETTING_ENDS)
                        last_targets[index] = target
            try:
                launch()
            except BaseException as error:
                # What was written before a marked function raised stays written. Before the first graph ran, the
                # buffers may hold another call's inputs.
                if copy_back is not None and (copies_in is None or is_raised_by_break(error)):
                    copy_back(args, own_storages)
                raise
            del held
            if copy_back is not None:
                copy_back(args, own_storages)
            counts.num_replays += 1
            if is_padded is not None:
                counts.num_padded += is_padded(args)
            if copies is not None:
                return copies
            if of_call is None:
                return list(map(clone, recording.outputs))
            return of_call(args, recording.outputs)

    return replay


def _replay_of_one(
    recording: Recording,
    counts: ReplayCounts,
    copy_in: tuple[int, int, int, EndsSetter],
    copy_out: tuple[int, int, EndsSetter],
) -> Replay:
    """Returns the replay of one input and one output that are both copied inside the graphs.

    Args:
        recording: The recording.
        counts: Where replays are counted.
        copy_in: From `CopiesIn.only`.
        copy_out: From `CopiesOut.plan`.
    """
    pool = recording.pool
    lock, current_stream, order_after_last_use = pool.lock, pool.current_stream, pool.order_after_last_use
    place, buffer, in_bytes, set_in = copy_in
    recorded, out_bytes, set_out = copy_out
    empty_like = torch.empty_like
    last_source = last_target = 0  # As the copies are set.

    def replay_one(args: Sequence[Any]) -> Sequence[Any] | None:
        nonlocal last_source, last_target
        with lock:
            launch = recording.launch or recording.first_launch()
            if launch is None:
                return None
            if current_stream() != pool.last_stream:
                order_after_last_use()
            value = args[place]
            if not value.is_contiguous() or value.is_neg():
                value = in_order(value)
            output = empty_like(recording.outputs[0])
            source, target = value.data_ptr(), output.data_ptr()
            if source != last_source:  # Tensors often lie where others lay in the call before.
                last_source = 0
                if error := set_in(buffer, source, in_bytes, DEVICE_TO_DEVICE):
                    raise pool.device.refusal(error, SETTING_ENDS)
                last_source = source
            if target != last_target:
                last_target = 0
                if error := set_out(target, recorded, out_bytes, DEVICE_TO_DEVICE):
                    raise pool.device.refusal(error, SETTING_ENDS)
                last_target = target
            launch()
            counts.num_replays += 1
            return (output,)

    return replay_one
