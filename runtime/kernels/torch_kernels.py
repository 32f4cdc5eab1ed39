"""The kernels in plain torch: what every other set must equal within rounding.

Shapes: `T` tokens, `H` query heads, `K` KV heads, `D` head size, `E` hidden, `M` feed-forward,
`S` slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides by the root mean square over the last dimension, in float32, and scales; fresh."""
    x_float = x.float()
    mean_square = x_float.square().mean(-1, keepdim=True)
    return weight * (x_float * torch.rsqrt(mean_square + eps)).to(x.dtype)


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normed sum of two tensors, and the sum, fresh."""
    total_TE = x_TE + residual_TE
    return rms_norm(total_TE, weight_E, eps), total_TE


def silu_mul(gate_up_TM2: torch.Tensor) -> torch.Tensor:
    """Returns SiLU of the first half times the second (dtype[T, M]), fresh."""
    gate_TM, up_TM = gate_up_TM2.chunk(2, dim=-1)
    return F.silu(gate_TM) * up_TM


def gelu_tanh_mul(gate_up_TM2: torch.Tensor) -> torch.Tensor:
    """Returns GELU (tanh form) of the first half times the second (dtype[T, M]), fresh."""
    gate_TM, up_TM = gate_up_TM2.chunk(2, dim=-1)
    return F.gelu(gate_TM, approximate="tanh") * up_TM


def norm_rotate(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    cos_T1D: torch.Tensor,
    sin_T1D: torch.Tensor,
    *,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms queries and keys per head, if weights are given, and rotates them; fresh."""
    if q_weight_D is not None and k_weight_D is not None:
        q_THD, k_TKD = rms_norm(q_THD, q_weight_D, eps), rms_norm(k_TKD, k_weight_D, eps)
    return _rotate(q_THD, cos_T1D, sin_T1D), _rotate(k_TKD, cos_T1D, sin_T1D)


def _rotate(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_T1D + torch.cat((-second, first), dim=-1) * sin_T1D


def write_kv(
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    slots_T: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
) -> None:
    """Writes keys and values of tokens into rows of a pool."""
    k_SKD.index_copy_(0, slots_T, k_TKD.to(k_SKD.dtype))
    v_SKD.index_copy_(0, slots_T, v_TKD.to(v_SKD.dtype))
