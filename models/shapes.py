"""Named shapes: published models by their dimensions, to be filled with random weights.

Source: the ``config.json`` that each model was published with.
"""

from __future__ import annotations

import dataclasses

from sgl_piecewise.runtime.errors import ConfigError, nearest

from .config import Activation, DecoderConfig, ExpertsConfig, WindowConfig
from .rope import Llama3Scaling, RopeConfig


def _qwen3(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, *, is_tied: bool
) -> DecoderConfig:
    return DecoderConfig(
        architecture="qwen3",
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_positions=40960,
        rope=RopeConfig(theta=1e6),
        has_tied_embeddings=is_tied,
        has_qk_norm=True,
    )


def _llama3(
    hidden_size: int, intermediate_size: int, num_layers: int, *, head_dim: int, factor: float, is_tied: bool
) -> DecoderConfig:
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    return DecoderConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_positions=131072,
        rope=RopeConfig(theta=5e5, scaling=scaling),
        has_tied_embeddings=is_tied,
    )


def _smollm2(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int, theta: float
) -> DecoderConfig:
    return DecoderConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_positions=8192,
        rope=RopeConfig(theta=theta),
        has_tied_embeddings=True,
    )


def _qwen25(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    max_positions: int,
    is_tied: bool,
) -> DecoderConfig:
    return DecoderConfig(
        architecture="qwen2",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        rms_norm_eps=1e-6,
        max_positions=max_positions,
        rope=RopeConfig(theta=1e6),
        has_tied_embeddings=is_tied,
        has_qkv_bias=True,
    )


def _gemma3(
    hidden_size: int, intermediate_size: int, num_layers: int, *, window: int, max_positions: int
) -> DecoderConfig:
    return DecoderConfig(
        architecture="gemma3_text",
        vocab_size=262144,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        rms_norm_eps=1e-6,
        max_positions=max_positions,
        rope=RopeConfig(theta=1e6),
        has_tied_embeddings=True,
        has_qk_norm=True,
        has_unit_offset_norms=True,
        has_output_norms=True,
        activation=Activation.GELU_TANH,
        embedding_scale=hidden_size**0.5,
        window=WindowConfig(
            size=window, pattern=(True, True, True, True, True, False), rope=RopeConfig(theta=1e4)
        ),
    )


_QWEN3_30B_A3B = DecoderConfig(
    architecture="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    max_positions=40960,
    rope=RopeConfig(theta=1e6),
    has_qk_norm=True,
    experts=ExpertsConfig(num_experts=128, num_experts_per_token=8, intermediate_size=768),
)

_TINY = DecoderConfig(
    architecture="qwen3",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,  # not hidden_size / num_heads, as in Qwen3
    rms_norm_eps=1e-6,
    max_positions=4096,
    rope=RopeConfig(theta=1e4),
    has_qk_norm=True,
)

_TINY_MOE = dataclasses.replace(
    _TINY,
    architecture="qwen3_moe",
    experts=ExpertsConfig(num_experts=8, num_experts_per_token=3, intermediate_size=48),
)

_TINY_GEMMA3 = dataclasses.replace(
    _TINY,
    architecture="gemma3_text",
    num_layers=3,
    has_tied_embeddings=True,
    has_unit_offset_norms=True,
    has_output_norms=True,
    activation=Activation.GELU_TANH,
    embedding_scale=8.0,
    window=WindowConfig(size=16, pattern=(True, True, False), rope=RopeConfig(theta=300.0)),
)

SHAPES: dict[str, DecoderConfig] = {
    "tiny": _TINY,
    "tiny-moe": _TINY_MOE,
    "tiny-gemma3": _TINY_GEMMA3,
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3, 1e5),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, 1.3e5),
    "qwen2.5-0.5b": _qwen25(151936, 896, 4864, 24, 14, 2, max_positions=32768, is_tied=True),
    "qwen2.5-7b": _qwen25(152064, 3584, 18944, 28, 28, 4, max_positions=131072, is_tied=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, is_tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, is_tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, is_tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, is_tied=False),
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "gemma3-270m": _gemma3(640, 2048, 18, window=512, max_positions=32768),
    "gemma3-1b": _gemma3(1152, 6912, 26, window=512, max_positions=32768),
    "llama-3.2-1b": _llama3(2048, 8192, 16, head_dim=64, factor=32.0, is_tied=True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, head_dim=128, factor=8.0, is_tied=False),
}
"""Name to dimensions; those that begin with ``tiny`` are made up, for tests."""


def named_shape(name: str) -> DecoderConfig:
    """Returns the dimensions of a named shape.

    Raises:
        ConfigError: No shape has this name.
    """
    if name not in SHAPES:
        raise ConfigError(f"No shape is named {name!r}. {nearest(name, SHAPES)}")
    return SHAPES[name]
