"""Boundaries, lifetime and aliasing: memory that is handed out again while someone still reads it."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from contract.support import assert_equal, assert_like_eager, churn, ramp, stream_api

from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import BreakMismatchError, CaptureError, MovedAddressError
from sgl_piecewise.runtime.mark import eager_on_graph

BUCKETS = [4, 8, 16, 32]


@eager_on_graph
def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q * 2 + k.sum(0)


def three_layers(x: torch.Tensor) -> torch.Tensor:
    hidden = x
    for layer in range(3):
        q, k = hidden + layer, hidden * 2
        attended = attend(q, k)
        gate = torch.full_like(x, float(layer))
        hidden = (attended + gate) * 0.5
        del q, k
    return hidden


def _buckets(device: GraphDevice) -> CapturedCallable:
    return capture(three_layers, (ramp(device, BUCKETS[-1], 8),), capture_sizes=BUCKETS, device=device)


def test_row_001_buckets_survive_churn_and_random_order(graph_device: GraphDevice) -> None:
    """sglang#37606: break inputs held by weak reference were used again by smaller buckets of the pool."""
    captured = _buckets(graph_device)
    order = random.Random(37606)
    for step in range(24):
        size = order.choice(BUCKETS)
        if step % 8 == 0:
            churn(graph_device, (size, 8), (8,))
        x = ramp(graph_device, size, 8, start=float(step))
        assert_equal(captured(x), three_layers(x))


def test_row_002_result_of_one_segment_is_not_changed_by_another(graph_device: GraphDevice) -> None:
    """sglang#22218: a tensor written by segment 1 changed under a later segment of the same pool."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        first = x + 1
        second = attend(first, first)
        third = torch.full_like(x, 1000.0)  # The size of `first`, which only the break's arguments name now.
        return attend(second, third) + attend(first, third)

    calls = [(ramp(graph_device, 16, 8),), (ramp(graph_device, 16, 8, start=7.0),)]
    assert_like_eager(graph_device, forward, calls)


def test_row_002_dropped_argument_may_be_used_again_only_after_the_break(graph_device: GraphDevice) -> None:
    """sglang#22218: the break must read its argument before a later segment takes the memory."""
    seen: list[torch.Tensor] = []

    @eager_on_graph
    def look(t: torch.Tensor) -> None:
        seen.append(t.clone())

    def forward(x: torch.Tensor) -> torch.Tensor:
        first = x + 1
        look(first)
        del first
        return torch.full_like(x, 1000.0) + x

    captured = capture(forward, (ramp(graph_device, 16, 8),), device=graph_device)
    seen.clear()
    inputs = [ramp(graph_device, 16, 8, start=float(n)) for n in range(3)]
    for x in inputs:
        captured(x)
    assert_equal(seen, [x + 1 for x in inputs])


def test_row_003_break_output_survives_allocations_between_capture_and_replay(
    graph_device: GraphDevice,
) -> None:
    """TRT-LLM#16609: a break output allocated outside any segment, held weakly, was given to others."""
    captured = capture(three_layers, (ramp(graph_device, 16, 8),), device=graph_device)
    for n in range(3):
        churn(graph_device, (16, 8), (16 * 8,), (1, 16, 8))
        x = ramp(graph_device, 16, 8, start=float(n))
        assert_equal(captured(x), three_layers(x))
    (pool_bytes,) = {captured.pool.memory().reserved_bytes}
    assert pool_bytes > 0


def test_row_004_break_returning_a_fresh_tensor_is_copied(graph_device: GraphDevice) -> None:
    """vllm#37363: the next piece read the capture-time address of a result that was fresh each time."""
    kept: list[torch.Tensor] = []

    @eager_on_graph
    def fresh(t: torch.Tensor) -> torch.Tensor:
        kept.append(t * 2)  # Kept alive, so that no later result can land on the same address by luck.
        return kept[-1]

    captured = capture(lambda x: fresh(x + 1) - 1, (ramp(graph_device, 8),), device=graph_device)
    for n in range(4):
        x = ramp(graph_device, 8, start=float(n))
        assert_equal(captured(x), (x + 1) * 2 - 1)
    assert len({tensor.data_ptr() for tensor in kept}) == len(kept)


def test_row_004_argument_at_capture_and_fresh_tensor_at_replay_raises(graph_device: GraphDevice) -> None:
    """vllm#37363: where a copy is not possible, silence is not either."""
    fresh = {"now": False}

    @eager_on_graph
    def sometimes(t: torch.Tensor) -> torch.Tensor:
        return t * 2 if fresh["now"] else t.mul_(2)

    x = ramp(graph_device, 8)
    captured = capture(lambda t: sometimes(t + 1) - 1, (x,), device=graph_device)
    assert_equal(captured(x), (x + 1) * 2 - 1)
    fresh["now"] = True
    with pytest.raises(BreakMismatchError, match="sometimes"):
        captured(x)


class Workspace:
    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.zeros(8, device=device)

    def grow(self) -> None:
        self.buffer = torch.zeros(2 * self.buffer.numel(), device=self.buffer.device)


def test_row_006_workspace_that_grew_after_capture_raises(graph_device: GraphDevice) -> None:
    """flashinfer#4398: a workspace grown by free and allocate, while graphs hold the old address."""
    workspace = Workspace(graph_device.torch_device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        workspace.buffer[:8].copy_(x)
        return workspace.buffer[:8] * 2

    x = ramp(graph_device, 8)
    captured = capture(
        forward, (x,), device=graph_device, static_tensors={"workspace": lambda: workspace.buffer}
    )
    assert_equal(captured(x), x * 2)
    workspace.grow()
    with pytest.raises(MovedAddressError, match="workspace"):
        captured.check_static_addresses()


def test_row_007_addresses_seen_while_capturing_stay_in_the_pool(graph_device: GraphDevice) -> None:
    """aiter#3838: addresses recorded during capture belonged to tensors already freed."""
    addresses: dict[int, list[int]] = {}
    tensors: list[tuple[int, bool]] = []

    @eager_on_graph
    def register(t: torch.Tensor) -> torch.Tensor:
        addresses.setdefault(t.shape[0], []).append(t.data_ptr())
        tensors.append((t.shape[0], pool.owns(t)))
        return t * 2

    pool = graph_device.new_pool()
    captured = capture(
        lambda x: register(x + 1), (ramp(graph_device, 32, 8),), capture_sizes=BUCKETS, pool=pool
    )
    captured_at = {size: found[-1] for size, found in addresses.items() if size in BUCKETS}
    tensors.clear()
    for size in BUCKETS:
        captured(ramp(graph_device, size, 8))
        assert addresses[size][-1] == captured_at[size]
    assert tensors == [(size, True) for size in BUCKETS]


def test_row_008_output_of_run_one_is_kept_when_run_two_replays(graph_device: GraphDevice) -> None:
    """pytorch#148439: outputs live in memory that the next run writes; ours are copies unless asked otherwise."""
    captured = _buckets(graph_device)
    x = ramp(graph_device, 8, 8)
    first = captured(x)
    for size in (8, 32, 5):
        captured(ramp(graph_device, size, 8, start=-300.0))
    assert_equal(first, three_layers(x))


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_row_009_output_fed_back_as_a_mutated_input(graph_device: GraphDevice, outputs: str) -> None:
    """pytorch#192748: a buffer made inside the region came back as the mutated input of the next call."""

    def step(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5)
        return attend(state, x) + x

    captured = capture(
        step, (ramp(graph_device, 4, 8), ramp(graph_device, 4, 8)), device=graph_device, outputs=outputs
    )
    ours, theirs = ramp(graph_device, 4, 8), ramp(graph_device, 4, 8)
    for n in range(4):
        x = ramp(graph_device, 4, 8, start=float(n))
        ours, theirs = captured(ours, x), step(theirs, x)
        assert_equal(ours, theirs)


def test_row_010_input_staging_lives_as_long_as_the_graphs(graph_device: GraphDevice) -> None:
    """onnxruntime#32121: a copy into the graph read again a host block that had been recycled."""
    example = ramp(graph_device, 8)
    gone = weakref.ref(example)
    captured = capture(lambda x: attend(x + 1, x) - 1, (example,), device=graph_device)
    del example
    gc.collect()
    assert gone() is None  # Nothing of the example is needed,
    churn(graph_device, (8,))
    for n in range(3):
        x = ramp(graph_device, 8, start=float(n))
        result = captured(x)
        x.fill_(-1)  # and the caller's tensor may be written again at once.
        assert_equal(
            result,
            attend(ramp(graph_device, 8, start=float(n)) + 1, ramp(graph_device, 8, start=float(n))) - 1,
        )


def test_row_011_second_caller_does_not_overwrite_the_first_ones_output(graph_device: GraphDevice) -> None:
    """sglang-omni#1369: no event between the copy of an output and the next replay, on another stream."""
    api = stream_api(graph_device)
    streams = [api.Stream(), api.Stream()]
    shape = (64, 8) if graph_device.is_emulated else (4096, 512)
    captured = capture(lambda x: attend(x + 1, x) - 1, (ramp(graph_device, *shape),), device=graph_device)
    inputs = [torch.full(shape, float(n), device=graph_device.torch_device) for n in range(6)]
    expected = [attend(x + 1, x) - 1 for x in inputs]
    graph_device.synchronize()
    results = []
    for n, x in enumerate(inputs):
        with api.stream(streams[n % 2]):
            results.append(captured(x))
    graph_device.synchronize()
    assert_equal(results, expected)


def test_row_012_autograd_is_refused(graph_device: GraphDevice) -> None:
    """pytorch#181723: static gradient buffers were returned to autograd; we are for inference."""
    weight = torch.ones(8, device=graph_device.torch_device, requires_grad=True)
    with torch.enable_grad(), pytest.raises(CaptureError, match="no_grad"):
        capture(lambda x: x * weight, (ramp(graph_device, 8),), device=graph_device)
