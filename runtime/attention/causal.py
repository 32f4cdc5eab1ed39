"""Causal attention of one sequence without a KV cache, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import torch_private
from .base import AttentionSpec

# Up to here flash attention takes less of the host and of the device than what SDPA chooses (cuDNN's on an H200:
# 10 us and 1.5 us more at 4 to 64 tokens, and less from 256 on; docs/lab-notes.md).
_FEW_TOKENS = 64


class CausalAttention:
    """Attends every token to itself and those before it; row `T` never sees rows after it.

    So padding at the tail of a batch cannot reach real rows.
    """

    def __init__(self) -> None:
        self._has_flash = (
            torch.cuda.is_available()
            and torch.version.hip is None
            and all(
                torch.cuda.get_device_capability(index) >= (8, 0)
                for index in range(torch.cuda.device_count())
            )
        )

    def run(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec
    ) -> torch.Tensor:
        """Returns ``o_THD`` (fresh, contiguous); see `attend` for the arguments."""
        q_1HTD, k_1KTD, v_1KTD = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_TKD, v_TKD))
        if layer.logit_soft_cap is not None:
            return _soft_capped(q_1HTD, k_1KTD, v_1KTD, layer).squeeze(0).transpose(0, 1).contiguous()
        if layer.window is None and q_THD.shape[0] <= _FEW_TOKENS and self._takes_flash(q_THD):
            out_1HTD = torch_private.flash_attention(q_1HTD, k_1KTD, v_1KTD, scale=layer.scale)
            return out_1HTD.squeeze(0).transpose(0, 1).contiguous()
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

    def _takes_flash(self, q_THD: torch.Tensor) -> bool:
        return (
            self._has_flash
            and q_THD.is_cuda
            and q_THD.dtype in (torch.bfloat16, torch.float16)
            and q_THD.shape[-1] % 8 == 0
            and q_THD.shape[-1] <= 256
        )


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
