"""Batches and KV slots: what padding, stale tails and dummies do to the requests that are real."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from serving_support import (
    BLOCK_SIZE,
    World,
    example_mix,
    scheduled,
    tensors_of,
    world,
)

from sgl_piecewise.runtime.batch.dummy import dummy_extend_batch, dummy_uniform_batch
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode, NewTokens
from sgl_piecewise.runtime.batch.padding import IdleShape, pad_batch
from sgl_piecewise.runtime.batch.positions import StartLocEncoding
from sgl_piecewise.runtime.batch.real_tokens import TokenShard
from sgl_piecewise.runtime.batch.static_buffers import StaticBatchBuffers
from sgl_piecewise.runtime.errors import BatchError, PoolError
from sgl_piecewise.runtime.kernels.experts import real_rows
from sgl_piecewise.runtime.kv.slots import FULL_POOL, WINDOW_POOL, PhysicalSlots

RAGGED = [mode for mode in ForwardMode if mode.properties.new_tokens is NewTokens.RAGGED]
UNIFORM = [mode for mode in ForwardMode if mode.properties.new_tokens in (NewTokens.ONE, NewTokens.FIXED)]
LAYERS = {0: FULL_POOL, 1: WINDOW_POOL}


def padded(at: World, mode: ForwardMode) -> ForwardBatch:
    batch = at.forward(scheduled(example_mix(mode), at))
    if batch.num_tokens_per_req is None:
        return pad_batch(batch, num_tokens=batch.num_tokens + 5, batch_size=batch.batch_size + 2)
    return pad_batch(batch, batch_size=batch.batch_size + 2)


def write_all(at: World, batch: ForwardBatch, value: float) -> None:
    rows = torch.full((batch.num_tokens, 2, 4), value)
    for layer_id, pool in LAYERS.items():
        at.pool.set_kv(layer_id, batch.write_slots[pool], rows, rows)


@pytest.mark.parametrize("mode", RAGGED)
def test_row_014_a_padded_batch_carries_the_count_of_the_batch_before(mode: ForwardMode) -> None:
    """sglang#22404: two code paths computed the non-padded count; here padding only hands it on."""
    at = world()
    batch = padded(at, mode)
    assert batch.padding.num_real_tokens_cpu == int(batch.padding.num_real_tokens) == batch.real.num_tokens
    assert batch.num_tokens > batch.real.num_tokens


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_row_015_016_padded_rows_choose_no_expert_on_any_rank(num_ranks: int) -> None:
    """sglang#30895, sglang#25852: the router was not told the live count; pad rows went to real experts."""
    at = world()
    batch = at.forward(scheduled(example_mix(ForwardMode.EXTEND), at))
    batch = pad_batch(batch, num_tokens=12)
    chosen = torch.arange(12) % 8
    touched: list[int] = []
    for rank in range(num_ranks):
        shard = TokenShard(rank=rank, num_ranks=num_ranks)
        num_rows = shard.num_local_rows(12)
        count = shard.local_real_tokens(batch.padding.num_real_tokens, 12)
        mine = chosen[rank * num_rows : (rank + 1) * num_rows]
        touched += mine[real_rows(count, num_rows).squeeze(1)].tolist()
    assert touched == list(range(7))


@pytest.mark.parametrize("mode", [*RAGGED, *UNIFORM])
def test_row_017_padding_writes_no_live_slot_of_any_sub_pool(mode: ForwardMode) -> None:
    """sglang#24743: the sliding window's slots were not cleared on padding and hit live KV."""
    at = world()
    batch = padded(at, mode)
    write_all(at, batch, 7.0)
    for layer_id, pool in LAYERS.items():
        written = at.pool.k_buffer(layer_id)[:, 0, 0].nonzero().flatten().tolist()
        assert written == sorted({0, *batch.real.write_slots[pool].ids.tolist()})


def test_row_018_write_takes_its_count_from_the_slots() -> None:
    """vllm#13418: the number of tokens came from the padded key, not from the slots."""
    at = world()
    slots = PhysicalSlots(FULL_POOL, torch.tensor([3, 4]))
    with pytest.raises(PoolError, match="2 slots for 4 keys and 4 values"):
        at.pool.set_kv(0, slots, torch.ones(4, 2, 4), torch.ones(4, 2, 4))
    assert not at.pool.k_buffer(0).any()


@pytest.mark.parametrize("mode", [*RAGGED, *UNIFORM])
def test_row_019_020_no_static_buffer_keeps_a_tail(mode: ForwardMode) -> None:
    """sglang#10892, sglang#22958: tails of positions and request rows stayed from a larger batch."""
    at = world()
    buffers = StaticBatchBuffers(
        max_batch_size=8, max_num_tokens=8 * BLOCK_SIZE, pools=at.kv_translator.pools, device=at.device
    )
    for tensor in buffers.static_tensors().values():
        tensor.fill_(1 << 20)  # Out of range for every index that it might be used as.
    batch = at.forward(scheduled(example_mix(mode), at))
    size = {"batch_size": 5}
    if batch.num_tokens_per_req is None:
        size["num_tokens"] = 14
    static = pad_batch(batch, storage=buffers, **size)  # type: ignore[arg-type]
    static.check()
    for path, tensor in tensors_of(dataclasses.replace(static, padding=batch.padding)).items():
        assert (tensor < 1 << 20).all(), path


@pytest.mark.parametrize("mode", [*RAGGED, *UNIFORM])
def test_row_021_sums_count_the_padded_requests(mode: ForwardMode) -> None:
    """sglang#1094: lengths and their sums were not adjusted for padded requests."""
    at = world()
    batch = padded(at, mode)
    assert batch.seq_lens_sum == int(batch.seq_lens.sum()) == int(batch.seq_lens_cpu.sum())
    if batch.extend is not None:
        assert batch.extend.extend_num_tokens == sum(batch.extend.extend_seq_lens_cpu)


@pytest.mark.parametrize("mode", RAGGED)
def test_row_022_attention_sees_real_tokens_where_rows_are_padded(mode: ForwardMode) -> None:
    """vllm#36626: attention metadata was built from the padded count."""
    batch = padded(world(), mode)
    assert batch.extend is not None
    assert batch.extend.extend_num_tokens == batch.real.num_tokens < batch.num_tokens


@pytest.mark.parametrize("encoding", StartLocEncoding)
@pytest.mark.parametrize("mode", RAGGED)
def test_row_023_padded_rows_belong_to_no_request(mode: ForwardMode, encoding: StartLocEncoding) -> None:
    """tokenspeed#969: pad rows counted as real in the offsets and changed other requests' state."""
    at = world()
    mix = dataclasses.replace(example_mix(mode), encoding=encoding)
    batch = pad_batch(at.forward(scheduled(mix, at)), num_tokens=16, batch_size=6)
    assert batch.extend is not None
    lens, starts = batch.extend.extend_seq_lens, batch.extend.extend_start_loc
    counted = lens if encoding is StartLocEncoding.TOKEN_OFFSET else batch.seq_lens
    state = torch.zeros(at.table.shape[0])
    token_starts = lens.cumsum(0) - lens
    for row, start, new in zip(batch.req_pool_indices, token_starts, lens, strict=True):
        state[row] += batch.input_ids[start : start + new].sum()
    assert torch.equal(starts.long(), counted.long().cumsum(0) - counted.long())
    assert (state[0], int(state.sum())) == (0, int(batch.real.input_ids.sum()))


def test_row_024_dummies_of_padding_are_disjoint_from_every_live_request() -> None:
    """TRT-LLM#13278: a padding dummy was the alias of a live request that was parked."""
    at = world(max_requests=3)
    batch = pad_batch(at.forward(scheduled(example_mix(ForwardMode.DECODE), at)), batch_size=8)
    assert not at.table.can_allocate()
    live = set(batch.real.req_pool_indices.tolist())
    assert live == {1, 2, 3}
    assert live.isdisjoint(batch.req_pool_indices[3:].tolist())
    for pool in at.kv_translator.pools:
        table = at.kv_translator.req_to_token(pool)
        assert not table[0].any()
        assert table[sorted(live)].count_nonzero() == batch.real.seq_lens_sum


def test_row_025_a_full_cache_does_not_keep_a_batch_from_being_padded() -> None:
    """TRT-LLM#16072: the dummy was allocated at the first padded step, which failed once the cache was full."""
    mix = example_mix(ForwardMode.DECODE)
    num_tokens = sum(mix.prefix_lens) + 3
    at = world(num_slots=num_tokens, num_window_slots=num_tokens, max_requests=3)
    batch = at.forward(scheduled(mix, at))
    assert not at.allocator.can_allocate(1)
    pad_batch(batch, batch_size=8).check()


@pytest.mark.parametrize("mode", [*RAGGED, *UNIFORM])
def test_row_026_capturing_again_touches_scratch_alone(mode: ForwardMode) -> None:
    """ATOM#2267: a capture after wake-up used the slots that the last batch had left."""
    at = world()
    live = at.forward(scheduled(example_mix(mode), at))
    write_all(at, live, 3.0)
    before = {name: tensor.clone() for name, tensor in at.pool.static_tensors().items()}
    tables = {name: tensor.clone() for name, tensor in at.kv_translator.static_tensors().items()}
    if mode in RAGGED:
        dummy = dummy_extend_batch(mode, at, num_tokens=40, max_context=16)
    else:
        per_req = 1 if mode is ForwardMode.DECODE else BLOCK_SIZE
        dummy = dummy_uniform_batch(mode, at, batch_size=4, num_tokens_per_req=per_req)
    write_all(at, dummy, 9.0)
    for name, tensor in at.pool.static_tensors().items():
        assert torch.equal(tensor[1:], before[name][1:]), name
    for name, tensor in at.kv_translator.static_tensors().items():
        assert torch.equal(tensor, tables[name]), name
    assert not dummy.req_pool_indices.any()


def test_row_027_a_buffer_without_the_rows_per_request_is_refused() -> None:
    """sglang#27338: a buffer lacked the factor that the eager path had, and neighbours were overwritten."""
    at = world()
    buffers = StaticBatchBuffers(
        max_batch_size=8, max_num_tokens=8, pools=at.kv_translator.pools, device=at.device
    )
    batch = at.forward(scheduled(example_mix(ForwardMode.TARGET_VERIFY), at))
    with pytest.raises(BatchError, match="input_ids: 32 rows, and the static buffer has 8"):
        pad_batch(batch, batch_size=8, storage=buffers)


def test_row_037_the_padded_extent_is_the_batchs_own() -> None:
    """sglang#30712: after a prefill the padded extent was read from the decode runner, where it was None."""
    at = world()
    extend = padded(at, ForwardMode.EXTEND)
    decode = pad_batch(at.forward(scheduled(example_mix(ForwardMode.DECODE), at)), batch_size=8)
    assert (extend.num_tokens, extend.batch_size) == (12, 5)
    assert (decode.num_tokens, decode.batch_size) == (8, 8)
    idle = at.forward(scheduled(example_mix(ForwardMode.IDLE), at))
    shape = IdleShape(forward_mode=ForwardMode.TARGET_VERIFY, num_tokens_per_req=BLOCK_SIZE)
    assert pad_batch(idle, batch_size=2, idle_as=shape).num_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 40, 64])
def test_row_038_a_dummy_of_many_tokens_has_several_requests(num_tokens: int) -> None:
    """sglang#30206: the dummy batch had one request, so sizes over the context length had no graph."""
    batch = dummy_extend_batch(ForwardMode.EXTEND, world(), num_tokens=num_tokens, max_context=16)
    assert batch.num_tokens == num_tokens
    assert batch.positions.max() < 16
    assert batch.extend is not None
    assert batch.batch_size == len(batch.extend.extend_seq_lens_cpu) == -(-num_tokens // 16)
    with pytest.raises(BatchError, match="DECODE is not ragged"):
        dummy_extend_batch(ForwardMode.DECODE, world(), num_tokens=num_tokens, max_context=16)
    with pytest.raises(BatchError, match="MIXED is not uniform"):
        dummy_uniform_batch(ForwardMode.MIXED, world(), batch_size=2)
    with pytest.raises(BatchError, match="DECODE has 1"):
        dummy_uniform_batch(ForwardMode.DECODE, world(), batch_size=2, num_tokens_per_req=2)
