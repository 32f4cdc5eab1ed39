"""The decoder model: embedding, equal layers, final norm, output layer.

Plain PyTorch for one flat batch of tokens. It covers Llama, Qwen2, Qwen3 and SmolLM2; what differs
between them is decided when a module is built, so every forward is one straight line. Whoever runs
the model opens a forward context, which says what attention is.

Shapes: `T` tokens, `H` query heads, `K` KV heads, `D` head size, `E` hidden, `M` feed-forward,
`V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import skip_init

from sgl_piecewise.runtime.attention.base import AttentionSpec, attend
from sgl_piecewise.runtime.kernels.kernel_set import TORCH_KERNELS, KernelSet

from .config import DecoderConfig
from .rope import RotaryEmbedding


def _linear(
    in_features: int, out_features: int, *, bias: bool, device: torch.device, dtype: torch.dtype
) -> nn.Linear:
    """Returns a linear layer whose parameters are not initialised."""
    layer = skip_init(nn.Linear, in_features, out_features, bias=bias, device=device, dtype=dtype)
    assert isinstance(layer, nn.Linear)
    return layer


class AddRMSNorm(nn.Module):
    """Adds to the residual stream and norms it: divides by its root mean square, and scales.

    Args:
        size: Last dimension.
        eps: Added to the mean square.
        kernels: What computes it.
        device: Where the weight lives.
        dtype: Of the weight.
    """

    def __init__(
        self, size: int, eps: float, *, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.eps = eps
        self.kernels = kernels

    def forward(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the normed sum and the sum (dtype[T, E] each); consumes both arguments."""
        return self.kernels.add_rms_norm(x_TE, residual_TE, self.weight, self.eps)


class HeadNorm(nn.Module):
    """Holds the weight of a norm per head, which one kernel applies together with RoPE."""

    def __init__(self, head_dim: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))


class Attention(nn.Module):
    """Grouped-query attention of one layer: projections here, the rest behind the mark."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_index: int,
        *,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.head_dim = config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.spec = AttentionSpec(
            layer_index=layer_index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        self.qkv_proj = _linear(
            config.hidden_size,
            sum(self.heads) * config.head_dim,
            bias=config.has_qkv_bias,
            device=device,
            dtype=dtype,
        )
        self.o_proj = _linear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.has_output_bias,
            device=device,
            dtype=dtype,
        )
        self.eps = config.rms_norm_eps
        self.q_norm = self._head_norm(config, device, dtype)
        self.k_norm = self._head_norm(config, device, dtype)

    @staticmethod
    def _head_norm(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> HeadNorm | None:
        return HeadNorm(config.head_dim, device=device, dtype=dtype) if config.has_qk_norm else None

    def forward(self, x_TE: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
        """Returns what attention adds to the residual stream (dtype[T, E]), fresh."""
        qkv = self.qkv_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TKD, v_TKD = qkv.split(self.heads, dim=1)
        q_THD, k_TKD = self.kernels.norm_rotate(
            q_THD,
            k_TKD,
            cos_T1D,
            sin_T1D,
            q_weight_D=None if self.q_norm is None else self.q_norm.weight,
            k_weight_D=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
        )
        o_THD = attend(q_THD, k_TKD, v_TKD, self.spec)
        return self.o_proj(o_THD.flatten(1))


class MLP(nn.Module):
    """Gated feed-forward with SiLU."""

    def __init__(
        self, config: DecoderConfig, *, kernels: KernelSet, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.kernels = kernels
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = _linear(hidden, 2 * inner, bias=False, device=device, dtype=dtype)
        self.down_proj = _linear(inner, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Returns what the feed-forward adds to the residual stream (dtype[T, E]), fresh."""
        return self.down_proj(self.kernels.silu_mul(self.gate_up_proj(x_TE)))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm that first adds to the residual stream."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_index: int,
        *,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = AddRMSNorm(size, eps, kernels=kernels, device=device, dtype=dtype)
        self.self_attn = Attention(config, layer_index, kernels=kernels, device=device, dtype=dtype)
        self.post_attention_layernorm = AddRMSNorm(size, eps, kernels=kernels, device=device, dtype=dtype)
        self.mlp = MLP(config, kernels=kernels, device=device, dtype=dtype)

    def forward(
        self,
        x_TE: torch.Tensor,
        residual_TE: torch.Tensor,
        cos_T1D: torch.Tensor,
        sin_T1D: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the layer.

        Args:
            x_TE: What the layer before adds to the residual stream (dtype[T, E]); consumed.
            residual_TE: The stream before that (dtype[T, E]); consumed.
            cos_T1D: From `RotaryEmbedding` (dtype[T, 1, D]).
            sin_T1D: From `RotaryEmbedding` (dtype[T, 1, D]).

        Returns:
            What this layer's feed-forward adds, and the stream before that (dtype[T, E] each).
        """
        x_TE, residual_TE = self.input_layernorm(x_TE, residual_TE)
        x_TE = self.self_attn(x_TE, cos_T1D, sin_T1D)
        x_TE, residual_TE = self.post_attention_layernorm(x_TE, residual_TE)
        return self.mlp(x_TE), residual_TE


class Decoder(nn.Module):
    """A decoder-only language model, for inference.

    Its parameters are **not initialised** when it is built: a loader of ``models.weights`` fills
    all of them, or raises. They do not require gradients.

    Args:
        config: Sizes and variations.
        device: Where parameters live.
        dtype: Of parameters and activations.
        kernels: What computes norms, RoPE and the activation; see ``kernel_set``.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        kernels: KernelSet = TORCH_KERNELS,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        embedding = skip_init(nn.Embedding, config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        assert isinstance(embedding, nn.Embedding)
        self.embed_tokens = embedding
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, kernels=kernels, device=device, dtype=dtype)
            for index in range(config.num_layers)
        )
        self.norm = AddRMSNorm(
            config.hidden_size, config.rms_norm_eps, kernels=kernels, device=device, dtype=dtype
        )
        if config.has_tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
            self.lm_head.weight = self.embed_tokens.weight
        else:
            self.lm_head = _linear(
                config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype
            )
        self.requires_grad_(False)

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Runs the model on one flat batch of tokens, inside a forward context.

        Args:
            input_ids_T: Token ids (int64[T]).
            positions_T: Position of each token in its sequence (int64[T]).

        Returns:
            ``logits_TV`` (dtype[T, V]), fresh.
        """
        return self.compute_logits(self.hidden_states(input_ids_T, positions_T))

    def hidden_states(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Runs everything but the output layer; arguments as in `forward`.

        Returns:
            ``hidden_TE`` after the final norm (dtype[T, E]), fresh.
        """
        x_TE = self.embed_tokens(input_ids_T)
        cos_T1D, sin_T1D = self.rotary(positions_T, x_TE.dtype)
        residual_TE = torch.zeros_like(x_TE)  # so that the first layer is like the others
        for layer in self.layers:
            x_TE, residual_TE = layer(x_TE, residual_TE, cos_T1D, sin_T1D)
        hidden_TE, _ = self.norm(x_TE, residual_TE)
        return hidden_TE

    def compute_logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Applies the output layer to all rows, or to those that the caller picked.

        Args:
            hidden_TE: From `hidden_states` (dtype[T, E]).

        Returns:
            ``logits_TV`` (dtype[T, V]), fresh.
        """
        return self.lm_head(hidden_TE)
