"""Taking rows and slots for a batch, and giving them back: ask first, then do, and a refusal takes nothing.

Which requests run is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import BatchError, PoolError
from ..kv.allocator import KVSlotAllocator
from ..kv.pool import KVPool
from ..kv.req_to_token import ReqToTokenPool
from ..kv.slots import VirtualSlots
from .forward_mode import CaptureHiddenMode, ForwardMode
from .request import Req
from .schedule_batch import DllmBlocks, ScheduleBatch, SpeculativeInput


def can_schedule(
    reqs: Sequence[Req], num_new_tokens: Sequence[int], allocator: KVSlotAllocator, table: ReqToTokenPool
) -> bool:
    """Whether rows and slots for these requests are free now; takes nothing.

    Says nothing of requests that are longer than the table's ``max_context``: they never fit.
    """
    seq_lens = [req.num_computed_tokens + new for req, new in zip(reqs, num_new_tokens, strict=True)]
    num_rows = sum(req.req_pool_index is None for req in reqs)
    return table.can_allocate(num_rows) and allocator.can_allocate(sum(_missing_slots(reqs, seq_lens, table)))


def schedule(
    forward_mode: ForwardMode,
    reqs: Sequence[Req],
    num_new_tokens: Sequence[int],
    allocator: KVSlotAllocator,
    table: ReqToTokenPool,
    *,
    input_ids: torch.Tensor | None = None,
    speculative: SpeculativeInput | None = None,
    dllm: DllmBlocks | None = None,
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
) -> ScheduleBatch:
    """Takes rows and slots for the new tokens of requests, and writes the decision down.

    Slots that a request has already are used again: those of drafts that were turned down, and of
    a block that is rewritten in place.

    Args:
        forward_mode: What the forward will be for.
        reqs: Its requests.
        num_new_tokens: New tokens of each.
        allocator: Where slots come from.
        table: Where rows come from, and which slots are entered into.
        input_ids: The new tokens (int64[T]); by default those that follow what is computed.
        speculative: As in `ScheduleBatch`.
        dllm: As in `ScheduleBatch`; new tokens begin at the blocks' offsets.
        capture_hidden_mode: As in `ScheduleBatch`.

    Raises:
        PoolError: Rows or slots are missing, or a request would outgrow the table; nothing was taken.
        BatchError: The lengths contradict each other, or a request has not so many tokens.
    """
    if len(num_new_tokens) != len(reqs):
        raise BatchError(f"num_new_tokens: {len(num_new_tokens)} entries for {len(reqs)} requests.")
    for index, num_new in enumerate(num_new_tokens):
        if num_new < 0:
            raise BatchError(
                f"num_new_tokens[{index}] is {num_new}; a forward computes no fewer tokens than none."
            )
    if dllm is not None and len(dllm.block_offsets) != len(reqs):
        raise BatchError(f"dllm.block_offsets: {len(dllm.block_offsets)} entries for {len(reqs)} requests.")
    prefix_lens = [req.num_computed_tokens for req in reqs] if dllm is None else list(dllm.block_offsets)
    seq_lens = [prefix_len + num_new for prefix_len, num_new in zip(prefix_lens, num_new_tokens, strict=True)]
    missing = _missing_slots(reqs, seq_lens, table)
    _check_room(reqs, seq_lens, missing, allocator, table)
    if input_ids is None:
        input_ids = _following_tokens(reqs, prefix_lens, seq_lens)
    has_extend = forward_mode.is_extend(include_draft_extend_v2=True)
    return_logprob = any(req.logprobs is not None for req in reqs)
    batch = ScheduleBatch(
        reqs=list(reqs),
        forward_mode=forward_mode,
        input_ids=input_ids,
        # Rows and slots are taken when all else is known to be right.
        req_pool_indices_cpu=torch.empty(len(reqs), dtype=torch.int64),
        seq_lens_cpu=_int64(seq_lens),
        out_cache_loc=VirtualSlots(torch.empty(sum(num_new_tokens), dtype=torch.int64)),
        extend_lens=list(num_new_tokens) if has_extend else None,
        prefix_lens=prefix_lens if has_extend else None,
        extend_logprob_start_lens=(
            [
                _logprob_start(req, prefix, seq)
                for req, prefix, seq in zip(reqs, prefix_lens, seq_lens, strict=True)
            ]
            if return_logprob and has_extend
            else None
        ),
        return_logprob=return_logprob,
        top_logprobs_nums=(
            [0 if req.logprobs is None else req.logprobs.top_num for req in reqs] if return_logprob else None
        ),
        speculative=speculative,
        dllm=dllm,
        capture_hidden_mode=capture_hidden_mode,
    )
    batch.check()
    _take(batch, prefix_lens, num_new_tokens, missing, allocator, table)
    return batch


def release(req: Req, allocator: KVSlotAllocator, table: ReqToTokenPool) -> None:
    """Gives back a request's row and slots; a request that waits has none."""
    if req.req_pool_index is None:
        return
    allocator.free(table.slots(req.req_pool_index))
    table.free(req.req_pool_index)
    req.req_pool_index = None
    req.num_computed_tokens = 0


def release_out_of_window(
    req: Req, pool: KVPool, allocator: KVSlotAllocator, table: ReqToTokenPool
) -> dict[str, int]:
    """Gives back a running request's slots in sliding-window sub-pools that no later token reads.

    Called between forwards, once ``num_computed_tokens`` is that of the last one.

    Returns:
        How many slots were given back, by sub-pool; empty where no sub-pool has a window.
    """
    released: dict[str, int] = {}
    for name, sub_pool in pool.sub_pools.items():
        window = sub_pool.spec.window
        if window is None or req.req_pool_index is None:
            continue
        # The next token reads itself and the window - 1 before it.
        num_unread = max(0, req.num_computed_tokens + 1 - window)
        released[name] = allocator.release(table.slots(req.req_pool_index, 0, num_unread), pool=name)
    return released


def _missing_slots(reqs: Sequence[Req], seq_lens: Sequence[int], table: ReqToTokenPool) -> list[int]:
    """How many slots each request lacks for that length; one that waits has none."""
    rows = [req.req_pool_index for req in reqs if req.req_pool_index is not None]
    held = iter(table.nums_tokens(rows).tolist())
    return [
        max(0, seq_len - (0 if req.req_pool_index is None else next(held)))
        for req, seq_len in zip(reqs, seq_lens, strict=True)
    ]


def _check_room(
    reqs: Sequence[Req],
    seq_lens: Sequence[int],
    missing: Sequence[int],
    allocator: KVSlotAllocator,
    table: ReqToTokenPool,
) -> None:
    """Raises before anything is taken, so that a refused batch leaves no trace."""
    for req, seq_len in zip(reqs, seq_lens, strict=True):
        if seq_len > table.max_context:
            raise PoolError(
                f"Request {req.request_id!r} would have {seq_len} tokens, and the pool allows max_context="
                f"{table.max_context}. Refuse or truncate it before it is scheduled."
            )
    num_rows, num_slots = sum(req.req_pool_index is None for req in reqs), sum(missing)
    if not table.can_allocate(num_rows) or not allocator.can_allocate(num_slots):
        raise PoolError(
            f"{num_rows} request rows and {num_slots} slots are needed; {table.num_free} rows and "
            f"{min(allocator.num_free(pool) for pool in allocator.pools)} slots are free. "
            "Ask can_schedule first, and let requests wait."
        )


def _following_tokens(
    reqs: Sequence[Req], prefix_lens: Sequence[int], seq_lens: Sequence[int]
) -> torch.Tensor:
    ids: list[int] = []
    for req, prefix_len, seq_len in zip(reqs, prefix_lens, seq_lens, strict=True):
        if seq_len > len(req.token_ids):
            raise BatchError(
                f"input_ids: request {req.request_id!r} has {len(req.token_ids)} tokens, and tokens "
                f"{prefix_len} to {seq_len - 1} are to be computed. Give input_ids for drafts and blocks."
            )
        ids += req.token_ids[prefix_len:seq_len]
    return _int64(ids)


def _int64(values: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _logprob_start(req: Req, prefix_len: int, seq_len: int) -> int:
    """Within the new tokens, the first whose successor is asked for; past the last where none is."""
    if req.logprobs is None or prefix_len >= req.num_prompt_tokens:
        return seq_len - prefix_len
    return min(max(req.logprobs.start_len - prefix_len, 0), seq_len - prefix_len)


def _take(
    batch: ScheduleBatch,
    prefix_lens: Sequence[int],
    num_new_tokens: Sequence[int],
    missing: Sequence[int],
    allocator: KVSlotAllocator,
    table: ReqToTokenPool,
) -> None:
    for req in batch.reqs:
        if req.req_pool_index is None:
            req.req_pool_index = table.allocate()
    rows = [req.req_pool_index for req in batch.reqs if req.req_pool_index is not None]
    table.append(rows, missing, allocator.allocate(sum(missing)))
    batch.req_pool_indices_cpu = _int64(rows)
    batch.out_cache_loc = table.gather(rows, prefix_lens, num_new_tokens)
