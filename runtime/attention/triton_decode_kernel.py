"""Triton kernels for few query tokens a request: split-KV attention over pages, and its merge.

The grid depends on the padded batch only; lengths are read on the device, so one captured launch
serves every batch of its size. Imported lazily: importing it imports Triton.

Shapes: `B` requests, `T` query tokens, `H` query heads, `K` KV heads, `D` head size, `S` slots,
`P` splits; in the kernel `M` query rows of one program, `N` KV positions of one step.
Source: split-KV decode is FlashDecoding's idea (Dao et al., 2023); online softmax is arXiv 1805.02867.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.triton_dependent import let_successor_start, wait_for_predecessor


@triton.jit
def split_decode_kernel(
    q_THD: tl.tensor,
    k_SKD: tl.tensor,
    v_SKD: tl.tensor,
    out_THD: tl.tensor,
    partial_PTHD: tl.tensor,
    lse_PTH: tl.tensor,
    page_table_RC: tl.tensor,
    rows_B: tl.tensor,
    seq_lens_B: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_s: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_s: tl.tensor,
    v_stride_h: tl.tensor,
    page_stride_r: tl.tensor,
    num_tokens_total: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Attends the query rows of one KV head of one request to one split of its context.

    Grid: (KV heads x row blocks, B, P). With one split the result goes to ``out_THD``, otherwise a
    partial result and its base-2 log-sum-exp go to ``partial_PTHD`` and ``lse_PTH``.
    """
    let_successor_start(IS_DEPENDENT)
    wait_for_predecessor(IS_DEPENDENT)
    ROWS: tl.constexpr = TOKENS_PER_REQUEST * GROUP
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    LOG2_E: tl.constexpr = 1.4426950408889634
    kv_head = tl.program_id(0) // ROW_BLOCKS
    request = tl.program_id(1)
    split = tl.program_id(2)

    row_M = (tl.program_id(0) % ROW_BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row_M = row_M < ROWS
    token_in_request_M = row_M // GROUP
    token_M = request * TOKENS_PER_REQUEST + token_in_request_M
    head_M = kv_head * GROUP + row_M % GROUP
    d_D = tl.arange(0, BLOCK_D)
    is_d_D = d_D < HEAD_DIM

    seq_len = tl.load(seq_lens_B + request).to(tl.int32)
    page_row = page_table_RC + tl.load(rows_B + request).to(tl.int64) * page_stride_r
    position_M = seq_len - TOKENS_PER_REQUEST + token_in_request_M
    if not IS_CAUSAL:
        position_M = position_M * 0 + (seq_len - 1)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - TOKENS_PER_REQUEST - WINDOW + 1, 0)
    per_split = tl.cdiv(tl.cdiv(seq_len - first, NUM_SPLITS), BLOCK_N) * BLOCK_N
    begin = first + split * per_split
    end = tl.minimum(begin + per_split, seq_len)

    q_offset_M = token_M.to(tl.int64) * q_stride_t + head_M * q_stride_h
    q_MD = tl.load(
        q_THD + q_offset_M[:, None] + d_D[None, :], mask=is_row_M[:, None] & is_d_D[None, :], other=0.0
    )
    # Finite, so that a step whose scores are all masked gives exp2(-inf - finite) = 0 and never NaN.
    maximum_M = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        n_N = start + tl.arange(0, BLOCK_N)
        is_n_N = n_N < end
        slot_N = tl.load(page_row + n_N, mask=is_n_N, other=0).to(tl.int64)
        kv_mask_ND = is_n_N[:, None] & is_d_D[None, :]
        k_ND = tl.load(
            k_SKD + slot_N[:, None] * k_stride_s + kv_head * k_stride_h + d_D[None, :],
            mask=kv_mask_ND,
            other=0.0,
        )
        v_ND = tl.load(
            v_SKD + slot_N[:, None] * v_stride_s + kv_head * v_stride_h + d_D[None, :],
            mask=kv_mask_ND,
            other=0.0,
        )
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
        if HAS_SOFT_CAP:
            score_MN = soft_cap * (2.0 * tl.sigmoid(2.0 * score_MN / soft_cap) - 1.0)
        is_seen_MN = is_n_N[None, :]
        if IS_CAUSAL and TOKENS_PER_REQUEST > 1:
            is_seen_MN = is_seen_MN & (n_N[None, :] <= position_M[:, None])
        if WINDOW > 0:
            is_seen_MN = is_seen_MN & (n_N[None, :] > position_M[:, None] - WINDOW)
        score_MN = tl.where(is_seen_MN, score_MN * LOG2_E, float("-inf"))
        new_maximum_M = tl.maximum(maximum_M, tl.max(score_MN, 1))
        weight_MN = tl.exp2(score_MN - new_maximum_M[:, None])
        shrink_M = tl.exp2(maximum_M - new_maximum_M)
        total_M = total_M * shrink_M + tl.sum(weight_MN, 1)
        acc_MD = acc_MD * shrink_M[:, None]
        acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
        maximum_M = new_maximum_M

    # A row that saw nothing (an empty request, an empty split) is zero and weighs nothing.
    divisor_M = tl.where(total_M > 0.0, total_M, 1.0)
    out_MD = acc_MD / divisor_M[:, None]
    row_offset_M = token_M.to(tl.int64) * NUM_HEADS + head_M
    store_mask_MD = is_row_M[:, None] & is_d_D[None, :]
    if NUM_SPLITS == 1:
        tl.store(
            out_THD + row_offset_M[:, None] * HEAD_DIM + d_D[None, :],
            out_MD.to(out_THD.dtype.element_ty),
            mask=store_mask_MD,
        )
    else:
        row_offset_M += split.to(tl.int64) * num_tokens_total * NUM_HEADS
        tl.store(partial_PTHD + row_offset_M[:, None] * HEAD_DIM + d_D[None, :], out_MD, mask=store_mask_MD)
        lse_M = tl.where(total_M > 0.0, maximum_M + tl.log2(divisor_M), float("-inf"))
        tl.store(lse_PTH + row_offset_M, lse_M, mask=is_row_M)


@triton.jit
def merge_splits_kernel(
    partial_PTHD: tl.tensor,
    lse_PTH: tl.tensor,
    out_THD: tl.tensor,
    num_rows: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Merges the splits of one query row. Grid: (T x H,)."""
    let_successor_start(IS_DEPENDENT)
    wait_for_predecessor(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    p_P = tl.arange(0, NUM_SPLITS)
    d_D = tl.arange(0, BLOCK_D)
    is_d_D = d_D < HEAD_DIM
    row_P = p_P.to(tl.int64) * num_rows + row
    lse_P = tl.load(lse_PTH + row_P)
    maximum = tl.maximum(tl.max(lse_P, 0), -1.0e30)
    weight_P = tl.exp2(lse_P - maximum)
    total = tl.sum(weight_P, 0)
    partial_PD = tl.load(
        partial_PTHD + row_P[:, None] * HEAD_DIM + d_D[None, :], mask=is_d_D[None, :], other=0.0
    )
    out_D = tl.sum(partial_PD * weight_P[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_THD + row * HEAD_DIM + d_D, out_D.to(out_THD.dtype.element_ty), mask=is_d_D)
