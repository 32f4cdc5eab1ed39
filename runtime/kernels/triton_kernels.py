"""The fused kernels in Triton. Imported lazily: importing it imports Triton.

All compute in float32 and round once, where they store.

Shapes: `T` tokens, `H` heads, `D` head size, `E` hidden, `M` feed-forward, `S` slots; in a kernel
`R` rows of one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_dependent import let_successor_start, wait_for_predecessor


@triton.jit
def rms_norm_kernel(
    x_THE: tl.tensor,
    weight_E: tl.tensor,
    out_THE: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    x_stride_t: tl.tensor,
    x_stride_h: tl.tensor,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Norms rows of ``SIZE``. Grid: (row blocks,)."""
    let_successor_start(IS_DEPENDENT)
    wait_for_predecessor(IS_DEPENDENT)
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e_E = tl.arange(0, BLOCK_E)
    mask = (row_R < num_rows)[:, None] & (e_E < SIZE)[None, :]
    offset_R = (row_R // NUM_HEADS).to(tl.int64) * x_stride_t + (row_R % NUM_HEADS) * x_stride_h
    x_RE = tl.load(x_THE + offset_R[:, None] + e_E[None, :], mask=mask, other=0.0).to(tl.float32)
    scale_R = tl.rsqrt(tl.sum(x_RE * x_RE, 1) / SIZE + eps)
    weight = tl.load(weight_E + e_E, mask=e_E < SIZE, other=0.0).to(tl.float32)
    out_RE = x_RE * scale_R[:, None] * weight[None, :]
    out_offset_R = row_R.to(tl.int64) * SIZE
    tl.store(out_THE + out_offset_R[:, None] + e_E[None, :], out_RE.to(out_THE.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm_kernel(
    x_TE: tl.tensor,
    residual_TE: tl.tensor,
    weight_E: tl.tensor,
    eps: tl.tensor,
    x_stride_t: tl.tensor,
    residual_stride_t: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Leaves the sum in ``residual_TE`` and the normed sum in ``x_TE``. Grid: (T,)."""
    let_successor_start(IS_DEPENDENT)
    wait_for_predecessor(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    e_E = tl.arange(0, BLOCK_E)
    mask = e_E < SIZE
    x_ptr = x_TE + token * x_stride_t + e_E
    residual_ptr = residual_TE + token * residual_stride_t + e_E
    total = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(residual_TE.dtype.element_ty)
    tl.store(residual_ptr, rounded, mask=mask)
    # As in torch, the norm sees the sum as it is stored.
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / SIZE + eps)
    weight = tl.load(weight_E + e_E, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr, (total * scale * weight).to(x_TE.dtype.element_ty), mask=mask)


@triton.jit
def gate_mul_kernel(
    gate_up_TM2: tl.tensor,
    out_TM: tl.tensor,
    stride_t: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IS_GELU: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """SiLU, or GELU in its tanh form, of the first half times the second. Grid: (T, blocks of M)."""
    let_successor_start(IS_DEPENDENT)
    wait_for_predecessor(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = m < SIZE
    gate_ptr = gate_up_TM2 + token * stride_t + m
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if IS_GELU:
        # (1 + tanh(z)) / 2 is sigmoid(2 z), which Triton has on every backend; 2 sqrt(2 / pi) here.
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # Far below zero the gate is shut either way, and exp in the sigmoid would overflow.
    out = gate * tl.sigmoid(tl.maximum(inner, -80.0)) * up
    tl.store(out_TM + token * SIZE + m, out.to(out_TM.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rotate_heads(
    x: tl.tensor,
    weight: tl.tensor,
    cos_D: tl.tensor,
    sin_D: tl.tensor,
    eps: tl.tensor,
    stride_h: tl.tensor,
    first_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Norms and rotates some heads of one token, in place."""
    head_H = first_head + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_HALF)
    mask = (head_H < NUM_HEADS)[:, None] & (d < HALF)[None, :]
    low_ptr = x + head_H[:, None] * stride_h + d[None, :]
    low = tl.load(low_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(low_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        square_H = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale_H = tl.rsqrt(square_H / (2 * HALF) + eps)
        low = low * scale_H[:, None] * tl.load(weight + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        high_weight = tl.load(weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
        high = high * scale_H[:, None] * high_weight[None, :]
    cos_low = tl.load(cos_D + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_D + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_D + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_D + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    tl.store(low_ptr, (low * cos_low - high * sin_low).to(x.dtype.element_ty), mask=mask)
    tl.store(low_ptr + HALF, (high * cos_high + low * sin_high).to(x.dtype.element_ty), mask=mask)


@triton.jit
def norm_rotate_kernel(
    q_THD: tl.tensor,
    k_TKD: tl.tensor,
    cos_TD: tl.tensor,
    sin_TD: tl.tensor,
    q_weight_D: tl.tensor,
    k_weight_D: tl.tensor,
    eps: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    cos_stride_t: tl.tensor,
    sin_stride_t: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Norms and rotates in place. Grid: (T, blocks of query heads, then of KV heads)."""
    let_successor_start(IS_DEPENDENT)
    wait_for_predecessor(IS_DEPENDENT)
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos_D = cos_TD + token * cos_stride_t
    sin_D = sin_TD + token * sin_stride_t
    if block < Q_BLOCKS:
        _norm_rotate_heads(
            q_THD + token * q_stride_t, q_weight_D, cos_D, sin_D, eps, q_stride_h, block * BLOCK_H,
            NUM_HEADS, HALF, BLOCK_H, BLOCK_HALF, HAS_NORM,
        )  # fmt: skip
    else:
        _norm_rotate_heads(
            k_TKD + token * k_stride_t, k_weight_D, cos_D, sin_D, eps, k_stride_h,
            (block - Q_BLOCKS) * BLOCK_H, NUM_KV_HEADS, HALF, BLOCK_H, BLOCK_HALF, HAS_NORM,
        )  # fmt: skip


@triton.jit
def write_kv_kernel(
    k_SKD: tl.tensor,
    v_SKD: tl.tensor,
    slots_T: tl.tensor,
    k_TKD: tl.tensor,
    v_TKD: tl.tensor,
    k_stride_s: tl.tensor,
    v_stride_s: tl.tensor,
    k_stride_t: tl.tensor,
    v_stride_t: tl.tensor,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Copies the keys and values of one token, rows of ``ROW`` elements. Grid: (T,)."""
    let_successor_start(IS_DEPENDENT)
    wait_for_predecessor(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_T + token).to(tl.int64)
    e = tl.arange(0, BLOCK)
    mask = e < ROW
    key = tl.load(k_TKD + token * k_stride_t + e, mask=mask)
    value = tl.load(v_TKD + token * v_stride_t + e, mask=mask)
    tl.store(k_SKD + slot * k_stride_s + e, key.to(k_SKD.dtype.element_ty), mask=mask)
    tl.store(v_SKD + slot * v_stride_s + e, value.to(v_SKD.dtype.element_ty), mask=mask)
