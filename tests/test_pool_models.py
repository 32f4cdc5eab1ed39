"""Models of pools reserve what allocators do: CUDA's by hand and on a GPU, the emulated arena's side by side."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from sgl_piecewise.runtime.capture.cuda_device import CudaDevice
from sgl_piecewise.runtime.capture.cuda_pool_model import CudaPoolModel
from sgl_piecewise.runtime.capture.emulated.device import EmulatedDevice

MIB = 1 << 20


def cuda_pool() -> CudaPoolModel:
    return CudaPoolModel(edits_graphs=True)


@pytest.mark.parametrize(
    ("num_bytes", "segment_mib"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (96 * MIB, 96),
    ],
)
def test_a_first_allocation_takes_a_segment_of_its_class(num_bytes: int, segment_mib: int) -> None:
    pool = cuda_pool()
    pool.allocate(num_bytes)
    assert pool.segment_bytes == (segment_mib * MIB,)


def test_small_blocks_share_a_segment_down_to_the_last_512_bytes() -> None:
    pool = cuda_pool()
    for _ in range(4096):
        pool.allocate(1)
    assert pool.segment_bytes == (2 * MIB,)
    pool.allocate(512)
    assert pool.segment_bytes == (2 * MIB, 2 * MIB)


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left() -> None:
    pool = cuda_pool()
    first = pool.allocate(9 * MIB)
    pool.allocate(9 * MIB)  # 2 MiB of the segment are left.
    pool.allocate(3 * MIB // 2)  # Takes them whole.
    pool.allocate(2 * MIB)
    assert pool.segment_bytes == (20 * MIB, 20 * MIB)
    pool.free(first)
    pool.allocate(8 * MIB)  # The free block that fits best, whole: 1 MiB is not worth a split.
    pool.allocate(3 * MIB // 2)
    assert pool.segment_bytes == (20 * MIB, 20 * MIB)


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    pool = cuda_pool()
    large, small = pool.allocate(48 * MIB), pool.allocate(24 * MIB)
    pool.free(large)
    pool.free(small)
    pool.allocate(20 * MIB)
    pool.allocate(48 * MIB)
    assert pool.reserved_bytes == 72 * MIB


def test_free_neighbours_join_and_segments_do_not() -> None:
    pool = cuda_pool()
    parts = [pool.allocate(5 * MIB) for _ in range(4)]
    for part in parts:
        pool.free(part)
    pool.allocate(20 * MIB)
    assert pool.segment_bytes == (20 * MIB,)
    own = [pool.allocate(16 * MIB), pool.allocate(16 * MIB)]
    for block in own:
        pool.free(block)
    pool.allocate(32 * MIB)
    assert pool.segment_bytes == (20 * MIB, 16 * MIB, 16 * MIB, 32 * MIB)


def test_small_blocks_never_lie_in_large_segments() -> None:
    pool = cuda_pool()
    pool.free(pool.allocate(16 * MIB))
    pool.allocate(4)
    assert pool.segment_bytes == (16 * MIB, 2 * MIB)


def test_of_free_blocks_of_one_size_the_newest_segment_serves() -> None:
    """It lies lowest: what is cut from it leaves the older ones whole."""
    pool = cuda_pool()
    blocks = [pool.allocate(16 * MIB) for _ in range(3)]
    for block in blocks:
        pool.free(block)
    parts = [pool.allocate(9 * MIB), pool.allocate(5 * MIB)]  # Both from the newest.
    whole = [pool.allocate(16 * MIB), pool.allocate(16 * MIB)]
    assert pool.reserved_bytes == 48 * MIB
    pool.free(whole[0])
    pool.free(parts[0])
    pool.allocate(16 * MIB)
    assert pool.reserved_bytes == 48 * MIB


@pytest.mark.parametrize("seed", range(5))
def test_the_emulated_pool_reserves_what_its_model_says(seed: int) -> None:
    device = EmulatedDevice()
    pool, model = device.new_pool(), device.new_pool_model()
    numbers = random.Random(seed)
    live: list[tuple[torch.UntypedStorage, int]] = []
    for _ in range(300):
        if live and numbers.random() < 0.5:
            storage, block = live.pop(numbers.randrange(len(live)))
            del storage
            model.free(block)
        else:
            num_bytes = numbers.choice([1, 512, 700, 4096, 9000])
            pool.arena.drain()
            live.append((pool.arena.allocate(num_bytes, stream=0), model.allocate(num_bytes)))
        assert model.reserved_bytes == pool.memory().reserved_bytes


def any_size(numbers: random.Random) -> int:
    """Draws from all classes."""
    return int(2 ** numbers.uniform(4, 25))


def one_of_few(numbers: random.Random) -> int:
    """Draws so that free blocks are often of one size, and where they lie decides."""
    return numbers.choice([1, 7, 8, 14, 16, 24, 28, 32, 48]) * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("draw", [any_size, one_of_few])
@pytest.mark.parametrize("seed", range(3))
def test_the_cuda_pool_reserves_what_its_model_says(seed: int, draw: Callable[[random.Random], int]) -> None:
    """Random allocations, freed in any order, in a real pool."""
    device = CudaDevice()
    pool, model = device.new_pool(), device.new_pool_model()
    numbers = random.Random(seed)
    live: list[tuple[torch.Tensor, int]] = []
    with pool.capture_scope():
        for _ in range(300):
            if live and numbers.random() < 0.5:
                tensor, block = live.pop(numbers.randrange(len(live)))
                del tensor
                model.free(block)
            else:
                num_bytes = draw(numbers)
                live.append((pool.allocate(num_bytes), model.allocate(num_bytes)))
        assert model.reserved_bytes == pool.memory().reserved_bytes
        live.clear()
