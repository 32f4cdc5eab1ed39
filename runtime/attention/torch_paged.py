"""The reference backend: paged attention in plain torch, on any device, in float32.

Query rows are cut into tiles and keys into blocks of fixed sizes, so a tile's arithmetic is the
same whatever else is in the batch: results are bit for bit independent of the other requests, of
padding, and of whether the forward was captured. Keys past the end of a context, and those that have
left every row's window, add exactly zero: their slots may be other requests' by now, whatever they hold.

Shapes: `B` requests, `T` tokens, `H` query heads, `K` KV heads, `G` query heads of one KV head,
`D` head size, `S` slots, `X` tiles, `M` rows of a tile, `N` keys of a block.
"""

from __future__ import annotations

import torch

from ..kv.slots import SCRATCH_SLOT
from ..kv.translator import KVRead
from .backend import COMPUTING_MODES
from .base import AttentionSpec
from .paged import PagedAttention
from .plan import PagedPlan

TILE_ROWS = 32
BLOCK_KEYS = 128


class TorchAttention(PagedAttention):
    """Paged attention in plain torch.

    Its work in a graph grows with the longest context there can be, and in an extend with the
    number of request slots: it is a reference, not fast.
    """

    name = "torch"
    full_capture_modes = COMPUTING_MODES

    def _tile_rows(self, layer: AttentionSpec, dtype: torch.dtype) -> int:
        return TILE_ROWS

    def _attend_few(
        self, q_THD: torch.Tensor, read: KVRead, layer: AttentionSpec, plan: PagedPlan
    ) -> torch.Tensor:
        rows = plan.tokens_per_request or 1
        q_XMHD = q_THD.unflatten(0, (plan.num_requests, rows))
        first_B = plan.seq_lens - rows
        position_XM = first_B.unsqueeze(1) + torch.arange(rows, device=q_THD.device)
        if not plan.is_causal:
            position_XM = (plan.seq_lens - 1).unsqueeze(1).expand_as(position_XM)
        out_XMHD = self._attend(q_XMHD, position_XM, plan.req_pool_indices, plan.seq_lens, read, layer, plan)
        return out_XMHD.flatten(0, 1).to(q_THD.dtype)

    def _attend_tiles(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        read: KVRead,
        layer: AttentionSpec,
        plan: PagedPlan,
    ) -> torch.Tensor:
        num_tokens = q_THD.shape[0]
        request_X, first_X = plan.tiles.long().unbind(1)
        is_tile_X = request_X >= 0
        request_X = request_X.clamp(min=0)
        start_X = plan.query_start.long()[request_X]
        new_X = plan.query_start.long()[request_X + 1] - start_X
        seq_len_X = torch.where(is_tile_X, plan.seq_lens[request_X], 0)
        row_XM = first_X.unsqueeze(1) + torch.arange(TILE_ROWS, device=q_THD.device)
        is_row_XM = is_tile_X.unsqueeze(1) & (row_XM < new_X.unsqueeze(1))
        # Rows of nobody read the first token and are written to a row of their own past the end.
        token_XM = torch.where(is_row_XM, start_X.unsqueeze(1) + row_XM, 0)
        target_XM = torch.where(is_row_XM, token_XM, num_tokens)
        # Counted on in rows of nobody, so that the first row of a tile is always the earliest.
        position_XM = (seq_len_X - new_X).unsqueeze(1) + row_XM
        out_XMHD = self._attend(
            q_THD[token_XM], position_XM, plan.req_pool_indices[request_X], seq_len_X, read, layer, plan
        )
        out_THD = q_THD.new_zeros((num_tokens + 1, *q_THD.shape[1:]))
        out_THD.index_copy_(0, target_XM.flatten(), out_XMHD.flatten(0, 1).to(q_THD.dtype))
        return out_THD[:num_tokens]

    def _attend(
        self,
        q_XMHD: torch.Tensor,
        position_XM: torch.Tensor,
        rows_X: torch.Tensor,
        seq_lens_X: torch.Tensor,
        read: KVRead,
        layer: AttentionSpec,
        plan: PagedPlan,
    ) -> torch.Tensor:
        """Returns attention of tiles (float32[X, M, H, D]): online softmax over blocks of keys.

        No row of a tile stands before its first.
        """
        k_SKD, v_SKD, page_table_RC = read.k_buffer, read.v_buffer, read.req_to_token
        num_kv_heads, group = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
        num, rows = position_XM.shape
        # One matrix for each tile and KV head: [rows of the tile and heads of the group, D].
        q_YRD = q_XMHD.float().unflatten(2, (num_kv_heads, group)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        position_X1R1 = position_XM.repeat_interleave(group, dim=1)[:, None, :, None]
        total_YR1 = q_YRD.new_zeros((*q_YRD.shape[:2], 1))
        maximum_YR1 = torch.full_like(total_YR1, -1.0e30)  # finite: a block of nothing seen is no NaN
        acc_YRD = torch.zeros_like(q_YRD)
        for start in range(0, plan.max_seq_len, BLOCK_KEYS):
            key_N = torch.arange(start, start + BLOCK_KEYS, device=q_YRD.device)
            is_key_XN = key_N < seq_lens_X.unsqueeze(1)
            if layer.window is not None:
                # Slots of tokens that left the window were given back; the table still names them.
                is_key_XN = is_key_XN & (key_N > position_XM[:, :1] - layer.window)
            column_N = key_N.clamp(max=page_table_RC.shape[1] - 1)
            slot_XN = torch.where(is_key_XN, page_table_RC[rows_X][:, column_N], SCRATCH_SLOT)
            k_YND = k_SKD[slot_XN].float().transpose(1, 2).flatten(0, 1)
            # What padding left in the scratch slot may be NaN, and zero times NaN is NaN. So may what a
            # neighbour wrote into a slot that had been this request's.
            v_XNKD = v_SKD[slot_XN].float().masked_fill(~is_key_XN[:, :, None, None], 0.0)
            score_YRN = torch.bmm(q_YRD, k_YND.transpose(1, 2)) * layer.scale
            if layer.logit_soft_cap is not None:
                score_YRN = layer.logit_soft_cap * torch.tanh(score_YRN / layer.logit_soft_cap)
            is_seen = is_key_XN[:, None, None, :] & (key_N <= position_X1R1)
            if layer.window is not None:
                is_seen = is_seen & (key_N > position_X1R1 - layer.window)
            score_YRN = torch.where(is_seen, score_YRN.unflatten(0, (num, num_kv_heads)), -torch.inf).flatten(
                0, 1
            )
            new_maximum_YR1 = torch.maximum(maximum_YR1, score_YRN.amax(-1, keepdim=True))
            weight_YRN = torch.exp(score_YRN - new_maximum_YR1)
            shrink_YR1 = torch.exp(maximum_YR1 - new_maximum_YR1)
            total_YR1 = total_YR1 * shrink_YR1 + weight_YRN.sum(-1, keepdim=True)
            acc_YRD = acc_YRD * shrink_YR1 + torch.bmm(weight_YRN, v_XNKD.transpose(1, 2).flatten(0, 1))
            maximum_YR1 = new_maximum_YR1
        out_YRD = acc_YRD / torch.where(total_YR1 > 0, total_YR1, 1.0)
        out_XKMGD = out_YRD.unflatten(0, (num, num_kv_heads)).unflatten(2, (rows, group))
        return out_XKMGD.transpose(1, 2).flatten(2, 3)
