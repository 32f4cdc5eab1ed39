"""Reads a Hugging Face ``config.json``.

Source of the settings' names and defaults: transformers' config classes of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_piecewise.runtime.errors import CheckpointError

from ..config import Activation, DecoderConfig, ExpertsConfig, WindowConfig
from ..rope import RopeConfig, RopeScaling, YarnScaling, rope_config_from_hf
from .settings import known_architecture, required, shortest_period


@dataclass(frozen=True, kw_only=True)
class _Defaults:
    """What a family's config class assumes where ``config.json`` says nothing."""

    max_positions: int = 32768
    head_dim: int | None = None
    is_tied: bool = False


_FAMILIES = {
    "llama": _Defaults(max_positions=2048),
    "qwen2": _Defaults(),
    "qwen3": _Defaults(head_dim=128),
    "qwen3_moe": _Defaults(),
    "gemma3_text": _Defaults(max_positions=131072, head_dim=256, is_tied=True),
}

ARCHITECTURES = tuple(_FAMILIES)
"""Families that can be loaded; SmolLM2 is a ``llama`` by its own config."""

_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_local_base_freq",
    "sliding_window",
    "sliding_window_pattern",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_FULL, _SLIDING = "full_attention", "sliding_attention"


def config_from_hf(settings: Mapping[str, Any], *, origin: str) -> DecoderConfig:
    """Reads a Hugging Face ``config.json``.

    Args:
        settings: Its content.
        origin: Its path, for errors.

    Raises:
        CheckpointError: The architecture is unknown, or a setting is missing or not supported.
        ConfigError: The RoPE scaling is unknown, or sizes contradict each other.
    """
    architecture = known_architecture(settings.get("model_type"), ARCHITECTURES, origin)
    defaults, is_gemma = _FAMILIES[architecture], architecture == "gemma3_text"
    _refuse_unsupported(settings, is_gemma, origin)
    _check_numbers(settings, origin)
    num_heads = required(settings, "num_attention_heads", origin)
    hidden_size = required(settings, "hidden_size", origin)
    max_positions = settings.get("max_position_embeddings", defaults.max_positions)
    has_bias = bool(settings.get("attention_bias", False))
    rope_settings = _rope_settings_of(settings, _FULL, 1e6) if is_gemma else settings
    rope = rope_config_from_hf(rope_settings, max_positions=max_positions, origin=origin)
    family: dict[str, Any] = _gemma_settings(settings, hidden_size, max_positions, origin) if is_gemma else {}
    return DecoderConfig(
        architecture=architecture,
        vocab_size=required(settings, "vocab_size", origin),
        hidden_size=hidden_size,
        intermediate_size=required(settings, "intermediate_size", origin),
        num_layers=required(settings, "num_hidden_layers", origin),
        num_heads=num_heads,
        num_kv_heads=settings.get("num_key_value_heads") or num_heads,
        head_dim=settings.get("head_dim") or defaults.head_dim or hidden_size // num_heads,
        rms_norm_eps=settings.get("rms_norm_eps", 1e-6),
        max_positions=max(max_positions, _stretched_positions(rope.scaling)),
        rope=rope,
        has_tied_embeddings=bool(settings.get("tie_word_embeddings", defaults.is_tied)),
        has_qkv_bias=architecture == "qwen2" or has_bias,
        has_output_bias=architecture != "qwen2" and has_bias,
        has_qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3_text"),
        experts=_experts(settings, origin) if architecture == "qwen3_moe" else None,
        **family,
    )


def _experts(settings: Mapping[str, Any], origin: str) -> ExpertsConfig:
    """Returns the mixture of experts, under either name that transformers gives their number."""
    num_experts = settings.get("num_experts") or required(settings, "num_local_experts", origin)
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=required(settings, "num_experts_per_tok", origin),
        intermediate_size=required(settings, "moe_intermediate_size", origin),
        is_normalised=bool(settings.get("norm_topk_prob", False)),
        sparse_step=settings.get("decoder_sparse_step", 1),
        dense_layers=tuple(settings.get("mlp_only_layers") or ()),
    )


def _gemma_settings(
    settings: Mapping[str, Any], hidden_size: int, max_positions: int, origin: str
) -> dict[str, Any]:
    """Returns the fields of a config that only Gemma 3 has."""
    scalar = settings.get("query_pre_attn_scalar")
    window_rope = rope_config_from_hf(
        _rope_settings_of(settings, _SLIDING, 1e4), max_positions=max_positions, origin=origin
    )
    return {
        "has_unit_offset_norms": True,
        "has_output_norms": True,
        "activation": Activation.GELU_TANH,
        "embedding_scale": hidden_size**0.5,
        "attention_scale": (256 if scalar is None else scalar) ** -0.5,
        "attention_logit_cap": settings.get("attn_logit_softcapping"),
        "final_logit_cap": settings.get("final_logit_softcapping"),
        "window": _window(settings, window_rope, origin),
    }


def _window(settings: Mapping[str, Any], rope: RopeConfig, origin: str) -> WindowConfig | None:
    """Returns which layers have a sliding window: as listed, or all but every sixth."""
    kinds = settings.get("layer_types")
    if kinds is None:
        period = settings.get("sliding_window_pattern") or settings.get("_sliding_window_pattern") or 6
        kinds = [_SLIDING] * (period - 1) + [_FULL]
    pattern = tuple(kind == _SLIDING for kind in kinds)
    if not any(pattern):
        return None
    return WindowConfig(
        size=required(settings, "sliding_window", origin), pattern=shortest_period(pattern), rope=rope
    )


def _rope_settings_of(settings: Mapping[str, Any], kind: str, theta: float) -> dict[str, Any]:
    """Returns the RoPE settings of one kind of layer, as if they were the whole model's.

    Newer files hold one set for each kind; older ones hold a second base for the layers with a
    window, which are never scaled.
    """
    given = settings.get("rope_parameters") or {}
    if _FULL in given or _SLIDING in given:
        return {"rope_parameters": {"rope_theta": theta, **(given.get(kind) or {})}}
    if kind == _SLIDING:
        return {"rope_theta": settings.get("rope_local_base_freq", theta)}
    return {"rope_theta": theta, **settings}


def _check_numbers(settings: Mapping[str, Any], origin: str) -> None:
    """Raises if a setting that is calculated with is no number; null means that it is not set."""
    nested = [
        settings[key] for key in ("rope_scaling", "rope_parameters") if isinstance(settings.get(key), dict)
    ]
    nested += [kind for holder in nested for kind in holder.values() if isinstance(kind, dict)]
    for holder in (settings, *nested):
        for key in _NUMBERS:
            value = holder.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise CheckpointError(f"{origin}: the setting {key!r} must be a number, got {value!r}.")


def _refuse_unsupported(settings: Mapping[str, Any], is_gemma: bool, origin: str) -> None:
    """Raises for settings of ``config.json`` that would change values and that we do not compute."""
    kinds = {_FULL, _SLIDING} if is_gemma else {_FULL}
    activation = ("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")
    refusals = {
        activation[0]: settings.get(activation[0], activation[1]) != activation[1],
        "mlp_bias": bool(settings.get("mlp_bias")),
        "quantization_config": settings.get("quantization_config") is not None,
        "use_sliding_window": bool(settings.get("use_sliding_window")),
        "use_bidirectional_attention": bool(settings.get("use_bidirectional_attention")),
        "layer_types": not set(settings.get("layer_types") or ()) <= kinds,
    }
    for key, is_refused in refusals.items():
        if is_refused:
            raise CheckpointError(
                f"{origin}: {key} = {settings[key]!r} is not supported: this family is computed with "
                f"{activation[1]} without bias, causal attention of the kinds {', '.join(sorted(kinds))}, and "
                "unquantised weights."
            )


def _stretched_positions(scaling: RopeScaling) -> int:
    """Returns the context length that YaRN reaches, which ``max_position_embeddings`` need not say."""
    if isinstance(scaling, YarnScaling):
        return int(scaling.factor * scaling.original_max_positions)
    return 0
