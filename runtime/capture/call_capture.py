"""The run of a call that is captured: on the capture stream, and at a capture size where the call is padded.

All that the call does happens in this run; recording it afterwards executes nothing. This module must not know when
calls are captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import CaptureError
from .call_padding import CallPadding
from .device import GraphPool
from .flat_inputs import FlatInputs, InputFacts, share_memory
from .flat_outputs import FlatOutputs

Forward = Callable[..., Sequence[Any]]


def run_before_capture(
    pool: GraphPool,
    forward: Forward,
    facts: InputFacts,
    args: tuple[Any, ...],
    *,
    padding: CallPadding | None,
    size: int | None,
) -> tuple[Sequence[Any], FlatInputs | None]:
    """Runs a call on the capture stream of a pool that the caller holds.

    At a capture size it runs padded already, as replays will: kernels that look at sizes are ready then.

    Args:
        pool: Held by the caller.
        forward: What is captured.
        facts: Of its inputs.
        args: The call's inputs.
        padding: How calls are padded, if they are.
        size: The capture size; None where the call has none.

    Returns:
        The call's outputs, which the caller's stream may use; and the buffers to record on, None for those of
        the call's own form.
    """
    device = pool.device.torch_device
    caller = torch.cuda.current_stream(device) if device.type == "cuda" else None
    with pool.on_capture_stream():
        padded = _padded_inputs(facts, args, padding, size)
        outputs = forward(*args) if padded is None else _run_padded(forward, padded, args, padding)
    if caller is not None:
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.is_cuda:
                output.record_stream(caller)  # For the allocator: it was made on the capture stream.
    return outputs, padded


def _padded_inputs(
    facts: InputFacts, args: tuple[Any, ...], padding: CallPadding | None, size: int | None
) -> FlatInputs | None:
    """Returns buffers of a capture size that hold a call's inputs; None where the call is captured as it is."""
    if size is None or share_memory(facts, args):
        return None
    try:
        return FlatInputs(facts, args, padding=padding, size=size)
    except CaptureError:
        return None  # The recording meets the same error, when the call is done.


def _run_padded(
    forward: Forward, inputs: FlatInputs, args: tuple[Any, ...], padding: CallPadding | None
) -> Sequence[Any]:
    """Runs the forward at a capture size, on the buffers that it will be recorded with."""
    try:
        outputs = list(forward(*inputs.views))
    finally:
        if inputs.has_written:
            inputs.copy_back(args, frozenset())
    plan_for = partial(
        FlatOutputs, outputs, inputs.views, owns=lambda _: True, is_copied=True, padding=padding
    )
    try:
        plan = plan_for(inputs.aliases)
    except CaptureError:
        plan = plan_for({})  # Copies all; the recording meets the same error.
    return plan.of_call(args, outputs)
