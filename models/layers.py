"""The parts of a decoder layer: norms, attention, feed-forward, and the two ways to join them.

What differs between families is decided when a module is built, so every forward is one straight
line. Fused kernels come from the `KernelSet` that a model is built with. Tensors that a kernel
consumes are not used again.

Shapes: `T` tokens, `H` query heads, `K` KV heads, `D` head size, `E` hidden, `M` feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from sgl_piecewise.runtime.attention.base import AttentionSpec, attend
from sgl_piecewise.runtime.kernels.kernel_set import KernelSet

from .config import Activation, DecoderConfig
from .experts import SparseMLP


@dataclass(frozen=True, kw_only=True)
class Building:
    """What every module of one model is built with.

    Attributes:
        device: Where parameters live.
        dtype: Of parameters and activations.
        kernels: Fused kernels.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: KernelSet


class Linear(nn.Linear):
    """A linear layer whose product is the kernel set's; its parameters are not initialised.

    Args:
        in_features: Size of an input row.
        out_features: Size of an output row.
        bias: Whether a bias is added.
        building: What the model is built with.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, building: Building) -> None:
        super().__init__(in_features, out_features, bias=bias, device="meta", dtype=building.dtype)
        self.to_empty(device=building.device)
        self._product = building.kernels.linear

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Returns the product with the weights, plus the bias (dtype[T, out_features]), fresh."""
        return self._product(x_TE, self.weight, self.bias)


def gate_kernel(activation: Activation, kernels: KernelSet) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what joins gate and up projection."""
    return kernels.silu_mul if activation is Activation.SILU else kernels.gelu_tanh_mul


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension, in float32, and scales.

    Args:
        size: Last dimension.
        eps: Added to the mean square.
        building: What the model is built with.
    """

    def __init__(self, size: int, eps: float, building: Building) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=building.device, dtype=building.dtype))
        self.eps = eps
        self._kernels = building.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normed input, fresh, in its dtype."""
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the normed sum, and the sum; consumes both arguments."""
        return self._kernels.add_rms_norm(x_TE, residual_TE, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention of one layer: projections here, the rest behind the mark."""

    def __init__(self, config: DecoderConfig, layer_index: int, building: Building) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.eps = config.rms_norm_eps
        scale = config.attention_scale
        self.spec = AttentionSpec(
            layer_index=layer_index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5 if scale is None else scale,
            window=config.window_of(layer_index),
            logit_soft_cap=config.attention_logit_cap,
        )
        hidden, rows = config.hidden_size, config.num_heads * config.head_dim
        self.qkv_proj = Linear(
            hidden, sum(self.heads) * config.head_dim, bias=config.has_qkv_bias, building=building
        )
        self.o_proj = Linear(rows, hidden, bias=config.has_output_bias, building=building)
        self.q_norm = self._head_norm(config, building)
        self.k_norm = self._head_norm(config, building)
        self._norm_rotate = building.kernels.norm_rotate

    @staticmethod
    def _head_norm(config: DecoderConfig, building: Building) -> RMSNorm | _NoNorm:
        if not config.has_qk_norm:
            return _NoNorm()
        return RMSNorm(config.head_dim, config.rms_norm_eps, building)

    def forward(self, x_TE: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
        """Returns what attention adds to the residual stream (dtype[T, E]), fresh."""
        qkv = self.qkv_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TKD, v_TKD = qkv.split(self.heads, dim=1)
        q_THD, k_TKD = self._norm_rotate(
            q_THD,
            k_TKD,
            cos_T1D,
            sin_T1D,
            q_weight_D=self.q_norm.weight,
            k_weight_D=self.k_norm.weight,
            eps=self.eps,
        )
        o_THD = attend(q_THD, k_TKD, v_TKD, self.spec)
        return self.o_proj(o_THD.flatten(1))


class _NoNorm(nn.Module):
    """Stands where queries and keys are not normed."""

    weight: None = None


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, config: DecoderConfig, building: Building) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=False, building=building)
        self.down_proj = Linear(inner, hidden, bias=False, building=building)
        self._gate_mul = gate_kernel(config.activation, building.kernels)

    def forward(self, x_TE: torch.Tensor, num_real_tokens: torch.Tensor | None) -> torch.Tensor:
        """Returns what the feed-forward adds to the residual stream (dtype[T, E]), fresh.

        Args:
            x_TE: Normed residual stream.
            num_real_tokens: Not needed here: rows are computed alike and apart, padded ones too.
        """
        return self.down_proj(self._gate_mul(self.gate_up_proj(x_TE)))


def _feed_forward(config: DecoderConfig, layer_index: int, building: Building) -> nn.Module:
    if config.has_experts(layer_index):
        assert config.experts is not None
        gate_mul = gate_kernel(config.activation, building.kernels)
        return SparseMLP(
            config.experts,
            config.hidden_size,
            gate_mul=gate_mul,
            kernels=building.kernels,
            device=building.device,
            dtype=building.dtype,
        )
    return MLP(config, building)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream.

    The feed-forward's addition is left to the next norm, which adds and norms in one kernel.
    """

    def __init__(self, config: DecoderConfig, layer_index: int, building: Building) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, building)
        self.self_attn = Attention(config, layer_index, building)
        self.post_attention_layernorm = RMSNorm(size, eps, building)
        self.mlp = _feed_forward(config, layer_index, building)

    def forward(
        self,
        delta_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        cos_T1D: torch.Tensor,
        sin_T1D: torch.Tensor,
        num_real_tokens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the layer on a residual stream whose last addition is still to be made.

        Args:
            delta_TE: What is to be added (dtype[T, E]); consumed.
            residual_TE: The stream without it (dtype[T, E]); consumed.
            cos_T1D: From the rotary embedding.
            sin_T1D: From the rotary embedding.
            num_real_tokens: From `local_real_tokens`, where a layer of the model has experts.

        Returns:
            ``delta_TE`` and ``residual_TE`` after this layer, fresh.
        """
        x_TE, residual_TE = self.input_layernorm.add(delta_TE, residual_TE)
        x_TE = self.self_attn(x_TE, cos_T1D, sin_T1D)
        x_TE, residual_TE = self.post_attention_layernorm.add(x_TE, residual_TE)
        return self.mlp(x_TE, num_real_tokens), residual_TE


class OutputNormedLayer(nn.Module):
    """A layer in which what attention and feed-forward add is normed as well (Gemma 3)."""

    def __init__(self, config: DecoderConfig, layer_index: int, building: Building) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, building)
        self.self_attn = Attention(config, layer_index, building)
        self.post_attention_layernorm = RMSNorm(size, eps, building)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, building)
        self.mlp = _feed_forward(config, layer_index, building)
        self.post_feedforward_layernorm = RMSNorm(size, eps, building)

    def forward(
        self,
        delta_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        cos_T1D: torch.Tensor,
        sin_T1D: torch.Tensor,
        num_real_tokens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the layer; see `DecoderLayer`."""
        x_TE, residual_TE = self.input_layernorm.add(delta_TE, residual_TE)
        x_TE = self.post_attention_layernorm(self.self_attn(x_TE, cos_T1D, sin_T1D))
        x_TE, residual_TE = self.pre_feedforward_layernorm.add(x_TE, residual_TE)
        return self.post_feedforward_layernorm(self.mlp(x_TE, num_real_tokens)), residual_TE
