"""What a decoder model is made of: sizes, RoPE, and which of the families' variations it has.

Holds `DecoderConfig` and its readers for Hugging Face's ``config.json`` and GGUF metadata. The
variations are plain booleans, so nothing outside this file asks which family a model is of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_piecewise.runtime.errors import CheckpointError, ConfigError, nearest

from .rope import (
    FrequencyDivisors,
    LinearScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    rope_config_from_hf,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Families that can be loaded; SmolLM2 is a ``llama`` by its own config."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder model's constants.

    Attributes:
        architecture: One of ``ARCHITECTURES``; for reports and errors.
        vocab_size: Tokens the model can name (`V`).
        hidden_size: Width of the residual stream (`E`).
        intermediate_size: Width inside the feed-forward (`M`).
        num_layers: Decoder layers.
        num_heads: Query heads (`H`).
        num_kv_heads: Key and value heads (`K`); `H` is a multiple of it.
        head_dim: Head size (`D`), even; not always ``hidden_size / num_heads``.
        rms_norm_eps: Added to the mean square in every norm.
        max_positions: Longest sequence that the model was made for.
        rope: Rotary embedding.
        has_tied_embeddings: The output layer is the embedding table.
        has_qkv_bias: Queries, keys and values have a bias (Qwen2).
        has_output_bias: The attention's output projection has one.
        has_qk_norm: Queries and keys are normed per head (Qwen3).

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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{field.name} must be a positive whole number, got {value!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads}): "
                "every key and value head serves equally many query heads."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even to be rotated in pairs, got {self.head_dim}.")

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


def config_from_hf(settings: Mapping[str, Any], *, origin: str) -> DecoderConfig:
    """Reads a Hugging Face ``config.json``.

    Args:
        settings: Its content.
        origin: Its path, for errors.

    Raises:
        CheckpointError: The architecture is unknown, or a setting is missing or not supported.
        ConfigError: The RoPE scaling is unknown, or sizes contradict each other.
    """
    architecture = _known_architecture(settings.get("model_type"), origin)
    _refuse_unsupported(settings, origin)
    num_heads = _required(settings, "num_attention_heads", origin)
    hidden_size = _required(settings, "hidden_size", origin)
    # The defaults below are those of transformers' own config classes, which leave them unsaid.
    default_head_dim = 128 if architecture == "qwen3" else hidden_size // num_heads
    max_positions = settings.get("max_position_embeddings", 2048 if architecture == "llama" else 32768)
    has_bias = bool(settings.get("attention_bias", False))
    rope = rope_config_from_hf(settings, max_positions=max_positions, origin=origin)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_required(settings, "vocab_size", origin),
        hidden_size=hidden_size,
        intermediate_size=_required(settings, "intermediate_size", origin),
        num_layers=_required(settings, "num_hidden_layers", origin),
        num_heads=num_heads,
        num_kv_heads=settings.get("num_key_value_heads") or num_heads,
        head_dim=settings.get("head_dim") or default_head_dim,
        rms_norm_eps=settings.get("rms_norm_eps", 1e-6),
        max_positions=max(max_positions, _stretched_positions(rope.scaling)),
        rope=rope,
        has_tied_embeddings=bool(settings.get("tie_word_embeddings", False)),
        has_qkv_bias=architecture == "qwen2" or has_bias,
        has_output_bias=architecture != "qwen2" and has_bias,
        has_qk_norm=architecture == "qwen3",
    )


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_divisors: tuple[float, ...] | None = None,
    origin: str,
) -> DecoderConfig:
    """Reads the metadata of a GGUF file.

    Args:
        metadata: Key to value, as in the file.
        tensor_shapes: GGUF tensor name to shape, rows first; biases and tied embeddings show there.
        rope_divisors: Content of ``rope_freqs.weight`` where the file has it.
        origin: The file's path, for errors.

    Raises:
        CheckpointError: The architecture is unknown, or a setting is missing or not supported.
        ConfigError: The RoPE scaling is unknown, or sizes contradict each other.
    """
    architecture = _known_architecture(metadata.get("general.architecture"), origin)
    own = {k.removeprefix(f"{architecture}."): v for k, v in metadata.items()}
    num_heads = _required(own, "attention.head_count", origin)
    hidden_size = _required(own, "embedding_length", origin)
    head_dim = own.get("attention.key_length") or hidden_size // num_heads
    for key, expected in (
        ("rope.dimension_count", head_dim),
        ("attention.value_length", head_dim),
        ("expert_count", 0),
        ("attention.sliding_window", 0),
    ):
        if own.get(key, expected) != expected:
            raise CheckpointError(
                f"{origin}: {architecture}.{key} is {own[key]}; only {expected} is supported for this model."
            )
    if "token_embd.weight" not in tensor_shapes:
        raise CheckpointError(f"{origin}: holds no token_embd.weight, so it is not a whole language model.")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=tensor_shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=_required(own, "feed_forward_length", origin),
        num_layers=_required(own, "block_count", origin),
        num_heads=num_heads,
        num_kv_heads=own.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=_required(own, "attention.layer_norm_rms_epsilon", origin),
        max_positions=_required(own, "context_length", origin),
        rope=RopeConfig(
            theta=own.get("rope.freq_base", 10000.0),
            scaling=_gguf_scaling(own, rope_divisors, origin),
        ),
        has_tied_embeddings="output.weight" not in tensor_shapes,
        has_qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in tensor_shapes,
        has_output_bias="blk.0.attn_output.bias" in tensor_shapes,
        has_qk_norm=architecture == "qwen3",
    )


def _known_architecture(word: Any, origin: str) -> str:
    if word in ARCHITECTURES:
        return str(word)
    if word is None:
        raise CheckpointError(f"{origin}: names no architecture. Known: {', '.join(ARCHITECTURES)}.")
    raise CheckpointError(
        f"{origin}: architecture {word!r} is not supported. {nearest(str(word), ARCHITECTURES)}"
    )


def _required(settings: Mapping[str, Any], key: str, origin: str) -> Any:
    value = settings.get(key)
    if value is None:
        raise CheckpointError(
            f"{origin}: the setting {key!r} is missing, and the model cannot be built without it."
        )
    return value


def _refuse_unsupported(settings: Mapping[str, Any], origin: str) -> None:
    """Raises for settings of ``config.json`` that would change values and that we do not compute."""
    layer_types = set(settings.get("layer_types") or ["full_attention"])
    refusals = {
        "hidden_act": settings.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(settings.get("mlp_bias")),
        "quantization_config": settings.get("quantization_config") is not None,
        "use_sliding_window": bool(settings.get("use_sliding_window")),
        "layer_types": layer_types != {"full_attention"},
    }
    for key, is_refused in refusals.items():
        if is_refused:
            raise CheckpointError(
                f"{origin}: {key} = {settings[key]!r} is not supported: models here use SiLU without bias, "
                "full attention in every layer and unquantised weights."
            )


def _stretched_positions(scaling: RopeScaling) -> int:
    """Returns the context length that YaRN reaches, which ``max_position_embeddings`` need not say."""
    if isinstance(scaling, YarnScaling):
        return int(scaling.factor * scaling.original_max_positions)
    return 0


def _gguf_scaling(own: Mapping[str, Any], divisors: tuple[float, ...] | None, origin: str) -> RopeScaling:
    kind = own.get("rope.scaling.type", "none")
    if divisors is not None:
        return FrequencyDivisors(divisors=divisors)
    if kind == "none":
        return RopeConfig().scaling
    if kind == "linear":
        return LinearScaling(factor=_required(own, "rope.scaling.factor", origin))
    if kind == "yarn":
        return YarnScaling(
            factor=_required(own, "rope.scaling.factor", origin),
            original_max_positions=_required(own, "rope.scaling.original_context_length", origin),
        )
    raise ConfigError(
        f"{origin}: RoPE scaling {kind!r} is not supported. {nearest(str(kind), ('none', 'linear', 'yarn'))}"
    )
