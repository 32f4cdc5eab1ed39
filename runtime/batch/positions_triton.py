"""Positions in Triton: one kernel where torch needs six. Imported only where Triton is used.

The torch versions in `runtime/batch/positions.py` say what the results are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .positions import StartLocEncoding

_BLOCK = 128


def clamp_position_triton(seq_lens: torch.Tensor, num_tokens_per_req: int = 1) -> torch.Tensor:
    """`clamp_position` in Triton."""
    num_tokens = seq_lens.shape[0] * num_tokens_per_req
    positions = torch.empty(num_tokens, dtype=torch.int64, device=seq_lens.device)
    if num_tokens:
        grid = (triton.cdiv(num_tokens, _BLOCK),)
        _clamp_position_kernel[grid](seq_lens, positions, num_tokens, num_tokens_per_req, BLOCK=_BLOCK)
    return positions


@triton.jit
def _clamp_position_kernel(
    seq_lens: tl.tensor,
    positions: tl.tensor,
    num_tokens: tl.tensor,
    num_tokens_per_req: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    seq_len = tl.load(seq_lens + token // num_tokens_per_req, mask=is_token, other=0)
    position = seq_len - num_tokens_per_req + token % num_tokens_per_req
    tl.store(positions + token, tl.maximum(position, 0), mask=is_token)


def compute_position_triton(
    prefix_lens: torch.Tensor, extend_lens: torch.Tensor, num_tokens: int, encoding: StartLocEncoding
) -> tuple[torch.Tensor, torch.Tensor]:
    """`compute_position` in Triton."""
    num_requests = extend_lens.shape[0]
    positions = torch.empty(num_tokens, dtype=torch.int64, device=extend_lens.device)
    start_loc = torch.empty(num_requests, dtype=torch.int32, device=extend_lens.device)
    if num_requests:
        _compute_position_kernel[(num_requests,)](
            prefix_lens,
            extend_lens,
            positions,
            start_loc,
            HAS_KV_OFFSET=encoding is StartLocEncoding.KV_OFFSET,
            BLOCK=_BLOCK,
        )
    return positions, start_loc


@triton.jit
def _compute_position_kernel(
    prefix_lens: tl.tensor,
    extend_lens: tl.tensor,
    positions: tl.tensor,
    start_loc: tl.tensor,
    HAS_KV_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per request: sums what stands before it, then writes its own tokens."""
    request = tl.program_id(0)
    tokens_before = tl.zeros([BLOCK], dtype=tl.int32)
    kv_before = tl.zeros([BLOCK], dtype=tl.int32)
    # A range over a run-time bound does not run in Triton 3.6's interpreter with numpy 2.4.
    begin = request * 0
    while begin < request:
        other = begin + tl.arange(0, BLOCK)
        is_before = other < request
        extend_len = tl.load(extend_lens + other, mask=is_before, other=0).to(tl.int32)
        tokens_before += extend_len
        if HAS_KV_OFFSET:
            kv_before += extend_len + tl.load(prefix_lens + other, mask=is_before, other=0).to(tl.int32)
        begin += BLOCK
    token_start = tl.sum(tokens_before, 0)
    if HAS_KV_OFFSET:
        tl.store(start_loc + request, tl.sum(kv_before, 0))
    else:
        tl.store(start_loc + request, token_start)
    prefix_len = tl.load(prefix_lens + request).to(tl.int64)
    num_new = tl.load(extend_lens + request)
    begin = request * 0
    while begin < num_new:
        step = begin + tl.arange(0, BLOCK)
        tl.store(positions + token_start + step, prefix_len + step, mask=step < num_new)
        begin += BLOCK
