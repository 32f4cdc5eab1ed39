"""Attention inside graphs and as a break: one capture, then batches of other lengths and owners."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sgl_piecewise.runtime.attention.base import attend
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.padding import pad_batch
from sgl_piecewise.runtime.batch.static_buffers import StaticBatchBuffers
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.kv.slots import FULL_POOL

from .support import TOLERANCE, Request, World, spec

NUM_TOKENS = {ForwardMode.DECODE: 4, ForwardMode.TARGET_VERIFY: 12, ForwardMode.EXTEND: 96}
NUM_REQUESTS = 4

# The first one is captured: short, so that a launch whose extent followed from it would be too small.
BATCHES = {
    ForwardMode.DECODE: [
        [Request(0, 0, 1)],
        [Request(1, 250, 1), Request(2, 0, 1), Request(3, 129, 1), Request(4, 64, 1)],
        [Request(5, 3, 1), Request(6, 200, 1)],
    ],
    ForwardMode.TARGET_VERIFY: [
        [Request(0, 0, 3)],
        [Request(1, 250, 3), Request(2, 0, 3), Request(3, 126, 3)],
        [Request(5, 3, 3)],
    ],
    ForwardMode.EXTEND: [
        [Request(0, 0, 5)],
        [Request(1, 0, 90)],
        [Request(2, 200, 33), Request(3, 0, 1), Request(4, 128, 40), Request(5, 1, 22)],
    ],
}


@pytest.fixture
def device(graph_device: GraphDevice) -> torch.device:
    return graph_device.torch_device


@pytest.fixture
def world(backend_name: str, device: torch.device) -> World:
    return World(
        spec(num_heads=2, num_kv_heads=1, head_dim=32, window=150), backend=backend_name, device=device
    )


def padded(world: World, mode: ForwardMode, requests: list[Request]) -> ForwardBatch:
    world.give_rows(requests)
    num_tokens = NUM_TOKENS[mode] if mode is ForwardMode.EXTEND else None
    return world.batch(mode, requests, num_requests=NUM_REQUESTS, num_tokens=num_tokens)


def layer_of(world: World) -> Callable[..., torch.Tensor]:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q * 1, k * 1, v * 1, world.layer) + 0

    return forward


def check_replays(world: World, strategy: str, mode: ForwardMode, graph_device: GraphDevice) -> None:
    """Captures the first batch of a mode, and compares a replay of each with eager and with float64."""
    backend = world.backend
    first = BATCHES[mode][0]
    batch = padded(world, mode, first)
    plan_for_capture = backend.plan_for_capture if strategy == "full" else backend.plan
    plan_for_replay = backend.plan_for_replay if strategy == "full" else backend.plan
    tokens = world.new_tokens(batch, batch.num_tokens)
    plan_for_capture(batch)
    with use_forward_context(ForwardContext(attention=backend)):
        captured = capture(
            layer_of(world),
            tokens,
            strategy=strategy,
            device=graph_device,
            static_tensors={**backend.static_tensors(), **world.pool.static_tensors()},
        )
        for requests in [*BATCHES[mode], first]:
            batch = padded(world, mode, requests)
            real = sum(one.new for one in requests)
            tokens = world.new_tokens(batch, real)
            plan_for_replay(batch)
            replayed = captured(*tokens)
            assert replayed[:real].isfinite().all()
            eager = backend.run(*tokens, world.layer)
            assert torch.equal(replayed[:real], eager[:real])
            want = world.expected(requests, tokens)
            assert (replayed[:real].double().cpu() - want).abs().max() < TOLERANCE[world.dtype]


@pytest.mark.parametrize("mode", BATCHES)
@pytest.mark.parametrize("strategy", ["full", "breakable"])
def test_a_replay_gives_what_eager_gives(
    world: World, strategy: str, mode: ForwardMode, graph_device: GraphDevice
) -> None:
    check_replays(world, strategy, mode, graph_device)


def test_a_plan_changes_nothing_that_a_graph_reads_but_its_contents(world: World) -> None:
    before = {name: tensor.data_ptr() for name, tensor in world.backend.static_tensors().items()}
    for mode, batches in BATCHES.items():
        for requests in batches:
            world.backend.plan_for_capture(padded(world, mode, requests))
            world.backend.plan(padded(world, mode, requests))
    after = {name: tensor.data_ptr() for name, tensor in world.backend.static_tensors().items()}
    assert before == after


def test_graphs_read_a_static_batch_where_it_lies_and_others_are_copied_to_it(world: World) -> None:
    backend, mode = world.backend, ForwardMode.DECODE
    buffers = StaticBatchBuffers(max_batch_size=4, max_num_tokens=4, pools=(FULL_POOL,), device=world.device)

    def static(requests: list[Request]) -> ForwardBatch:
        world.give_rows(requests)
        return pad_batch(world.batch(mode, requests), batch_size=4, storage=buffers)

    backend.plan_for_capture(static(BATCHES[mode][0]))
    plan = backend._current(torch.empty(4))
    held = buffers.static_tensors()
    assert plan.seq_lens.data_ptr() == held["seq_lens"].data_ptr()
    assert plan.req_pool_indices.data_ptr() == held["req_pool_indices"].data_ptr()
    assert plan.write_slots[FULL_POOL].ids.data_ptr() == held[f"write_slots.{FULL_POOL}"].data_ptr()
    backend.plan_for_replay(static(BATCHES[mode][2]))
    assert backend._current(torch.empty(4)) is plan
    assert plan.seq_lens.tolist() == [4, 201, 1, 1]
    elsewhere = padded(world, mode, BATCHES[mode][1])
    before = elsewhere.seq_lens.clone()
    backend.plan_for_replay(elsewhere)
    assert torch.equal(plan.seq_lens, before)
    assert torch.equal(plan.write_slots[FULL_POOL].ids, elsewhere.out_cache_loc)


def test_a_captured_batch_of_its_owners_is_not_written_to(world: World) -> None:
    """It may be planned again: nothing said that graphs may take its tensors."""
    first = padded(world, ForwardMode.DECODE, BATCHES[ForwardMode.DECODE][0])
    before = first.seq_lens.clone()
    world.backend.plan_for_capture(first)
    world.backend.plan_for_replay(padded(world, ForwardMode.DECODE, BATCHES[ForwardMode.DECODE][1]))
    assert torch.equal(first.seq_lens, before)


def test_a_second_capture_of_sizes_keeps_what_the_first_graph_reads(world: World) -> None:
    world.backend.plan_for_capture(padded(world, ForwardMode.DECODE, BATCHES[ForwardMode.DECODE][0]))
    plan = world.backend._current(torch.empty(4))
    buffers = StaticBatchBuffers(max_batch_size=4, max_num_tokens=4, pools=(FULL_POOL,), device=world.device)
    again = pad_batch(world.batch(ForwardMode.DECODE, BATCHES[ForwardMode.DECODE][1]), storage=buffers)
    world.backend.plan_for_capture(again)
    assert world.backend._current(torch.empty(4)) is plan
    assert torch.equal(plan.seq_lens, again.seq_lens)


def test_a_replay_of_sizes_that_were_not_captured_is_an_error(world: World) -> None:
    batch = padded(world, ForwardMode.DECODE, BATCHES[ForwardMode.DECODE][1])
    with pytest.raises(ConfigError, match="plan_for_capture comes first"):
        world.backend.plan_for_replay(batch)
    world.backend.plan_for_capture(batch)
    world.backend.plan_for_replay(batch)
    verify = padded(world, ForwardMode.TARGET_VERIFY, BATCHES[ForwardMode.TARGET_VERIFY][1])
    with pytest.raises(ConfigError, match="target_verify"):
        world.backend.plan_for_replay(verify)
