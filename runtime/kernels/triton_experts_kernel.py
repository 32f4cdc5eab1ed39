"""A linear layer in which every row has its expert's weight, in Triton. Imported lazily.

Rows come sorted by expert and cut into tiles of one expert each, so that a program multiplies with
one weight. Accumulates in float32 and rounds once.

Shapes: `N` entries (a token and one of its experts), `Y` tiles, `M` entries of a tile, `X` experts,
`I` input size, `O` output size.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_linear_kernel(
    x_RI: tl.tensor,
    weight_XOI: tl.tensor,
    order_N: tl.tensor,
    tiles_Y3: tl.tensor,
    entry_weight_N: tl.tensor,
    out_NO: tl.tensor,
    x_stride_r: tl.tensor,
    weight_stride_x: tl.tensor,
    weight_stride_o: tl.tensor,
    ENTRIES_PER_ROW: tl.constexpr,
    IN_SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    HAS_ENTRY_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> None:
    """Multiplies one tile with a block of its expert's rows. Grid: (Y, output blocks)."""
    tile = tl.program_id(0)
    expert = tl.load(tiles_Y3 + 3 * tile)
    if expert >= 0:
        first = tl.load(tiles_Y3 + 3 * tile + 1)
        end = tl.load(tiles_Y3 + 3 * tile + 2)
        position_M = first + tl.arange(0, BLOCK_M)
        is_entry_M = position_M < end
        entry_M = tl.load(order_N + position_M, mask=is_entry_M, other=0).to(tl.int64)
        o_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        is_o_O = o_O < OUT_SIZE
        x_M = x_RI + (entry_M // ENTRIES_PER_ROW) * x_stride_r
        weight_O = weight_XOI + expert.to(tl.int64) * weight_stride_x + o_O.to(tl.int64) * weight_stride_o
        acc_MO = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
        for start in range(0, IN_SIZE, BLOCK_I):
            i_I = start + tl.arange(0, BLOCK_I)
            is_i_I = i_I < IN_SIZE
            x_MI = tl.load(x_M[:, None] + i_I[None, :], mask=is_entry_M[:, None] & is_i_I[None, :], other=0.0)
            weight_IO = tl.load(
                weight_O[None, :] + i_I[:, None], mask=is_i_I[:, None] & is_o_O[None, :], other=0.0
            )
            acc_MO = tl.dot(x_MI, weight_IO, acc_MO, input_precision="ieee")
        if HAS_ENTRY_WEIGHT:
            entry_weight_M = tl.load(entry_weight_N + entry_M, mask=is_entry_M, other=0.0)
            acc_MO = acc_MO * entry_weight_M.to(tl.float32)[:, None]
        tl.store(
            out_NO + entry_M[:, None] * OUT_SIZE + o_O[None, :],
            acc_MO.to(out_NO.dtype.element_ty),
            mask=is_entry_M[:, None] & is_o_O[None, :],
        )
