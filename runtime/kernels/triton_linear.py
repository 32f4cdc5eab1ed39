"""Linear layers of few rows on Triton: which kernel with which blocks, and the launch.

A product of few rows takes as long as its weights take to read. Blocks are fixed by sizes, not
tuned at start-up; where PyTorch's product was faster on an H200, or a tensor is not laid out for
the kernels, it is PyTorch's. Imported lazily: importing it imports Triton.

Shapes: `T` rows, `N` output columns, `K` the reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .launching import launch, power_of_two
from .triton_linear_kernel import few_rows_linear_kernel, vector_linear_kernel

_DTYPES = (torch.bfloat16, torch.float16)
MAX_ROWS = 32
"""Rows up to which `linear` may run its own kernels."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How one product is cut up.

    Attributes:
        columns: Output columns of one program.
        step: Of the reduction, in one part.
        parts: Parts of one step, for as many warps or more.
        num_warps: Of one program.
        num_stages: Steps in flight.
    """

    columns: int
    step: int
    parts: int
    num_warps: int
    num_stages: int


def blocks_for(num_rows: int, num_columns: int, size: int) -> Blocks | None:
    """Returns the blocks that were fastest on an H200, or None where PyTorch's product was.

    Args:
        num_rows: `T`, at most `MAX_ROWS`.
        num_columns: `N`.
        size: `K`.
    """
    if num_rows == 1:
        step = min(power_of_two(size), 2048)
        return Blocks(columns=2, step=step, parts=1, num_warps=4, num_stages=1)
    if num_rows <= 8:
        return Blocks(columns=16, step=128, parts=2, num_warps=2, num_stages=4)
    return None


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
    (num_rows, size), num_columns = x.shape, weight.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    out_TN = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    grid = (-(-num_columns // blocks.columns),)
    tensors = [x, weight, weight if bias is None else bias, out_TN]
    if num_rows == 1:
        launch(
            vector_linear_kernel,
            grid,
            tensors,
            written=(3,),
            is_dependent=True,
            num_columns=num_columns,
            SIZE=size,
            BLOCK_N=blocks.columns,
            BLOCK_K=blocks.step,
            HAS_BIAS=bias is not None,
            num_warps=blocks.num_warps,
        )
        return out_TN
    launch(
        few_rows_linear_kernel,
        grid,
        tensors,
        written=(3,),
        is_dependent=True,
        num_rows=num_rows,
        num_columns=num_columns,
        x_stride_t=x.stride(0),
        SIZE=size,
        BLOCK_T=max(power_of_two(num_rows), 8),
        BLOCK_N=blocks.columns,
        BLOCK_K=blocks.step,
        NUM_PARTS=blocks.parts,
        NUM_STAGES=blocks.num_stages,
        HAS_BIAS=bias is not None,
        num_warps=blocks.num_warps,
    )
    return out_TN


def _own_blocks(x: torch.Tensor, weight: torch.Tensor) -> Blocks | None:
    """Returns the blocks for our kernels; None where they are not made for the tensors."""
    if x.dim() != 2 or not 0 < x.shape[0] <= MAX_ROWS or 0 in weight.shape or not weight.is_contiguous():
        return None
    if x.dtype not in _DTYPES or weight.dtype is not x.dtype:
        return None
    return blocks_for(x.shape[0], weight.shape[0], weight.shape[1])
