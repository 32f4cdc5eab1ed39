"""Reads the metadata of a GGUF file.

Source: llama.cpp ``gguf-py`` (keys) and ``src/llama-model.cpp`` (what a family assumes unsaid).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_piecewise.runtime.errors import CheckpointError, ConfigError, nearest

from ..config import Activation, DecoderConfig, ExpertsConfig, WindowConfig
from ..rope import FrequencyDivisors, LinearScaling, RopeConfig, RopeScaling, YarnScaling
from .settings import known_architecture, required

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
}
"""A family's name in GGUF files, and in Hugging Face's."""

_GEMMA_PATTERN = (True, True, True, True, True, False)
_GEMMA_27B_LAYERS = 62


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
    word = known_architecture(metadata.get("general.architecture"), ARCHITECTURES, origin)
    architecture, is_gemma = ARCHITECTURES[word], word == "gemma3"
    own = {k.removeprefix(f"{word}."): v for k, v in metadata.items()}
    num_heads = required(own, "attention.head_count", origin)
    hidden_size = required(own, "embedding_length", origin)
    num_layers = required(own, "block_count", origin)
    head_dim = own.get("attention.key_length") or hidden_size // num_heads
    _refuse_unsupported(own, word, head_dim, origin)
    if "token_embd.weight" not in tensor_shapes:
        raise CheckpointError(f"{origin}: holds no token_embd.weight, so it is not a whole language model.")
    experts = _experts(own, origin) if word == "qwen3moe" else None
    family: dict[str, Any] = (
        _gemma_settings(own, hidden_size, num_heads, num_layers, origin) if is_gemma else {}
    )
    return DecoderConfig(
        architecture=architecture,
        vocab_size=tensor_shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        # A model of experts alone may say nothing of a feed-forward that no layer has.
        intermediate_size=own.get("feed_forward_length")
        or (experts.intermediate_size if experts else required(own, "feed_forward_length", origin)),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=own.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=required(own, "attention.layer_norm_rms_epsilon", origin),
        max_positions=required(own, "context_length", origin),
        rope=RopeConfig(
            theta=own.get("rope.freq_base", 1e6 if is_gemma else 10000.0),
            scaling=_scaling(own, rope_divisors, origin),
        ),
        has_tied_embeddings="output.weight" not in tensor_shapes,
        has_qkv_bias=word == "qwen2" or "blk.0.attn_q.bias" in tensor_shapes,
        has_output_bias="blk.0.attn_output.bias" in tensor_shapes,
        has_qk_norm=word in ("qwen3", "qwen3moe", "gemma3"),
        experts=experts,
        **family,
    )


def _refuse_unsupported(own: Mapping[str, Any], word: str, head_dim: int, origin: str) -> None:
    """Raises for settings that would change values and that we do not compute."""
    expected = {"rope.dimension_count": head_dim, "attention.value_length": head_dim}
    if word != "qwen3moe":
        expected["expert_count"] = 0
    if word != "gemma3":
        expected["attention.sliding_window"] = 0
    for key, value in expected.items():
        if own.get(key, value) != value:
            raise CheckpointError(
                f"{origin}: {word}.{key} is {own[key]}; only {value} is supported for this model."
            )


def _experts(own: Mapping[str, Any], origin: str) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=required(own, "expert_count", origin),
        num_experts_per_token=required(own, "expert_used_count", origin),
        intermediate_size=required(own, "expert_feed_forward_length", origin),
    )


def _gemma_settings(
    own: Mapping[str, Any], hidden_size: int, num_heads: int, num_layers: int, origin: str
) -> dict[str, Any]:
    """Returns the fields of a config that only Gemma 3 has; most are not said by the file."""
    scale = None  # head_dim ** -0.5, but for the largest model, whose heads are smaller than its width
    if num_layers == _GEMMA_27B_LAYERS:
        scale = (hidden_size / num_heads) ** -0.5
    return {
        "has_unit_offset_norms": True,
        "has_output_norms": True,
        "activation": Activation.GELU_TANH,
        "embedding_scale": hidden_size**0.5,
        "attention_scale": scale,
        "attention_logit_cap": own.get("attn_logit_softcapping"),
        "final_logit_cap": own.get("final_logit_softcapping"),
        "window": WindowConfig(
            size=required(own, "attention.sliding_window", origin),
            pattern=_GEMMA_PATTERN,
            rope=RopeConfig(theta=own.get("rope.freq_base_swa", 1e4)),
        ),
    }


def _scaling(own: Mapping[str, Any], divisors: tuple[float, ...] | None, origin: str) -> RopeScaling:
    kind = own.get("rope.scaling.type", "none")
    if divisors is not None:
        return FrequencyDivisors(divisors=divisors)
    if kind == "none":
        return RopeConfig().scaling
    if kind == "linear":
        return LinearScaling(factor=required(own, "rope.scaling.factor", origin))
    if kind == "yarn":
        return YarnScaling(
            factor=required(own, "rope.scaling.factor", origin),
            original_max_positions=required(own, "rope.scaling.original_context_length", origin),
        )
    raise ConfigError(
        f"{origin}: RoPE scaling {kind!r} is not supported. {nearest(str(kind), ('none', 'linear', 'yarn'))}"
    )
