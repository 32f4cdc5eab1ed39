"""Linear layers of few rows on Triton: which kernel with which blocks, and the launch.

A product of few rows takes as long as its weights take to read. Blocks follow from sizes and are
not tuned at start-up; where PyTorch's product was faster, or a tensor is not laid out for the
kernels, it is PyTorch's. Imported lazily: importing it imports Triton.

Shapes: `T` rows, `N` output columns, `K` the reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .launching import launch, power_of_two
from .triton_linear_kernel import few_rows_linear_kernel, vector_linear_kernel, wide_linear_kernel

_DTYPES = (torch.bfloat16, torch.float16)
MAX_ROWS = 32
"""Rows up to which `linear` may run its own kernels."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How one product is cut up.

    Attributes:
        columns: Output columns of one program.
        step: Of the reduction, in one part.
        num_warps: Of one program.
        num_parts: Parts of one step; one for as many warps or more.
        num_stages: Steps in flight; 1 where programs are small and many in its place.
        is_dependent: Whether it starts before its predecessor is complete.
        starts_early: Whether its successor may start with it, and not only at its end.
    """

    columns: int
    step: int
    num_warps: int
    num_parts: int = 1
    num_stages: int = 1
    is_dependent: bool = True
    starts_early: bool = False


_VECTOR = Blocks(columns=4, step=1024, num_warps=4)
_VECTOR_MANY_COLUMNS = Blocks(columns=2, step=2048, num_warps=4, starts_early=True)
_VECTOR_LONG = Blocks(columns=2, step=4096, num_warps=8, starts_early=True)
_FEW = Blocks(columns=16, step=128, num_warps=2, num_parts=2, num_stages=4)
_FEW_BALANCED = Blocks(columns=16, step=64, num_warps=4, num_parts=4, num_stages=5, is_dependent=False)
_MORE_BALANCED = Blocks(columns=16, step=64, num_warps=2, num_parts=2, num_stages=6, is_dependent=False)
_MOST_BALANCED = Blocks(columns=16, step=128, num_warps=2, num_parts=2, num_stages=4, is_dependent=False)
_WIDE = Blocks(columns=64, step=128, num_warps=4, num_stages=4, starts_early=True)


def blocks_for(num_rows: int, num_columns: int, size: int) -> Blocks | None:
    """Returns the blocks that were fastest in a chain of layers on an H200, or None where PyTorch's product was.

    With up to 4096 columns there are two programs of 16 for each multiprocessor. They do not start
    early: beside kernels that leave, some multiprocessors would get three of them and some one.

    Args:
        num_rows: `T`, at most `MAX_ROWS`.
        num_columns: `N`.
        size: `K`.
    """
    if num_rows == 1:
        if size > 4096:
            return _VECTOR_LONG
        return _VECTOR_MANY_COLUMNS if num_columns >= 16384 else _VECTOR
    if num_columns > 4096:
        return _FEW if num_rows <= 8 else _WIDE
    if num_rows <= 16:
        return _FEW_BALANCED if num_rows <= 8 else _MORE_BALANCED
    return _MOST_BALANCED if size <= 4096 else None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns ``x`` times the transposed weight, plus the bias, fresh.

    Args:
        x: Rows (dtype[T, K]); with other dimensions PyTorch's product is used.
        weight: dtype[N, K].
        bias: dtype[N], or None.
    """
    blocks = _own_blocks(x, weight)
    if blocks is None:
        return F.linear(x, weight, bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    out_TN = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    tensors = [x, weight, weight if bias is None else bias, out_TN]
    if x.shape[0] == 1:
        _multiply_vector(blocks, tensors, has_bias=bias is not None)
    else:
        _multiply_rows(blocks, tensors, has_bias=bias is not None)
    return out_TN


def _own_blocks(x: torch.Tensor, weight: torch.Tensor) -> Blocks | None:
    """Returns the blocks for our kernels; None where they are not made for the tensors."""
    if x.dim() != 2 or not 0 < x.shape[0] <= MAX_ROWS or 0 in weight.shape or not weight.is_contiguous():
        return None
    if x.dtype not in _DTYPES or weight.dtype is not x.dtype:
        return None
    return blocks_for(x.shape[0], weight.shape[0], weight.shape[1])


def _multiply_vector(blocks: Blocks, tensors: list[torch.Tensor], *, has_bias: bool) -> None:
    num_columns, size = tensors[1].shape
    launch(
        vector_linear_kernel,
        (-(-num_columns // blocks.columns),),
        tensors,
        written=(3,),
        is_dependent=blocks.is_dependent,
        num_columns=num_columns,
        SIZE=size,
        BLOCK_N=blocks.columns,
        BLOCK_K=min(blocks.step, power_of_two(size)),
        HAS_BIAS=has_bias,
        STARTS_EARLY=blocks.starts_early,
        num_warps=blocks.num_warps,
    )


def _multiply_rows(blocks: Blocks, tensors: list[torch.Tensor], *, has_bias: bool) -> None:
    x_TK, weight_NK = tensors[:2]
    num_columns, size = weight_NK.shape
    parts = {} if blocks.num_parts == 1 else {"NUM_PARTS": blocks.num_parts}
    launch(
        few_rows_linear_kernel if parts else wide_linear_kernel,
        (-(-num_columns // blocks.columns),),
        tensors,
        written=(3,),
        is_dependent=blocks.is_dependent,
        num_rows=x_TK.shape[0],
        num_columns=num_columns,
        x_stride_t=x_TK.stride(0),
        SIZE=size,
        BLOCK_T=max(power_of_two(x_TK.shape[0]), 8),
        BLOCK_N=blocks.columns,
        BLOCK_K=blocks.step,
        NUM_STAGES=blocks.num_stages,
        HAS_BIAS=has_bias,
        STARTS_EARLY=blocks.starts_early,
        num_warps=blocks.num_warps,
        **parts,
    )
