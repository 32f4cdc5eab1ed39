"""Triton kernels for linear layers of few rows, which take as long as their weights take to read.

Every program has some output columns and the whole reduction, so there are no partial sums in
memory and no atomics: a result is the same bits in each run. All accumulate in float32 and round
once. Weights are read once, so caches may drop them first. Imported lazily: importing it imports
Triton.

Shapes: `T` rows, `N` output columns, `K` the reduction, `P` parts of one step of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_dependent import let_successor_start, wait_for_predecessor


@triton.jit
def vector_linear_kernel(
    x_K: tl.tensor,
    weight_NK: tl.tensor,
    bias_N: tl.tensor,
    out_N: tl.tensor,
    num_columns: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Multiplies one row. Grid: (blocks of N,).

    The first step's weights are on their way before the predecessor is complete: no kernel of a
    forward writes them.
    """
    if STARTS_EARLY:
        let_successor_start(IS_DEPENDENT)
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_K = tl.arange(0, BLOCK_K)
    # Columns past the end read the last one again, so that weights are loaded without a mask.
    row_N = tl.minimum(n_N, num_columns - 1).to(tl.int64) * SIZE
    weight_ptr_NK = weight_NK + row_N[:, None] + k_K[None, :]
    IS_EVEN: tl.constexpr = SIZE % BLOCK_K == 0
    if IS_EVEN:
        first_NK = tl.load(weight_ptr_NK, eviction_policy="evict_first")
    else:
        first_NK = tl.load(
            weight_ptr_NK, mask=(k_K < SIZE)[None, :], other=0.0, eviction_policy="evict_first"
        )
    wait_for_predecessor(IS_DEPENDENT)
    x = tl.load(x_K + k_K, mask=k_K < SIZE, other=0.0).to(tl.float32)
    acc_NK = first_NK.to(tl.float32) * x[None, :]
    for start in tl.range(BLOCK_K, SIZE, BLOCK_K, num_stages=1):
        is_k_K = start + k_K < SIZE
        if IS_EVEN:
            step_NK = tl.load(weight_ptr_NK + start, eviction_policy="evict_first")
        else:
            step_NK = tl.load(
                weight_ptr_NK + start, mask=is_k_K[None, :], other=0.0, eviction_policy="evict_first"
            )
        x = tl.load(x_K + start + k_K, mask=is_k_K, other=0.0).to(tl.float32)
        acc_NK += step_NK.to(tl.float32) * x[None, :]
    if not STARTS_EARLY:
        let_successor_start(IS_DEPENDENT)
    total_N = tl.sum(acc_NK, 1)
    is_n_N = n_N < num_columns
    if HAS_BIAS:
        total_N += tl.load(bias_N + n_N, mask=is_n_N, other=0.0).to(tl.float32)
    tl.store(out_N + n_N, total_N.to(out_N.dtype.element_ty), mask=is_n_N)


@triton.jit
def few_rows_linear_kernel(
    x_TK: tl.tensor,
    weight_NK: tl.tensor,
    bias_N: tl.tensor,
    out_TN: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_stride_t: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Multiplies up to ``BLOCK_T`` rows. Grid: (blocks of N,).

    For few columns a program: a step is ``NUM_PARTS`` products side by side, one for each warp,
    whose sums are added at the end.
    """
    if STARTS_EARLY:
        let_successor_start(IS_DEPENDENT)
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t_T = tl.arange(0, BLOCK_T)
    is_t_T = t_T < num_rows
    k_PK = tl.arange(0, NUM_PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    # Columns past the end read the last one again, so that weights are loaded without a mask.
    row_N = tl.minimum(n_N, num_columns - 1).to(tl.int64) * SIZE
    weight_ptr_PNK = weight_NK + row_N[None, :, None] + k_PK[:, None, :]
    x_ptr_PKT = x_TK + t_T[None, None, :] * x_stride_t + k_PK[:, :, None]
    IS_EVEN: tl.constexpr = SIZE % (NUM_PARTS * BLOCK_K) == 0
    wait_for_predecessor(IS_DEPENDENT)
    acc_PNT = tl.zeros([NUM_PARTS, BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.range(0, SIZE, NUM_PARTS * BLOCK_K, num_stages=NUM_STAGES):
        if IS_EVEN:
            x_PKT = tl.load(x_ptr_PKT + start, mask=is_t_T[None, None, :], other=0.0)
            step_PNK = tl.load(weight_ptr_PNK + start, eviction_policy="evict_first")
        else:
            is_k_PK = start + k_PK < SIZE
            x_mask_PKT = is_k_PK[:, :, None] & is_t_T[None, None, :]
            x_PKT = tl.load(x_ptr_PKT + start, mask=x_mask_PKT, other=0.0)
            step_PNK = tl.load(
                weight_ptr_PNK + start, mask=is_k_PK[:, None, :], other=0.0, eviction_policy="evict_first"
            )
        acc_PNT = tl.dot(step_PNK, x_PKT, acc_PNT)
    if not STARTS_EARLY:
        let_successor_start(IS_DEPENDENT)
    total_NT = tl.sum(acc_PNT, 0)
    is_n_N = n_N < num_columns
    if HAS_BIAS:
        total_NT += tl.load(bias_N + n_N, mask=is_n_N, other=0.0).to(tl.float32)[:, None]
    out_ptr_NT = out_TN + t_T[None, :].to(tl.int64) * num_columns + n_N[:, None]
    tl.store(out_ptr_NT, total_NT.to(out_TN.dtype.element_ty), mask=is_n_N[:, None] & is_t_T[None, :])


@triton.jit
def wide_linear_kernel(
    x_TK: tl.tensor,
    weight_NK: tl.tensor,
    bias_N: tl.tensor,
    out_TN: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_stride_t: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Multiplies up to ``BLOCK_T`` rows. Grid: (blocks of N,).

    For many columns a program: they fill the rows of the tensor cores, where ours are too few to.
    """
    if STARTS_EARLY:
        let_successor_start(IS_DEPENDENT)
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t_T = tl.arange(0, BLOCK_T)
    k_K = tl.arange(0, BLOCK_K)
    is_t_T = t_T < num_rows
    # Columns past the end read the last one again, so that weights are loaded without a mask.
    row_N = tl.minimum(n_N, num_columns - 1).to(tl.int64) * SIZE
    weight_ptr_NK = weight_NK + row_N[:, None] + k_K[None, :]
    x_ptr_KT = x_TK + t_T[None, :] * x_stride_t + k_K[:, None]
    IS_EVEN: tl.constexpr = SIZE % BLOCK_K == 0
    wait_for_predecessor(IS_DEPENDENT)
    acc_NT = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K, num_stages=NUM_STAGES):
        if IS_EVEN:
            x_KT = tl.load(x_ptr_KT + start, mask=is_t_T[None, :], other=0.0)
            step_NK = tl.load(weight_ptr_NK + start, eviction_policy="evict_first")
        else:
            is_k_K = start + k_K < SIZE
            x_KT = tl.load(x_ptr_KT + start, mask=is_k_K[:, None] & is_t_T[None, :], other=0.0)
            step_NK = tl.load(
                weight_ptr_NK + start, mask=is_k_K[None, :], other=0.0, eviction_policy="evict_first"
            )
        acc_NT = tl.dot(step_NK, x_KT, acc_NT)
    if not STARTS_EARLY:
        let_successor_start(IS_DEPENDENT)
    is_n_N = n_N < num_columns
    if HAS_BIAS:
        acc_NT += tl.load(bias_N + n_N, mask=is_n_N, other=0.0).to(tl.float32)[:, None]
    out_ptr_NT = out_TN + t_T[None, :].to(tl.int64) * num_columns + n_N[:, None]
    tl.store(out_ptr_NT, acc_NT.to(out_TN.dtype.element_ty), mask=is_n_N[:, None] & is_t_T[None, :])
