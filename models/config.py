"""What a decoder model is made of: sizes, RoPE, and which of the families' variations it has.

Holds `DecoderConfig`; readers for the two kinds of checkpoint are in `models/weights/`. The
variations are plain values, so nothing outside the readers asks which family a model is of.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from sgl_piecewise.runtime.errors import ConfigError

from .rope import RopeConfig


class Activation(enum.Enum):
    """What the gate of a feed-forward goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


def _check_counts(config: Any) -> None:
    """Raises unless every whole-number field of a dataclass is one and at least 1."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{field.name} must be a positive whole number, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """Layers that see a sliding window, among layers that see everything.

    Attributes:
        size: Tokens that a token sees, itself included.
        pattern: Whether a layer has the window, from the first layer on; repeated as often as needed.
        rope: Rotary embedding of the layers that have it.

    Raises:
        ConfigError: No pattern, or a size under one.
    """

    size: int
    pattern: tuple[bool, ...]
    rope: RopeConfig

    def __post_init__(self) -> None:
        _check_counts(self)
        if not self.pattern:
            raise ConfigError("The pattern of sliding-window layers is empty; name each layer's kind.")

    def has_window(self, layer_index: int) -> bool:
        """Tells whether a layer has the window."""
        return self.pattern[layer_index % len(self.pattern)]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts in the place of a feed-forward.

    Attributes:
        num_experts: Experts of a layer (`X`).
        num_experts_per_token: How many of them compute each token.
        intermediate_size: Width inside one expert.
        is_normalised: The chosen experts' weights are divided by their sum.
        sparse_step: Every so many layers one has experts: those whose number, from 1, it divides.
        dense_layers: Indices of layers that have none all the same.

    Raises:
        ConfigError: The sizes contradict each other.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    is_normalised: bool = True
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_counts(self)
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_token ({self.num_experts_per_token}) is over num_experts ({self.num_experts})."
            )

    def has_experts(self, layer_index: int) -> bool:
        """Tells whether a layer has experts."""
        return layer_index not in self.dense_layers and (layer_index + 1) % self.sparse_step == 0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder model's constants.

    Attributes:
        architecture: One of ``ARCHITECTURES`` of the checkpoint readers; for reports and errors.
        vocab_size: Tokens the model can name (`V`).
        hidden_size: Width of the residual stream (`E`).
        intermediate_size: Width inside the feed-forward (`M`).
        num_layers: Decoder layers.
        num_heads: Query heads (`H`).
        num_kv_heads: Key and value heads (`K`); `H` is a multiple of it.
        head_dim: Head size (`D`), even; not always ``hidden_size / num_heads``.
        rms_norm_eps: Added to the mean square in every norm.
        max_positions: Longest sequence that the model was made for.
        rope: Rotary embedding; with ``window``, of the layers that see everything.
        has_tied_embeddings: The output layer is the embedding table.
        has_qkv_bias: Queries, keys and values have a bias (Qwen2).
        has_output_bias: The attention's output projection has one.
        has_qk_norm: Queries and keys are normed per head (Qwen3, Gemma 3).
        has_unit_offset_norms: Hugging Face checkpoints hold norm weights less one (Gemma 3); ours are whole.
        has_output_norms: What attention and feed-forward add is normed too (Gemma 3).
        activation: Of the feed-forward's gate.
        embedding_scale: Factor on the embedding of every token.
        attention_scale: Factor on attention scores; None for ``head_dim ** -0.5``.
        attention_logit_cap: Soft cap on attention scores; None for none.
        final_logit_cap: Soft cap on the model's logits; None for none.
        window: Which layers see a sliding window; None where all see everything.
        experts: Mixture of experts; None where every layer has one feed-forward.

    Raises:
        ConfigError: The sizes contradict each other.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    has_tied_embeddings: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    has_unit_offset_norms: bool = False
    has_output_norms: bool = False
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_logit_cap: float | None = None
    final_logit_cap: float | None = None
    window: WindowConfig | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        _check_counts(self)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads}): "
                "every key and value head serves equally many query heads."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even to be rotated in pairs, got {self.head_dim}.")
        for name in ("attention_scale", "attention_logit_cap", "final_logit_cap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be over 0, got {value!r}.")

    def window_of(self, layer_index: int) -> int | None:
        """Returns how many tokens a layer's tokens see, themselves included; None for all before."""
        if self.window is None or not self.window.has_window(layer_index):
            return None
        return self.window.size

    def has_experts(self, layer_index: int) -> bool:
        """Tells whether a layer is a mixture of experts."""
        return self.experts is not None and self.experts.has_experts(layer_index)

    def with_num_layers(self, num_layers: int) -> DecoderConfig:
        """Returns the same model with another depth."""
        return dataclasses.replace(self, num_layers=num_layers)

    def check_length(self, num_tokens: int) -> None:
        """Checks that a sequence is no longer than the model was made for.

        Raises:
            ConfigError: It is longer; positions beyond would give wrong or meaningless results.
        """
        if num_tokens > self.max_positions:
            raise ConfigError(
                f"A sequence of {num_tokens} tokens is longer than the {self.max_positions} positions "
                "that this model was made for. Use a shorter text or smaller capture sizes."
            )
