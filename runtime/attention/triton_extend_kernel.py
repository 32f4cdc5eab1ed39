"""Triton kernel for many query tokens a request: a paged prefix, then the causal new tokens.

Programs take tiles of query rows from a table that the plan wrote, so a captured launch serves
every batch that fits its token and request counts. New keys and values are read where the layer
made them, the prefix through the page table. Imported lazily: importing it imports Triton.

Shapes: `B` requests, `T` query tokens, `H` query heads, `K` KV heads, `D` head size, `S` slots; in
the kernel `M` query rows of a tile, `N` KV positions of one step.
Source: the tiling is FlashAttention-2's (arXiv 2307.08691); online softmax is arXiv 1805.02867.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend_steps(
    acc_MD: tl.tensor,
    total_M: tl.tensor,
    maximum_M: tl.tensor,
    q_MD: tl.tensor,
    position_M: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    base: tl.tensor,
    page_row: tl.tensor,
    k_base: tl.tensor,
    v_base: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    d_D: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_PAGED: tl.constexpr,
    IS_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Online softmax over positions ``[begin, end)``: slots of a page row, or rows from ``base`` on.

    Without ``IS_MASKED`` every row sees every position and the range is a whole number of steps.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    for start in range(begin, end, BLOCK_N):
        n_N = start + tl.arange(0, BLOCK_N)
        is_n_N = n_N < end
        if IS_PAGED:
            if IS_MASKED:
                source_N = tl.load(page_row + n_N, mask=is_n_N, other=0).to(tl.int64)
            else:
                source_N = tl.load(page_row + n_N).to(tl.int64)
        else:
            source_N = (base + n_N).to(tl.int64)
        k_ptr_ND = k_base + source_N[:, None] * k_stride + d_D[None, :]
        v_ptr_ND = v_base + source_N[:, None] * v_stride + d_D[None, :]
        if IS_MASKED:
            kv_mask_ND = is_n_N[:, None] & (d_D[None, :] < HEAD_DIM)
            k_ND = tl.load(k_ptr_ND, mask=kv_mask_ND, other=0.0)
            v_ND = tl.load(v_ptr_ND, mask=kv_mask_ND, other=0.0)
        elif BLOCK_D != HEAD_DIM:
            k_ND = tl.load(k_ptr_ND, mask=d_D[None, :] < HEAD_DIM, other=0.0)
            v_ND = tl.load(v_ptr_ND, mask=d_D[None, :] < HEAD_DIM, other=0.0)
        else:
            k_ND = tl.load(k_ptr_ND)
            v_ND = tl.load(v_ptr_ND)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        if HAS_SOFT_CAP:
            capped_MN = 2.0 * tl.sigmoid(score_MN * (2.0 * scale / soft_cap)) - 1.0
            score_MN = capped_MN * (soft_cap * LOG2_E)
        else:
            score_MN = score_MN * (scale * LOG2_E)
        if IS_MASKED:
            is_seen_MN = is_n_N[None, :] & (n_N[None, :] <= position_M[:, None])
            if WINDOW > 0:
                is_seen_MN = is_seen_MN & (n_N[None, :] > position_M[:, None] - WINDOW)
            score_MN = tl.where(is_seen_MN, score_MN, float("-inf"))
        new_maximum_M = tl.maximum(maximum_M, tl.max(score_MN, 1))
        weight_MN = tl.exp2(score_MN - new_maximum_M[:, None])
        shrink_M = tl.exp2(maximum_M - new_maximum_M)
        total_M = total_M * shrink_M + tl.sum(weight_MN, 1)
        acc_MD = acc_MD * shrink_M[:, None]
        acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
        maximum_M = new_maximum_M
    return acc_MD, total_M, maximum_M


@triton.jit
def extend_kernel(
    q_THD: tl.tensor,
    k_TKD: tl.tensor,
    v_TKD: tl.tensor,
    k_SKD: tl.tensor,
    v_SKD: tl.tensor,
    out_THD: tl.tensor,
    page_table_RC: tl.tensor,
    rows_B: tl.tensor,
    seq_lens_B: tl.tensor,
    query_start_B: tl.tensor,
    tiles_X2: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_t: tl.tensor,
    v_stride_h: tl.tensor,
    k_stride_s: tl.tensor,
    k_pool_stride_h: tl.tensor,
    v_stride_s: tl.tensor,
    v_pool_stride_h: tl.tensor,
    page_stride_r: tl.tensor,
    num_tokens: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attends one tile of query rows of one head. Grid: (H, tiles).

    ``query_start_B`` is int32[B + 1]. A tile is (request, first row in the request), or (-1, token
    from which on up to M padded rows are set to zero).
    """
    head = tl.program_id(0)
    request = tl.load(tiles_X2 + 2 * tl.program_id(1))
    first_row = tl.load(tiles_X2 + 2 * tl.program_id(1) + 1)
    m_M = tl.arange(0, BLOCK_M)
    d_D = tl.arange(0, BLOCK_D)
    is_d_D = d_D < HEAD_DIM
    if request < 0:
        pad_M = first_row + m_M
        pad_ptr_MD = out_THD + (pad_M.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + d_D[None, :]
        zero_MD = tl.zeros([BLOCK_M, BLOCK_D], out_THD.dtype.element_ty)
        tl.store(pad_ptr_MD, zero_MD, mask=(pad_M < num_tokens)[:, None] & is_d_D[None, :])
    else:
        query_start = tl.load(query_start_B + request)
        query_len = tl.load(query_start_B + request + 1) - query_start
        seq_len = tl.load(seq_lens_B + request).to(tl.int32)
        prefix_len = seq_len - query_len
        page_row = page_table_RC + tl.load(rows_B + request).to(tl.int64) * page_stride_r
        kv_head = head // GROUP

        row_M = first_row + m_M
        token_M = (query_start + row_M).to(tl.int64)
        is_row_M = row_M < query_len
        tile_mask_MD = is_row_M[:, None] & is_d_D[None, :]
        position_M = prefix_len + row_M
        first_position = prefix_len + first_row
        end = tl.minimum(first_position + BLOCK_M, seq_len)
        q_ptr_MD = q_THD + token_M[:, None] * q_stride_t + head * q_stride_h + d_D[None, :]
        q_MD = tl.load(q_ptr_MD, mask=tile_mask_MD, other=0.0)

        maximum_M = tl.full([BLOCK_M], -1.0e30, tl.float32)
        total_M = tl.zeros([BLOCK_M], tl.float32)
        acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        k_pool = k_SKD + kv_head * k_pool_stride_h
        v_pool = v_SKD + kv_head * v_pool_stride_h
        k_new = k_TKD + kv_head * k_stride_h
        v_new = v_TKD + kv_head * v_stride_h
        base = query_start - prefix_len  # the row of position n is base + n

        # With a window all steps are masked; else only those at the end of the prefix and on the diagonal.
        first = 0
        masked_prefix = 0
        masked_new = first_position
        if WINDOW > 0:
            first = tl.maximum(first_position - WINDOW + 1, 0)
            masked_prefix = first
            masked_new = tl.maximum(first, prefix_len)
        else:
            masked_prefix = (prefix_len // BLOCK_N) * BLOCK_N
            acc_MD, total_M, maximum_M = _attend_steps(
                acc_MD, total_M, maximum_M, q_MD, position_M, 0, masked_prefix, base, page_row,
                k_pool, v_pool, k_stride_s, v_stride_s, scale, soft_cap, d_D,
                HEAD_DIM, BLOCK_D, BLOCK_N, True, False, WINDOW, HAS_SOFT_CAP, PRECISION,
            )  # fmt: skip
        acc_MD, total_M, maximum_M = _attend_steps(
            acc_MD, total_M, maximum_M, q_MD, position_M, masked_prefix, prefix_len, base, page_row,
            k_pool, v_pool, k_stride_s, v_stride_s, scale, soft_cap, d_D,
            HEAD_DIM, BLOCK_D, BLOCK_N, True, True, WINDOW, HAS_SOFT_CAP, PRECISION,
        )  # fmt: skip
        if WINDOW == 0:
            acc_MD, total_M, maximum_M = _attend_steps(
                acc_MD, total_M, maximum_M, q_MD, position_M, prefix_len, first_position, base, page_row,
                k_new, v_new, k_stride_t, v_stride_t, scale, soft_cap, d_D,
                HEAD_DIM, BLOCK_D, BLOCK_N, False, False, WINDOW, HAS_SOFT_CAP, PRECISION,
            )  # fmt: skip
        acc_MD, total_M, maximum_M = _attend_steps(
            acc_MD, total_M, maximum_M, q_MD, position_M, masked_new, end, base, page_row,
            k_new, v_new, k_stride_t, v_stride_t, scale, soft_cap, d_D,
            HEAD_DIM, BLOCK_D, BLOCK_N, False, True, WINDOW, HAS_SOFT_CAP, PRECISION,
        )  # fmt: skip

        out_MD = acc_MD / tl.where(total_M > 0.0, total_M, 1.0)[:, None]
        out_ptr_MD = out_THD + (token_M * NUM_HEADS + head)[:, None] * HEAD_DIM + d_D[None, :]
        tl.store(out_ptr_MD, out_MD.to(out_THD.dtype.element_ty), mask=tile_mask_MD)
