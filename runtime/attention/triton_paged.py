"""Paged attention by Triton kernels: split-KV decode, tiled extend.

On the GPU as it is; on the CPU in Triton's interpreter, for tests. This module must not know how
the kernels work.
"""

from __future__ import annotations

import torch

from ..errors import ConfigError
from .backend import COMPUTING_MODES
from .base import AttentionSpec
from .paged import PagedAttention
from .plan import PagedPlan
from .triton_calls import check_supported, decode_attention, extend_attention, num_splits_for, tile_rows


class TritonAttention(PagedAttention):
    """Paged attention by Triton kernels."""

    name = "triton"
    full_capture_modes = COMPUTING_MODES

    def _tile_rows(self) -> int:
        rows = {tile_rows(layer.head_dim, self._dtype_of(layer)) for layer in self._layers}
        if len(rows) > 1:
            raise ConfigError(
                f"Triton attention needs one tile size for all layers, and these would have {sorted(rows)}: their "
                "head sizes or dtypes differ too much. Build one backend for each kind of layer."
            )
        return rows.pop()

    def _check_layer(self, layer: AttentionSpec) -> None:
        check_supported(layer, self._dtype_of(layer))

    def _dtype_of(self, layer: AttentionSpec) -> torch.dtype:
        return self._pool.of_layer(layer.layer_index).spec.dtype

    def _attend_few(
        self, q_THD: torch.Tensor, page_table_RC: torch.Tensor, layer: AttentionSpec, plan: PagedPlan
    ) -> torch.Tensor:
        return decode_attention(
            q_THD,
            self._pool.k_buffer(layer.layer_index),
            self._pool.v_buffer(layer.layer_index),
            page_table_RC=page_table_RC,
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
        page_table_RC: torch.Tensor,
        layer: AttentionSpec,
        plan: PagedPlan,
    ) -> torch.Tensor:
        return extend_attention(
            q_THD,
            k_TKD,
            v_TKD,
            self._pool.k_buffer(layer.layer_index),
            self._pool.v_buffer(layer.layer_index),
            page_table_RC=page_table_RC,
            rows_B=plan.req_pool_indices,
            seq_lens_B=plan.seq_lens,
            query_start_B=plan.query_start,
            tiles_X2=plan.tiles,
            layer=layer,
        )
