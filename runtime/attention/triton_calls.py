"""Triton attention as plain functions on tensors: block sizes, scratch memory, launches.

Nothing here depends on what a tensor holds, only on shapes and dtypes, so every launch may be
captured. This module must not know of batches or pools.

Shapes: `B` requests, `T` query tokens, `H` query heads, `K` KV heads, `D` head size, `S` slots,
`C` columns of the page table, `P` splits, `X` tiles.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError
from ..kernels.launching import import_triton_module, launch, power_of_two
from .base import AttentionSpec

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_TARGET_PROGRAMS = 1056  # eight for each multiprocessor of an H200, so that none waits long for the last
_MAX_SPLITS = 32


def check_supported(layer: AttentionSpec, dtype: torch.dtype) -> None:
    """Refuses what the kernels were not written for.

    Raises:
        ConfigError: The dtype or the head size.
    """
    if dtype not in _DTYPES:
        raise ConfigError(
            f"Triton attention computes in {', '.join(map(str, _DTYPES))}; queries and KV pool are {dtype}. "
            "Choose another dtype or attention backend."
        )
    if not 16 <= layer.head_dim <= _MAX_HEAD_DIM:
        raise ConfigError(
            f"Triton attention takes head sizes 16 to {_MAX_HEAD_DIM}; layer {layer.layer_index} has "
            f"{layer.head_dim}. Choose the torch attention backend."
        )


def _check_tensors(q_THD: torch.Tensor, *others: torch.Tensor) -> None:
    """Refuses tensors that the kernels would misread, or fail on with an error of the compiler's.

    Raises:
        ConfigError: Dtypes differ, or a head is not contiguous.
    """
    for tensor in (q_THD, *others):
        if tensor.dtype is not q_THD.dtype:
            raise ConfigError(
                f"Triton attention needs one dtype: queries are {q_THD.dtype}, keys, values or their pool are "
                f"{tensor.dtype}. Build the KV pool in the model's dtype."
            )
        if tensor.stride(-1) != 1:
            raise ConfigError(
                f"Triton attention needs heads that are contiguous, and got a tensor of shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}. Make it contiguous in its last dimension."
            )


def num_splits_for(num_requests: int, num_kv_heads: int, max_context: int) -> int:
    """Returns into how many parts decode cuts each context, a power of two.

    It depends on padded sizes only: what a captured graph was made with. Enough programs to fill
    the device, but no part under 64 positions at the longest context.
    """
    wanted = _TARGET_PROGRAMS // max(num_requests * num_kv_heads, 1)
    most = min(_MAX_SPLITS, max(max_context // 64, 1))
    splits = 1
    while splits * 2 <= min(wanted, most):
        splits *= 2
    return splits


def tile_rows(head_dim: int, dtype: torch.dtype) -> int:
    """Returns how many query rows a tile of `extend_attention` has."""
    if dtype is torch.float32:
        return 32
    return 128 if head_dim <= 128 else 64


def decode_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    *,
    page_table_RC: torch.Tensor,
    rows_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    tokens_per_request: int,
    num_splits: int,
    layer: AttentionSpec,
    is_causal: bool = True,
) -> torch.Tensor:
    """Attends the last tokens of each request to its whole context, in the pool.

    Args:
        q_THD: Queries (dtype[T, H, D]), ``tokens_per_request`` for each request in turn.
        k_SKD: Keys of the pool (dtype[S, K, D]), those of the queries' own tokens included.
        v_SKD: Values likewise.
        page_table_RC: Slot of each position (int32[R, C]).
        rows_B: Row of each request in the page table (int[B]).
        seq_lens_B: Length of each context, the queries' tokens included (int[B]); 0 gives zeros.
        tokens_per_request: 1 in decode, more in verify; the last ones of the context.
        num_splits: From `num_splits_for`.
        layer: The layer's constants.
        is_causal: Whether a query sees only what is before it; else all of its request's context.

    Returns:
        ``o_THD`` (dtype[T, H, D]), fresh.

    Raises:
        ConfigError: Dtypes differ, or a head is not contiguous.
    """
    _check_tensors(q_THD, k_SKD, v_SKD)
    kernels = import_triton_module("triton_decode_kernel", __package__ or "")
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_SKD.shape[1]
    group = num_heads // num_kv_heads
    rows = tokens_per_request * group
    block_m = min(max(power_of_two(rows), 16), 64)
    block_d = power_of_two(head_dim)
    out_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=q_THD.dtype, device=q_THD.device)
    partial_PTHD, lse_PTH = out_THD, out_THD  # not touched by one split
    if num_splits > 1:
        partial_PTHD = q_THD.new_empty((num_splits, num_tokens, num_heads, head_dim), dtype=torch.float32)
        lse_PTH = q_THD.new_empty((num_splits, num_tokens, num_heads), dtype=torch.float32)
    launch(
        kernels.split_decode_kernel,
        (num_kv_heads * -(-rows // block_m), rows_B.shape[0], num_splits),
        [q_THD, k_SKD, v_SKD, out_THD, partial_PTHD, lse_PTH, page_table_RC, rows_B, seq_lens_B],
        written=(3, 4, 5),
        is_dependent=True,
        scale=layer.scale,
        soft_cap=layer.logit_soft_cap or 1.0,
        q_stride_t=q_THD.stride(0),
        q_stride_h=q_THD.stride(1),
        k_stride_s=k_SKD.stride(0),
        k_stride_h=k_SKD.stride(1),
        v_stride_s=v_SKD.stride(0),
        v_stride_h=v_SKD.stride(1),
        page_stride_r=page_table_RC.stride(0),
        num_tokens_total=num_tokens,
        NUM_HEADS=num_heads,
        GROUP=group,
        TOKENS_PER_REQUEST=tokens_per_request,
        IS_CAUSAL=is_causal,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        NUM_SPLITS=num_splits,
        **_layer_constants(layer, q_THD.dtype),
        **_decode_blocks(block_d, q_THD.dtype),
    )
    if num_splits > 1:
        _merge_splits(kernels, partial_PTHD, lse_PTH, out_THD)
    return out_THD


def _merge_splits(
    kernels: Any, partial_PTHD: torch.Tensor, lse_PTH: torch.Tensor, out_THD: torch.Tensor
) -> None:
    """Writes the splits' common result."""
    num_splits, num_tokens, num_heads, head_dim = partial_PTHD.shape
    block_d = power_of_two(head_dim)
    launch(
        kernels.merge_splits_kernel,
        (num_tokens * num_heads,),
        [partial_PTHD, lse_PTH, out_THD],
        written=(2,),
        is_dependent=True,
        num_rows=num_tokens * num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        NUM_SPLITS=num_splits,
        num_warps=1 if num_splits * block_d <= 2048 else 4,
    )


def extend_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    *,
    page_table_RC: torch.Tensor,
    rows_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    query_start_B: torch.Tensor,
    tiles_X2: torch.Tensor,
    layer: AttentionSpec,
) -> torch.Tensor:
    """Attends new tokens to their request's prefix in the pool, and causally to each other.

    Args:
        q_THD: Queries (dtype[T, H, D]).
        k_TKD: Keys of the new tokens (dtype[T, K, D]).
        v_TKD: Values likewise.
        k_SKD: Keys of the pool (dtype[S, K, D]); only the prefix is read.
        v_SKD: Values likewise.
        page_table_RC: Slot of each position (int32[R, C]).
        rows_B: Row of each request in the page table (int[B]).
        seq_lens_B: Prefix and new tokens of each request (int[B]).
        query_start_B: First token of each request, and the end (int32[B + 1]).
        tiles_X2: The tiles (int32[X, 2]), of `tile_rows` rows each: see `plan.tile_table`.
        layer: The layer's constants.

    Returns:
        ``o_THD`` (dtype[T, H, D]), fresh; zero in rows of no request.

    Raises:
        ConfigError: Dtypes differ, or a head is not contiguous.
    """
    _check_tensors(q_THD, k_TKD, v_TKD, k_SKD, v_SKD)
    kernels = import_triton_module("triton_extend_kernel", __package__ or "")
    num_tokens, num_heads, head_dim = q_THD.shape
    block_d = power_of_two(head_dim)
    out_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=q_THD.dtype, device=q_THD.device)
    launch(
        kernels.extend_kernel,
        (num_heads, tiles_X2.shape[0]),
        [
            q_THD, k_TKD, v_TKD, k_SKD, v_SKD, out_THD,
            page_table_RC, rows_B, seq_lens_B, query_start_B, tiles_X2,
        ],
        written=(5,),
        scale=layer.scale,
        soft_cap=layer.logit_soft_cap or 1.0,
        q_stride_t=q_THD.stride(0),
        q_stride_h=q_THD.stride(1),
        k_stride_t=k_TKD.stride(0),
        k_stride_h=k_TKD.stride(1),
        v_stride_t=v_TKD.stride(0),
        v_stride_h=v_TKD.stride(1),
        k_stride_s=k_SKD.stride(0),
        k_pool_stride_h=k_SKD.stride(1),
        v_stride_s=v_SKD.stride(0),
        v_pool_stride_h=v_SKD.stride(1),
        page_stride_r=page_table_RC.stride(0),
        num_tokens=num_tokens,
        NUM_HEADS=num_heads,
        GROUP=num_heads // k_SKD.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=tile_rows(head_dim, q_THD.dtype),
        **_layer_constants(layer, q_THD.dtype),
        **_extend_blocks(block_d, q_THD.dtype),
    )  # fmt: skip
    return out_THD


def _layer_constants(layer: AttentionSpec, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "WINDOW": layer.window or 0,
        "HAS_SOFT_CAP": layer.logit_soft_cap is not None,
        # Tensor cores would round float32 inputs to ten bits.
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
    }


def _decode_blocks(block_d: int, dtype: torch.dtype) -> dict[str, Any]:
    """Steps that keep enough loads in flight and fit the shared memory of a Hopper multiprocessor.

    Keys wait for their slots, so Triton spreads its stages over two loads: five give two buffers.
    """
    if dtype is torch.float32:
        return {"BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_N": 64 if block_d <= 128 else 32, "num_warps": 4, "num_stages": 5}


def _extend_blocks(block_d: int, dtype: torch.dtype) -> dict[str, Any]:
    if dtype is torch.float32:
        return {"BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    if block_d <= 64:
        return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    if block_d <= 128:
        return {"BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
