"""Paged attention by Triton kernels: split-KV decode, tiled extend.

On the GPU as it is; on the CPU in Triton's interpreter, for tests. This module must not know how
the kernels work.
"""

from __future__ import annotations

import torch

from ..kv.translator import KVRead
from .backend import COMPUTING_MODES
from .base import AttentionSpec
from .paged import PagedAttention
from .plan import PagedPlan
from .triton_calls import check_supported, decode_attention, extend_attention, num_splits_for, tile_rows


class TritonAttention(PagedAttention):
    """Paged attention by Triton kernels."""

    name = "triton"
    full_capture_modes = COMPUTING_MODES

    def _tile_rows(self, layer: AttentionSpec, dtype: torch.dtype) -> int:
        return tile_rows(layer.head_dim, dtype)

    def _check_layer(self, layer: AttentionSpec, dtype: torch.dtype) -> None:
        check_supported(layer, dtype)

    def _attend_few(
        self, q_THD: torch.Tensor, read: KVRead, layer: AttentionSpec, plan: PagedPlan
    ) -> torch.Tensor:
        return decode_attention(
            q_THD,
            read.k_buffer,
            read.v_buffer,
            page_table_RC=read.req_to_token,
            rows_B=plan.req_pool_indices,
            seq_lens_B=plan.seq_lens,
            tokens_per_request=plan.tokens_per_request or 1,
            is_causal=plan.is_causal,
            # From the limits, not from this batch: eager and captured forwards give the same bits.
            num_splits=num_splits_for(plan.num_requests, layer.num_kv_heads, self.limits.max_context),
            layer=layer,
        )

    def _attend_tiles(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        read: KVRead,
        layer: AttentionSpec,
        plan: PagedPlan,
    ) -> torch.Tensor:
        return extend_attention(
            q_THD,
            k_TKD,
            v_TKD,
            read.k_buffer,
            read.v_buffer,
            page_table_RC=read.req_to_token,
            rows_B=plan.req_pool_indices,
            seq_lens_B=plan.seq_lens,
            query_start_B=plan.query_start,
            tiles_X2=plan.tiles,
            layer=layer,
        )
