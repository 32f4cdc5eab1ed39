"""Causal attention of one sequence without a KV cache, in plain torch."""

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
        q_1HTD, k_1KTD, v_1KTD = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_TKD, v_TKD))
        if layer.logit_soft_cap is not None:
            return _soft_capped(q_1HTD, k_1KTD, v_1KTD, layer).squeeze(0).transpose(0, 1).contiguous()
        mask_TT = None if layer.window is None else _mask(q_THD.shape[0], layer.window, q_THD.device)
        out_1HTD = F.scaled_dot_product_attention(
            q_1HTD,
            k_1KTD,
            v_1KTD,
            attn_mask=mask_TT,
            is_causal=mask_TT is None,
            scale=layer.scale,
            enable_gqa=layer.num_kv_heads != layer.num_heads,
        )
        return out_1HTD.squeeze(0).transpose(0, 1).contiguous()


def _mask(num_tokens: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Returns which key (second dimension) a row sees (bool[T, T], fresh)."""
    row_T1 = torch.arange(num_tokens, device=device).unsqueeze(1)
    key_T = torch.arange(num_tokens, device=device)
    is_seen_TT = key_T <= row_T1
    return is_seen_TT if window is None else is_seen_TT & (key_T > row_T1 - window)


def _soft_capped(
    q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, v_1KTD: torch.Tensor, layer: AttentionSpec
) -> torch.Tensor:
    """Attention whose scores are capped, which SDPA does not know; float32 inside."""
    assert layer.logit_soft_cap is not None
    group = layer.num_heads // layer.num_kv_heads
    k_1HTD, v_1HTD = (x.float().repeat_interleave(group, dim=1) for x in (k_1KTD, v_1KTD))
    score_1HTT = q_1HTD.float() @ k_1HTD.transpose(-1, -2) * layer.scale
    score_1HTT = layer.logit_soft_cap * torch.tanh(score_1HTT / layer.logit_soft_cap)
    mask_TT = _mask(q_1HTD.shape[2], layer.window, q_1HTD.device)
    weight_1HTT = score_1HTT.masked_fill(~mask_TT, -torch.inf).softmax(-1)
    return (weight_1HTT @ v_1HTD).to(q_1HTD.dtype)
