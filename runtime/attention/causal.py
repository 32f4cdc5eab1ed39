"""Causal attention of one sequence without a KV cache, by PyTorch's SDPA."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .base import AttentionSpec


class CausalAttention:
    """Attends every token to itself and those before it; row `T` never sees rows after it.

    So padding at the tail of a batch cannot reach real rows.
    """

    def run(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec
    ) -> torch.Tensor:
        """Returns ``o_THD`` (fresh, contiguous); see `attend` for the arguments."""
        out_1HTD = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1).unsqueeze(0),
            k_TKD.transpose(0, 1).unsqueeze(0),
            v_TKD.transpose(0, 1).unsqueeze(0),
            is_causal=True,
            scale=layer.scale,
            enable_gqa=layer.num_kv_heads != layer.num_heads,
        )
        return out_1HTD.squeeze(0).transpose(0, 1).contiguous()
