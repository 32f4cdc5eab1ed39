"""Positions of new tokens, and where each request begins in the batch.

Each function has a torch version here and a Triton version in `runtime/batch/positions_triton.py`,
which give the same integers; CUDA tensors take Triton's one kernel where it is installed.
"""

from __future__ import annotations

import enum

import torch

from ..kernels.launching import has_triton


class StartLocEncoding(enum.Enum):
    """What ``extend_start_loc`` counts; the attention backend chooses."""

    TOKEN_OFFSET = "token_offset"
    """New tokens of the requests before."""
    KV_OFFSET = "kv_offset"
    """All tokens of the requests before, prefixes included."""


def clamp_position(seq_lens: torch.Tensor, num_tokens_per_req: int = 1) -> torch.Tensor:
    """Returns positions of each request's last tokens, none below 0.

    Args:
        seq_lens: Tokens of each request, the new ones included (int64[B]).
        num_tokens_per_req: New tokens of every request.

    Returns:
        Int64[B * num_tokens_per_req], fresh.
    """
    if seq_lens.is_cuda and has_triton():
        from .positions_triton import clamp_position_triton

        return clamp_position_triton(seq_lens, num_tokens_per_req)
    return clamp_position_torch(seq_lens, num_tokens_per_req)


def clamp_position_torch(seq_lens: torch.Tensor, num_tokens_per_req: int = 1) -> torch.Tensor:
    """`clamp_position` in torch."""
    if num_tokens_per_req == 1:
        return (seq_lens - 1).clamp_(min=0)
    steps = torch.arange(-num_tokens_per_req, 0, device=seq_lens.device)
    return (seq_lens.unsqueeze(1) + steps).clamp_(min=0).flatten()


def compute_position(
    prefix_lens: torch.Tensor, extend_lens: torch.Tensor, num_tokens: int, encoding: StartLocEncoding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns positions ``[prefix, prefix + new)`` of every request, and where each begins.

    Args:
        prefix_lens: Tokens before the new ones (int32[B]).
        extend_lens: New tokens (int32[B]).
        num_tokens: Sum of ``extend_lens``, known on the host so that nothing waits for the device.
        encoding: What the second result counts.

    Returns:
        Positions (int64[T]) and ``extend_start_loc`` (int32[B]), both fresh.
    """
    if extend_lens.is_cuda and has_triton():
        from .positions_triton import compute_position_triton

        return compute_position_triton(prefix_lens, extend_lens, num_tokens, encoding)
    return compute_position_torch(prefix_lens, extend_lens, num_tokens, encoding)


def compute_position_torch(
    prefix_lens: torch.Tensor, extend_lens: torch.Tensor, num_tokens: int, encoding: StartLocEncoding
) -> tuple[torch.Tensor, torch.Tensor]:
    """`compute_position` in torch."""
    token_starts = _exclusive_sum(extend_lens)
    shifts = (prefix_lens - token_starts).to(torch.int64)
    positions = torch.repeat_interleave(shifts, extend_lens.to(torch.int64), output_size=num_tokens)
    positions = positions + torch.arange(num_tokens, device=extend_lens.device)
    if encoding is StartLocEncoding.TOKEN_OFFSET:
        return positions, token_starts
    return positions, _exclusive_sum(prefix_lens + extend_lens)


def _exclusive_sum(lens: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(lens, 0, dtype=torch.int32) - lens


def block_positions(block_offsets: torch.Tensor, block_size: int) -> torch.Tensor:
    """Returns positions of blocks that are rewritten in place (DLLM_EXTEND).

    They are the block's own: where its tokens lie in the cache follows from the prefix, not from them.

    Args:
        block_offsets: Position of each block's first token (int64[B]).
        block_size: Tokens of every block.

    Returns:
        Int64[B * block_size], fresh.
    """
    steps = torch.arange(block_size, device=block_offsets.device)
    return (block_offsets.unsqueeze(1) + steps).flatten()
