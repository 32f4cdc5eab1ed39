"""Batches that stand in for real ones while graphs are captured.

Every row points at scratch: the scratch row of the request table, the scratch slot of every
sub-pool. So a capture, also one that is made again later, cannot touch a request's tokens.

Shapes: `T` tokens, `B` requests.
"""

from __future__ import annotations

import torch

from ..errors import BatchError
from ..kv.req_to_token import SCRATCH_ROW
from ..kv.slots import SCRATCH_SLOT, PhysicalSlots
from .fields import ExtendFields, PaddingFields
from .forward_batch import BatchRunner, ForwardBatch
from .forward_mode import ForwardMode, NewTokens
from .positions import clamp_position, compute_position
from .sampling import NO_TOP_K, BatchSampling
from .schedule_batch import DllmBlocks, SpeculativeInput


def dummy_extend_batch(
    forward_mode: ForwardMode, runner: BatchRunner, *, num_tokens: int, max_context: int
) -> ForwardBatch:
    """Returns a batch of a ragged mode, in requests no longer than the context allows.

    Args:
        forward_mode: A ragged mode.
        runner: Whose graphs are captured.
        num_tokens: The capture size; it may be more than one request can have.
        max_context: Tokens that a request may have.

    Raises:
        BatchError: The mode is not ragged.
    """
    if forward_mode.properties.new_tokens is not NewTokens.RAGGED:
        raise BatchError(f"forward_mode: {forward_mode.name} is not ragged; use dummy_uniform_batch.")
    lens = [max_context] * (num_tokens // max_context)
    if num_tokens % max_context:
        lens.append(num_tokens % max_context)
    return _dummy(forward_mode, runner, lens, None)


def dummy_uniform_batch(
    forward_mode: ForwardMode, runner: BatchRunner, *, batch_size: int, num_tokens_per_req: int = 1
) -> ForwardBatch:
    """Returns a batch of a mode with equally many tokens per request.

    Args:
        forward_mode: Such a mode.
        runner: Whose graphs are captured.
        batch_size: The capture size.
        num_tokens_per_req: Rows of every request; 1 in DECODE.

    Raises:
        BatchError: The mode is not uniform, or DECODE with another number than 1.
    """
    new_tokens = forward_mode.properties.new_tokens
    if new_tokens not in (NewTokens.ONE, NewTokens.FIXED):
        raise BatchError(f"forward_mode: {forward_mode.name} is not uniform; use dummy_extend_batch.")
    if new_tokens is NewTokens.ONE and num_tokens_per_req != 1:
        raise BatchError(f"num_tokens_per_req is {num_tokens_per_req}; {forward_mode.name} has 1.")
    return _dummy(forward_mode, runner, [num_tokens_per_req] * batch_size, num_tokens_per_req)


def _dummy(
    forward_mode: ForwardMode, runner: BatchRunner, lens: list[int], per_req: int | None
) -> ForwardBatch:
    device, num_tokens, batch_size = runner.device, sum(lens), len(lens)
    seq_lens_cpu = torch.tensor(lens, dtype=torch.int64)
    seq_lens = seq_lens_cpu.to(device, copy=True)
    scratch = torch.full((num_tokens,), SCRATCH_SLOT, dtype=torch.int64, device=device)
    extend_lens = seq_lens.to(torch.int32)
    positions, start_loc = compute_position(
        torch.zeros_like(extend_lens), extend_lens, num_tokens, runner.start_loc_encoding
    )
    extend = ExtendFields(
        extend_seq_lens=extend_lens,
        extend_prefix_lens=torch.zeros_like(extend_lens),
        extend_start_loc=start_loc,
        extend_num_tokens=num_tokens,
        extend_seq_lens_cpu=tuple(lens),
        extend_prefix_lens_cpu=(0,) * batch_size,
        start_loc_encoding=runner.start_loc_encoding,
    )
    is_extend = forward_mode.is_extend(include_draft_extend_v2=True)
    is_fixed = forward_mode.properties.new_tokens is NewTokens.FIXED
    dllm = None
    if forward_mode.is_dllm_extend() and per_req is not None:
        dllm = DllmBlocks(block_size=per_req, block_offsets=(0,) * batch_size)
    return ForwardBatch(
        forward_mode=forward_mode,
        batch_size=batch_size,
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        req_pool_indices=torch.full((batch_size,), SCRATCH_ROW, dtype=torch.int64, device=device),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens_cpu,
        write_slots={pool: PhysicalSlots(pool, scratch) for pool in runner.kv_translator.pools},
        positions=positions if is_extend else clamp_position(seq_lens),
        seq_lens_sum=num_tokens,
        max_seq_len=max(lens),
        num_tokens_per_req=per_req,
        capture_hidden_mode=runner.capture_hidden_mode,
        padding=PaddingFields(
            num_real_tokens=torch.tensor(num_tokens, dtype=torch.int32, device=device),
            num_real_tokens_cpu=num_tokens,
        ),
        sampling=BatchSampling(
            is_all_greedy=True,
            temperatures=torch.zeros(batch_size, device=device),
            top_ks=torch.full((batch_size,), NO_TOP_K, dtype=torch.int32, device=device),
            top_ps=torch.ones(batch_size, device=device),
            seeds=torch.zeros(batch_size, dtype=torch.int64, device=device),
        ),
        extend=extend if is_extend else None,
        speculative=(
            SpeculativeInput(num_tokens_per_req=per_req) if is_fixed and per_req and dllm is None else None
        ),
        dllm=dllm,
    )
