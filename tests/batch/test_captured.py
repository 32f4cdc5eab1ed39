"""Batches in static buffers under capture: replays read and write what eager would, whoever came before."""

from __future__ import annotations

import pytest
import torch
from serving_support import BLOCK_SIZE, World, world

from sgl_piecewise.runtime.batch.dummy import dummy_uniform_batch
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.padding import cut_requests, pad_batch
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.schedule_batch import SpeculativeInput
from sgl_piecewise.runtime.batch.scheduling import release, schedule
from sgl_piecewise.runtime.batch.static_buffers import StaticBatchBuffers
from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.kv.slots import FULL_POOL, WINDOW_POOL

LAYERS = {0: FULL_POOL, 1: WINDOW_POOL}
SIZES = (2, 4, 8)
STARTS = (3, 9, 1, 6, 2, 7)


class ToyModel:
    """Writes each token's id into every sub-pool, then sums what its request may read."""

    def __init__(self, at: World) -> None:
        self.at = at

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        rows = batch.input_ids.to(torch.float32).view(-1, 1, 1).expand(-1, 2, 4)
        total = torch.zeros(batch.batch_size, device=rows.device)
        for layer_id, pool in LAYERS.items():
            self.at.pool.set_kv(layer_id, batch.write_slots[pool], rows, rows)
            table = self.at.kv_translator.req_to_token(pool)[batch.req_pool_indices].to(torch.int64)
            keys = self.at.pool.k_buffer(layer_id)[table, 0, 0]
            may_read = torch.arange(table.shape[1], device=rows.device) < batch.seq_lens.unsqueeze(1)
            total = total + torch.where(may_read, keys, 0).sum(1)
        return total


def tokens(index: int) -> list[int]:
    return [1000 * (index + 1) + token for token in range(24)]


class Server:
    """Requests in mid-decode, and a graph for each size."""

    def __init__(self, device: GraphDevice, mode: ForwardMode, per_req: int) -> None:
        self.at = world(device=device.torch_device, max_context=32)
        self.mode, self.per_req = mode, per_req
        self.model = ToyModel(self.at)
        self.buffers = StaticBatchBuffers(
            max_batch_size=SIZES[-1],
            max_num_tokens=SIZES[-1] * per_req,
            pools=self.at.kv_translator.pools,
            device=self.at.device,
        )
        self.reqs = [Req.of_prompt(str(index), tokens(index)) for index in range(len(STARTS))]
        for req, start in zip(self.reqs, STARTS, strict=True):
            batch = self.at.forward(
                schedule(ForwardMode.EXTEND, [req], [start], self.at.allocator, self.at.table)
            )
            self.model.forward(batch)
            req.num_computed_tokens = start
        static = self.buffers.static_tensors() | self.at.pool.static_tensors()
        pool = device.new_pool()
        self.graphs: dict[int, CapturedCallable] = {}
        for size in reversed(SIZES):
            dummy = dummy_uniform_batch(mode, self.at, batch_size=size, num_tokens_per_req=per_req)
            batch = pad_batch(dummy, storage=self.buffers)
            self.graphs[size] = capture(
                lambda batch=batch: self.model.forward(batch),
                (),
                strategy="full",
                pool=pool,
                static_tensors=static,
            )

    def step(self, chosen: list[Req]) -> ForwardBatch:
        speculative = SpeculativeInput(num_tokens_per_req=self.per_req)
        return self.at.forward(
            schedule(
                self.mode,
                chosen,
                [self.per_req] * len(chosen),
                self.at.allocator,
                self.at.table,
                speculative=None if self.mode is ForwardMode.DECODE else speculative,
            )
        )

    def replay(self, batch: ForwardBatch) -> torch.Tensor:
        size = next(size for size in SIZES if size >= batch.batch_size)
        padded = pad_batch(batch, batch_size=size, storage=self.buffers)
        return cut_requests(padded, self.graphs[size]())


@pytest.mark.parametrize(
    ("mode", "per_req"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, BLOCK_SIZE)]
)
def test_replays_give_what_each_request_wrote(
    graph_device: GraphDevice, mode: ForwardMode, per_req: int
) -> None:
    """Large and small batches in turn; scratch is poisoned, so a padded row that leaked would show."""
    with torch.no_grad():
        server = Server(graph_device, mode, per_req)
        for chosen in ([0, 1, 2, 3, 4, 5], [2], [5, 0, 3], [1, 4], [3, 2, 1, 0]):
            server.at.pool.poison_scratch()
            reqs = [server.reqs[index] for index in chosen]
            batch = server.step(reqs)
            found = server.replay(batch)
            expected = [2.0 * sum(req.token_ids[: req.num_computed_tokens + per_req]) for req in reqs]
            assert found.tolist() == expected
            for req in reqs:
                req.num_computed_tokens += 1
        server.at.pool.check_addresses()


def test_requests_that_ended_do_not_reach_the_next_ones(graph_device: GraphDevice) -> None:
    """Slots and rows are handed on while graphs keep their addresses."""
    with torch.no_grad():
        server = Server(graph_device, ForwardMode.DECODE, 1)
        server.replay(server.step(server.reqs))
        for req in server.reqs[:4]:
            release(req, server.at.allocator, server.at.table)
        new = Req.of_prompt("new", [5, 6, 7, 8])
        batch = schedule(ForwardMode.EXTEND, [new], [3], server.at.allocator, server.at.table)
        server.model.forward(server.at.forward(batch))
        new.num_computed_tokens = 3
        assert server.replay(server.step([new])).tolist() == [2.0 * 26]
