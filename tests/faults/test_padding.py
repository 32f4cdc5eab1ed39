"""Padding: rows past the real ones must be harmless wherever they go."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from contract.support import assert_equal, ramp

from sgl_piecewise.runtime.capture.captured import CapturedCallable
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.mark import eager_on_graph

SIZES = [4, 8]


@eager_on_graph
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def test_row_013_padded_rows_do_not_reach_real_rows(graph_device: GraphDevice) -> None:
    """sglang#35588: padded rows propagated; here they are NaN, and real rows must stay finite."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return double(x + 1).cumsum(0) * 0.5

    captured = capture(
        forward,
        (ramp(graph_device, 8, 3),),
        capture_sizes=SIZES,
        pad_values={"x": math.nan},
        device=graph_device,
    )
    for real in range(1, 9):
        x = ramp(graph_device, real, 3, start=float(real))
        assert_equal(captured(x), forward(x))


def test_row_014_capture_and_replay_agree_on_the_real_count(graph_device: GraphDevice) -> None:
    """sglang#22404: two code paths computed the non-padded count; ours is the extent of the inputs."""
    counts: list[tuple[int, int]] = []

    @eager_on_graph
    def look(t: torch.Tensor) -> torch.Tensor:
        counts.append((t.shape[0], int((t != -1).sum())))
        return t * 1

    def forward(x: torch.Tensor) -> torch.Tensor:
        return look(x)

    captured = capture(
        forward, (ramp(graph_device, 8),), capture_sizes=SIZES, pad_values={"x": -1}, device=graph_device
    )
    counts.clear()
    for real in range(1, 9):
        assert captured(ramp(graph_device, real)).shape[0] == real
    assert counts == [(captured.padded_size(real), real) for real in range(1, 9)]


def _mixture(device: GraphDevice) -> tuple[CapturedCallable, list[torch.Tensor]]:
    touched: list[torch.Tensor] = []

    @eager_on_graph
    def experts(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        touched.append(chosen[chosen >= 0].unique())
        return x * (chosen + 1).unsqueeze(-1)

    def forward(x: torch.Tensor, chosen: torch.Tensor, num_token_non_padded: torch.Tensor) -> torch.Tensor:
        is_real = torch.arange(x.shape[0], device=x.device) < num_token_non_padded
        routed = experts(x, chosen.masked_fill(~is_real, -1))
        return routed.masked_fill(~is_real.unsqueeze(-1), 0.0).sum(0)

    count = torch.tensor(8, device=device.torch_device)
    captured = capture(
        forward,
        (ramp(device, 8, 2), ramp(device, 8, start=0.0, dtype=torch.int64), count),
        capture_sizes=SIZES,
        pad_values={"x": math.nan, "chosen": 7},
        device=device,
    )
    return captured, touched


def test_row_015_padded_tokens_are_zero_after_the_experts_merge(graph_device: GraphDevice) -> None:
    """sglang#30895: the router was not told the live count, and pad rows entered the collective."""
    captured, _ = _mixture(graph_device)
    for real in (8, 5, 3, 1):
        x, chosen = (
            ramp(graph_device, real, 2),
            torch.ones(real, dtype=torch.int64, device=graph_device.torch_device),
        )
        count = torch.tensor(real, device=graph_device.torch_device)
        assert_equal(captured(x, chosen, count), (x * 2).sum(0))


def test_row_016_padded_tokens_touch_no_expert(graph_device: GraphDevice) -> None:
    """sglang#25852: a batch of 5 padded to 8 loaded experts for rows that do not exist."""
    captured, touched = _mixture(graph_device)
    touched.clear()
    chosen = torch.tensor([1, 1, 2, 2, 1], device=graph_device.torch_device)
    captured(ramp(graph_device, 5, 2), chosen, torch.tensor(5, device=graph_device.torch_device))
    assert [found.tolist() for found in touched] == [[1, 2]]


def test_row_017_both_kv_pools_change_only_where_they_should(graph_device: GraphDevice) -> None:
    """sglang#24743: a second slot buffer was not cleared on padding and wrote live KV."""
    full, window = (torch.zeros(16, 2, device=graph_device.torch_device) for _ in range(2))

    def forward(x: torch.Tensor, slots: torch.Tensor, window_slots: torch.Tensor) -> torch.Tensor:
        full.index_copy_(0, slots, x)
        window.index_copy_(0, window_slots, x + 1)
        return double(x)

    scratch = torch.zeros(8, dtype=torch.int64, device=graph_device.torch_device)
    captured = capture(
        forward,
        (ramp(graph_device, 8, 2), scratch, scratch),
        capture_sizes=SIZES,
        static_tensors={"full": full, "window": window},
        device=graph_device,
    )
    full.zero_()
    window.zero_()
    for real, first in ((8, 1), (3, 9), (1, 13)):
        before = full.clone(), window.clone()
        x = ramp(graph_device, real, 2, start=float(first))
        slots = torch.arange(first, first + real, device=graph_device.torch_device) % 15 + 1
        captured(x, slots, slots.flip(0))
        expected = before[0].index_copy(0, slots, x), before[1].index_copy(0, slots.flip(0), x + 1)
        # Slot 0 is the scratch slot that padding writes to.
        assert_equal((full[1:], window[1:]), (expected[0][1:], expected[1][1:]))


def test_row_018_body_takes_the_token_count_from_the_slots(graph_device: GraphDevice) -> None:
    """vllm#13418: a kernel took the count from the padded key and not from the slot mapping."""
    kv, live = torch.zeros(16, 2, device=graph_device.torch_device), {}

    @eager_on_graph
    def write(k: torch.Tensor) -> None:
        slots = live["slots"]
        kv.index_copy_(0, slots, k[: slots.numel()])

    def forward(k: torch.Tensor) -> torch.Tensor:
        write(k + 1)
        return k * 2

    live["slots"] = torch.zeros(1, dtype=torch.int64, device=graph_device.torch_device)
    captured = capture(forward, (ramp(graph_device, 8, 2),), capture_sizes=SIZES, device=graph_device)
    kv.zero_()
    live["slots"] = torch.tensor([3, 5, 9], device=graph_device.torch_device)
    k = ramp(graph_device, 3, 2)
    assert_equal(captured(k), k * 2)
    expected = torch.zeros_like(kv).index_copy(0, live["slots"], k + 1)
    assert_equal(kv, expected)


@dataclasses.dataclass
class Batch:
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    hidden: torch.Tensor
    mask: torch.Tensor


PAD_VALUES = {
    "batch.input_ids": 0,
    "batch.positions": 0,
    "batch.req_pool_indices": -1,
    "batch.hidden": 0.5,
    "batch.mask": False,
}


def _batch(device: GraphDevice, size: int, start: int) -> Batch:
    ids = ramp(device, size, start=float(start), dtype=torch.int64)
    return Batch(
        ids, ids + 1, ids.to(torch.int32), ids[:, None].float() + torch.zeros(3, device=ids.device), ids > 0
    )


def _tails(batch: Batch, real: int) -> Iterator[tuple[str, torch.Tensor]]:
    for field in dataclasses.fields(batch):
        yield f"batch.{field.name}", getattr(batch, field.name)[real:]


@pytest.mark.parametrize("order", [[8, 3], [8, 5, 1, 8, 2], [4, 3, 8, 7]])
def test_row_019_020_no_input_keeps_the_tail_of_a_larger_batch(
    graph_device: GraphDevice, order: list[int]
) -> None:
    """sglang#10892, sglang#22958: tails of positions and request indices were left from a larger batch."""
    seen: list[Batch] = []

    @eager_on_graph
    def look(batch: Batch) -> torch.Tensor:
        seen.append(Batch(*(getattr(batch, field.name).clone() for field in dataclasses.fields(batch))))
        return batch.hidden * 2

    captured = capture(
        lambda batch: look(batch) + 1,
        (_batch(graph_device, 8, 100),),
        capture_sizes=SIZES,
        pad_values=PAD_VALUES,
        device=graph_device,
    )
    for step, real in enumerate(order):
        seen.clear()
        batch = _batch(graph_device, real, 10 * step + 1)
        assert_equal(captured(batch), batch.hidden * 2 + 1)
        for name, tail in _tails(seen[0], real):
            assert_equal(tail, torch.full_like(tail, PAD_VALUES[name]))


def test_row_026_capturing_again_does_not_touch_live_kv(graph_device: GraphDevice) -> None:
    """ATOM#2267: a capture after waking used the slot mapping of the last batch and wrote live slots."""
    kv = torch.zeros(16, 2, device=graph_device.torch_device)

    def forward(k: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        kv.index_copy_(0, slots, k)
        return double(k)

    def build() -> CapturedCallable:
        scratch = torch.zeros(8, dtype=torch.int64, device=graph_device.torch_device)
        example = (ramp(graph_device, 8, 2), scratch)
        return capture(forward, example, capture_sizes=SIZES, static_tensors={"kv": kv}, device=graph_device)

    captured = build()
    slots = torch.tensor([4, 9, 11, 12, 13], device=graph_device.torch_device)
    captured(ramp(graph_device, 5, 2, start=50.0), slots)
    live = kv.clone()
    build()
    assert_equal(kv[1:], live[1:])
