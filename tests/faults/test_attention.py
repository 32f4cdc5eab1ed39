"""Attention wrappers: plans that were made for the captured batch only, or for the padded one."""

from __future__ import annotations

import pytest
import torch
from attention.support import Request, World, spec
from attention.test_captured import BATCHES, check_replays

from sgl_piecewise.runtime.attention.plan import NO_REQUEST, tile_table
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.capture.device import GraphDevice


def test_row_022_tiles_follow_the_real_rows() -> None:
    """vllm#36626: metadata was built from the padded count; padding gets tiles that only write zeros."""
    tiles = tile_table([5, 0], [5, 0], num_tokens=40, rows=16)
    assert [tile for tile in tiles if tile[0] != NO_REQUEST] == [(0, 0)]
    assert [tile for tile in tiles if tile[0] == NO_REQUEST] == [
        (NO_REQUEST, 5),
        (NO_REQUEST, 21),
        (NO_REQUEST, 37),
    ]


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_row_085_a_graph_of_a_short_batch_serves_long_and_ragged_ones(
    mode: ForwardMode, graph_device: GraphDevice
) -> None:
    """flashinfer#411, #639: the grid followed from the captured batch's lengths."""
    layer = spec(num_heads=2, num_kv_heads=1, head_dim=32)
    world = World(layer, backend="torch", device=graph_device.torch_device)
    with torch.no_grad():
        check_replays(world, "full", mode, graph_device)
    assert max(one.total for batch in BATCHES[mode] for one in batch) > 200 > Request(0, 0, 5).total
