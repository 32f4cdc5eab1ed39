"""Mixture of experts by a grouped GEMM in Triton: only the chosen experts compute.

Sorting and tiling are done on the device with shapes that follow the number of rows alone, so it
can be captured. The GEMM is an operator: one node to Dynamo, a dispatched call to a recording.
Imported lazily: importing it imports Triton.

Shapes: `T` tokens, `P` experts of one token, `N` entries (`T` times `P`), `X` experts, `Y` tiles,
`E` hidden, `M` width inside an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .experts import ExpertsKernel, real_rows, route
from .launching import launch
from .triton_experts_kernel import grouped_linear_kernel

_MAX_TILE_ROWS = 64
_MIN_TILE_ROWS = 16  # what a dot needs at least


def tiles_of_experts(
    expert_TP: torch.Tensor, num_experts: int, tile_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts entries by expert and cuts them into tiles of one expert each.

    Args:
        expert_TP: Chosen experts (int64[T, P]); ``num_experts`` for none.
        num_experts: `X`.
        tile_rows: Entries of a tile at most.

    Returns:
        ``order_N`` (int64[N]), entries sorted by expert; and ``tiles_Y3`` (int32[Y, 3]): a tile's
        expert, and its first and last position in ``order_N``, the latter exclusive. The number of
        tiles is the most that there can be; those of nobody have expert -1. Fresh.
    """
    expert_N = expert_TP.flatten()
    num_entries, device = expert_N.shape[0], expert_N.device
    sorted_N, order_N = expert_N.sort(stable=True)
    bound_X1 = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=device))
    num_tiles_X = (bound_X1[1:] - bound_X1[:-1] + tile_rows - 1) // tile_rows
    tile_end_X = num_tiles_X.cumsum(0)
    tile_Y = torch.arange(num_entries // tile_rows + min(num_experts, num_entries), device=device)
    expert_Y = torch.searchsorted(tile_end_X, tile_Y, right=True)
    is_tile_Y = expert_Y < num_experts
    known_Y = expert_Y.clamp(max=num_experts - 1)
    first_Y = bound_X1[known_Y] + (tile_Y - (tile_end_X - num_tiles_X)[known_Y]) * tile_rows
    end_Y = torch.minimum(first_Y + tile_rows, bound_X1[known_Y + 1])
    tiles_Y3 = torch.stack((torch.where(is_tile_Y, expert_Y, -1), first_Y, end_Y), dim=1)
    return order_N, tiles_Y3.to(torch.int32)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    entry_weight: torch.Tensor | None,
    entries_per_row: int,
    tile_rows: int,
) -> torch.Tensor:
    """Multiplies every entry's row with its expert's weight.

    Args:
        x: Rows (dtype[N / entries_per_row, I]).
        weight: Weights of all experts (dtype[X, O, I]).
        order: From `tiles_of_experts`.
        tiles: From `tiles_of_experts`.
        entry_weight: Factor of each entry's result (dtype[N]); None for one.
        entries_per_row: Entries that share a row.
        tile_rows: As given to `tiles_of_experts`.

    Returns:
        Results by entry, unsorted (dtype[N, O]), fresh; not written for entries of no expert.
    """
    num_entries, (_, out_size, in_size) = order.shape[0], weight.shape
    out = torch.empty((num_entries, out_size), dtype=x.dtype, device=x.device)
    block_o, block_i = (64, 32) if x.dtype == torch.float32 else (128, 64)
    launch(
        grouped_linear_kernel,
        (tiles.shape[0], -(-out_size // block_o)),
        [x, weight, order, tiles, x if entry_weight is None else entry_weight, out],
        written=(5,),
        x_stride_r=x.stride(0),
        weight_stride_x=weight.stride(0),
        weight_stride_o=weight.stride(1),
        ENTRIES_PER_ROW=entries_per_row,
        IN_SIZE=in_size,
        OUT_SIZE=out_size,
        HAS_ENTRY_WEIGHT=entry_weight is not None,
        BLOCK_M=tile_rows,
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        num_warps=4,
        num_stages=3,
    )
    return out


_NAMESPACE = "sgl_piecewise_experts"
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_LIBRARY.define(
    "grouped_linear(Tensor x, Tensor weight, Tensor order, Tensor tiles, Tensor? entry_weight, "
    "int entries_per_row, int tile_rows) -> Tensor"
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("grouped_linear", grouped_linear, _key)


@torch.library.register_fake(f"{_NAMESPACE}::grouped_linear")
def _fake_grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    entry_weight: torch.Tensor | None,
    entries_per_row: int,
    tile_rows: int,
) -> torch.Tensor:
    return torch.empty((order.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)


def _tile_rows(num_entries: int, num_experts: int) -> int:
    """Returns tiles that an expert's share of the entries fills, roughly."""
    rows = _MIN_TILE_ROWS
    while rows < _MAX_TILE_ROWS and rows * num_experts < num_entries:
        rows *= 2
    return rows


def triton_experts(gate_mul: Callable[[torch.Tensor], torch.Tensor]) -> ExpertsKernel:
    """Returns the experts' computation by grouped GEMM.

    Args:
        gate_mul: Joins gate and up projection.
    """

    def run(
        x_TE: torch.Tensor,
        router_logits_TX: torch.Tensor,
        gate_up_X2ME: torch.Tensor,
        down_XEM: torch.Tensor,
        num_real_tokens: torch.Tensor,
        *,
        top_k: int,
        is_normalised: bool,
    ) -> torch.Tensor:
        linear = torch.ops.sgl_piecewise_experts.grouped_linear
        num_tokens, num_experts = router_logits_TX.shape
        expert_TP, weight_TP = route(
            router_logits_TX, num_real_tokens, top_k=top_k, is_normalised=is_normalised
        )
        rows = _tile_rows(num_tokens * top_k, num_experts)
        order_N, tiles_Y3 = tiles_of_experts(expert_TP, num_experts, rows)
        inner_NM = gate_mul(linear(x_TE, gate_up_X2ME, order_N, tiles_Y3, None, top_k, rows))
        out_NE = linear(inner_NM, down_XEM, order_N, tiles_Y3, weight_TP.flatten(), 1, rows)
        out_TE = out_NE.unflatten(0, (num_tokens, top_k)).sum(1)
        # Entries of no expert were not written.
        return torch.where(real_rows(num_real_tokens, num_tokens), out_TE, 0.0)

    return run
