"""Real-token counts: LOCAL derived from GLOBAL, shares that add up, layouts that are not divided twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving_support import Mix, mixes, scheduled, world

from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.padding import pad_batch, padded_num_tokens
from sgl_piecewise.runtime.batch.real_tokens import TokenLayout, TokenShard
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.entry import capture
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.kernels.experts import real_rows

EXTENDS = [ForwardMode.EXTEND, ForwardMode.MIXED]


@given(mixes(EXTENDS), st.integers(1, 8), st.integers(0, 20))
def test_shares_of_all_ranks_are_the_real_rows(mix: Mix, num_ranks: int, more: int) -> None:
    at = world()
    batch = at.forward(scheduled(mix, at))
    padded = pad_batch(batch, num_tokens=padded_num_tokens(batch.num_tokens + more, num_ranks))
    masks = []
    for rank in range(num_ranks):
        shard = TokenShard(rank=rank, num_ranks=num_ranks)
        count = shard.local_real_tokens(padded.padding.num_real_tokens, padded.num_tokens)
        assert (count.dtype, count.shape) == (torch.int32, ())
        assert int(count) == shard.local_real_tokens_cpu(batch.num_tokens, padded.num_tokens)
        masks.append(real_rows(count, shard.num_local_rows(padded.num_tokens)).squeeze(1))
    expected = torch.arange(padded.num_tokens) < batch.num_tokens
    assert torch.equal(torch.cat(masks), expected)


def test_rows_that_are_rank_local_already_are_not_divided_again() -> None:
    shard = TokenShard(rank=1, num_ranks=4, layout=TokenLayout.RANK_LOCAL)
    count = torch.tensor(5, dtype=torch.int32)
    local = shard.local_real_tokens(count, 8)
    count.zero_()
    assert int(local) == shard.local_real_tokens_cpu(5, 8) == 5
    assert shard.num_local_rows(8) == 8


def test_bad_shares_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank 4 is not one of 4"):
        TokenShard(rank=4, num_ranks=4)
    with pytest.raises(ConfigError, match="7 rows do not divide among 4"):
        TokenShard(rank=0, num_ranks=4).local_real_tokens_cpu(5, 7)


def test_a_replay_derives_the_share_again(graph_device: GraphDevice) -> None:
    """The count of the batch that was captured must not stay in the graph."""
    shard = TokenShard(rank=1, num_ranks=2)

    def forward(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        mask = real_rows(shard.local_real_tokens(count, 8), 4).squeeze(1)
        return x.masked_fill(~mask, 0)

    device = graph_device.torch_device
    x = torch.ones(4, device=device)
    captured = capture(forward, (x, torch.tensor(8, dtype=torch.int32, device=device)), device=graph_device)
    for count in (8, 3, 5, 6):
        result = captured(x, torch.tensor(count, dtype=torch.int32, device=device))
        assert result.sum().item() == max(0, count - 4)
