"""KV pools: buffers at fixed addresses, found by layer, written through slots of the right sub-pool."""

from __future__ import annotations

import pytest
import torch
from serving_support import sub_pool, world

from sgl_piecewise.runtime.errors import ConfigError, MovedAddressError, PoolError
from sgl_piecewise.runtime.kv.pool import KVPool, SubPoolSpec
from sgl_piecewise.runtime.kv.slots import FULL_POOL, WINDOW_POOL, PhysicalSlots


def test_sub_pools_have_their_own_sizes_and_a_scratch_slot_on_top() -> None:
    pool = world(num_slots=32, num_window_slots=12).pool
    assert pool.k_buffer(0).shape == pool.v_buffer(2).shape == (33, 2, 4)
    assert pool.k_buffer(1).shape == pool.v_buffer(3).shape == (13, 2, 4)
    assert len({tensor.data_ptr() for tensor in pool.static_tensors().values()}) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_reach_the_slots_of_one_layer_alone(dtype: torch.dtype) -> None:
    """Whatever the dtype that the model computes in."""
    pool = world().pool
    rows = torch.arange(3 * 8, dtype=dtype).view(3, 2, 4) + 1
    pool.set_kv(1, PhysicalSlots(WINDOW_POOL, torch.tensor([5, 2, 9])), rows, -rows)
    assert torch.equal(pool.k_buffer(1)[[5, 2, 9]], rows.float())
    assert torch.equal(pool.v_buffer(1)[[5, 2, 9]], -rows.float())
    for name, tensor in pool.static_tensors().items():
        assert int(tensor.count_nonzero()) == (24 if name.startswith("window.layer1.") else 0), name
    pool.check_addresses()


def test_slots_of_another_sub_pool_are_refused() -> None:
    """They are in range there, and would hit other requests' tokens."""
    pool, rows = world().pool, torch.ones(1, 2, 4)
    with pytest.raises(PoolError, match="Layer 1 lies in sub-pool 'window', and the slots are of 'full'"):
        pool.set_kv(1, PhysicalSlots(FULL_POOL, torch.tensor([3])), rows, rows)
    with pytest.raises(PoolError, match="No sub-pool serves layer 7"):
        pool.set_kv(7, PhysicalSlots(FULL_POOL, torch.tensor([3])), rows, rows)
    assert not any(tensor.any() for tensor in pool.static_tensors().values())


def test_a_buffer_that_was_replaced_is_found() -> None:
    pool = world().pool
    buffers = pool.sub_pools[FULL_POOL]._buffers
    buffers[2] = (buffers[2][0].clone(), buffers[2][1])
    with pytest.raises(MovedAddressError, match=r"KV buffer full\.layer2\.k moved"):
        pool.check_addresses()


def test_what_cannot_be_a_pool() -> None:
    with pytest.raises(ConfigError, match="Two sub-pools are named 'full'"):
        KVPool([sub_pool(FULL_POOL, (0,), 4), sub_pool(FULL_POOL, (1,), 4)])
    with pytest.raises(ConfigError, match="Layer 1 stands in sub-pools 'full' and 'window'"):
        KVPool([sub_pool(FULL_POOL, (0, 1), 4), sub_pool(WINDOW_POOL, (1,), 4)])
    with pytest.raises(ConfigError, match="at least one sub-pool"):
        KVPool([])
    with pytest.raises(ConfigError, match="num_slots=0"):
        sub_pool(FULL_POOL, (0,), 0)
    with pytest.raises(ConfigError, match="each once"):
        sub_pool(FULL_POOL, (0, 0), 4)
    with pytest.raises(ConfigError, match="window must be at least 1"):
        sub_pool(FULL_POOL, (0,), 4, window=0)


def test_bytes_of_one_token() -> None:
    spec = SubPoolSpec(
        name=FULL_POOL, layer_ids=(0, 1, 2), num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
    )
    assert spec.bytes_per_token == 3 * 2 * 8 * 128 * 2


def test_poisoned_scratch_is_nan_and_nothing_else_is() -> None:
    pool = world().pool
    pool.poison_scratch()
    for tensor in pool.static_tensors().values():
        assert tensor[0].isnan().all()
        assert not tensor[1:].isnan().any()
