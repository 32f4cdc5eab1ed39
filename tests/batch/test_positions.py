"""Positions in torch and in Triton: right by a loop over requests, and equal to each other."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_piecewise.runtime.batch.positions import (
    StartLocEncoding,
    block_positions,
    clamp_position,
    clamp_position_torch,
    compute_position,
    compute_position_torch,
)

lens = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), max_size=5)
seq_lens = st.lists(st.integers(0, 2000), max_size=300)


def by_loop(pairs: list[tuple[int, int]], encoding: StartLocEncoding) -> tuple[list[int], list[int]]:
    positions = [position for prefix, new in pairs for position in range(prefix, prefix + new)]
    counted = [new if encoding is StartLocEncoding.TOKEN_OFFSET else prefix + new for prefix, new in pairs]
    return positions, [0, *itertools.accumulate(counted)][: len(pairs)]


def columns(pairs: list[tuple[int, int]], device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, int]:
    prefix = torch.tensor([pair[0] for pair in pairs], dtype=torch.int32, device=device)
    new = torch.tensor([pair[1] for pair in pairs], dtype=torch.int32, device=device)
    return prefix, new, sum(pair[1] for pair in pairs)


@given(lens, st.sampled_from(StartLocEncoding))
def test_extend_positions_follow_the_prefix(pairs: list[tuple[int, int]], encoding: StartLocEncoding) -> None:
    positions, start_loc = compute_position_torch(*columns(pairs), encoding)
    assert (positions.tolist(), start_loc.tolist()) == by_loop(pairs, encoding)
    assert (positions.dtype, start_loc.dtype) == (torch.int64, torch.int32)


@given(seq_lens, st.integers(1, 9))
def test_clamped_positions_are_the_last_ones(given_lens: list[int], per_req: int) -> None:
    found = clamp_position_torch(torch.tensor(given_lens, dtype=torch.int64), per_req)
    assert found.tolist() == [
        max(0, seq_len - per_req + step) for seq_len in given_lens for step in range(per_req)
    ]


def test_clamping_makes_a_new_tensor() -> None:
    """``seq_lens`` must not be moved in place."""
    given_lens = torch.tensor([3, 0, 7])
    clamp_position_torch(given_lens)
    assert given_lens.tolist() == [3, 0, 7]


def test_a_block_keeps_its_positions_however_often_it_is_rewritten() -> None:
    assert block_positions(torch.tensor([8, 0]), 4).tolist() == [8, 9, 10, 11, 0, 1, 2, 3]


triton_installed = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="Triton's interpreter is for machines that have Triton and no GPU; those have a test of their own",
)


@triton_installed
@settings(max_examples=15)
@given(lens, st.sampled_from(StartLocEncoding))
def test_triton_extend_positions_equal_torch(
    pairs: list[tuple[int, int]], encoding: StartLocEncoding
) -> None:
    from sgl_piecewise.runtime.batch.positions_triton import compute_position_triton

    found = compute_position_triton(*columns(pairs), encoding)
    for ours, reference in zip(found, compute_position_torch(*columns(pairs), encoding), strict=True):
        assert torch.equal(ours, reference)
        assert ours.dtype == reference.dtype


@triton_installed
@settings(max_examples=15)
@given(seq_lens, st.integers(1, 9))
def test_triton_clamped_positions_equal_torch(given_lens: list[int], per_req: int) -> None:
    from sgl_piecewise.runtime.batch.positions_triton import clamp_position_triton

    tensor = torch.tensor(given_lens, dtype=torch.int64)
    assert torch.equal(clamp_position_triton(tensor, per_req), clamp_position_torch(tensor, per_req))


@pytest.mark.gpu
@pytest.mark.parametrize("num_requests", [1, 3, 200])
def test_compiled_kernels_equal_torch(num_requests: int) -> None:
    """On a GPU the kernels are compiled, not interpreted; more requests than one block sums."""
    pairs = [(7 * n % 301, 1 + 13 * n % 300) for n in range(num_requests)]
    for encoding in StartLocEncoding:
        found = compute_position(*columns(pairs, "cuda"), encoding)
        for ours, reference in zip(found, compute_position_torch(*columns(pairs), encoding), strict=True):
            assert torch.equal(ours.cpu(), reference)
    given_lens = torch.tensor([prefix for prefix, _ in pairs])
    for per_req in (1, 4):
        assert torch.equal(
            clamp_position(given_lens.cuda(), per_req).cpu(), clamp_position_torch(given_lens, per_req)
        )
