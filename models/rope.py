"""Rotary position embedding (RoPE) and its scalings.

A scaling changes the inverse frequencies once, when the model is built; nothing here depends on
how long a sequence turns out to be. So a captured forward can be replayed for any positions.

Shapes: `T` tokens, `D` head size.
Source: transformers ``modeling_rope_utils.py`` (names of the settings and their meaning); yarn is
arXiv 2309.00071, linear is arXiv 2306.15595.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sgl_piecewise.runtime.errors import CheckpointError, ConfigError, nearest


class RopeScaling(abc.ABC):
    """How the inverse frequencies of plain RoPE are changed to reach longer contexts."""

    @abc.abstractmethod
    def scale(self, inverse_frequencies: torch.Tensor, *, theta: float) -> torch.Tensor:
        """Changes the frequencies.

        Args:
            inverse_frequencies: Those of plain RoPE, highest first (float32[D / 2]).
            theta: The base they were made with.

        Returns:
            The changed ones (float32[D / 2]).
        """

    @property
    def attention_factor(self) -> float:
        """Factor on cosine and sine, so its square is on the attention scores."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class DefaultScaling(RopeScaling):
    """Plain RoPE."""

    def scale(self, inverse_frequencies: torch.Tensor, *, theta: float) -> torch.Tensor:
        """Returns the frequencies as they are."""
        return inverse_frequencies


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Position interpolation: every frequency divided by ``factor``."""

    factor: float

    def scale(self, inverse_frequencies: torch.Tensor, *, theta: float) -> torch.Tensor:
        """Returns the frequencies divided by ``factor``."""
        return inverse_frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class DynamicNtkScaling(RopeScaling):
    """Dynamic NTK, in the part of it that is static.

    Up to the model's ``max_positions`` it is plain RoPE. Beyond, the frequencies would follow the
    length of each sequence, which no captured forward can do: ``DecoderConfig.check_length``
    refuses such lengths.
    """

    factor: float

    def scale(self, inverse_frequencies: torch.Tensor, *, theta: float) -> torch.Tensor:
        """Returns the frequencies as they are."""
        return inverse_frequencies


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a ramp between.

    Attributes:
        factor: What long wavelengths are divided by.
        low_freq_factor: Wavelengths above ``original_max_positions / low_freq_factor`` are long.
        high_freq_factor: Those below ``original_max_positions / high_freq_factor`` are short.
        original_max_positions: Context length before the scaling.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def scale(self, inverse_frequencies: torch.Tensor, *, theta: float) -> torch.Tensor:
        """Returns each frequency as a mix of itself and itself divided by ``factor``."""
        turns = self.original_max_positions * inverse_frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(inverse_frequencies / self.factor, inverse_frequencies, keep.clamp(0, 1))


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN: interpolates what turns seldom within the original context, keeps what turns often.

    Attributes:
        factor: How much longer the context becomes.
        original_max_positions: Context length before the scaling.
        beta_fast: Dimensions with at least so many turns are kept.
        beta_slow: Dimensions with at most so many turns are interpolated in full.
        mscale: With ``mscale_all_dim``, DeepSeek's form of the attention factor.
        mscale_all_dim: See ``mscale``.
        given_attention_factor: Overrides the computed attention factor.
        truncate: Rounds the two ends of the ramp to whole dimensions.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    given_attention_factor: float | None = None
    truncate: bool = True

    @property
    def attention_factor(self) -> float:
        """Factor on cosine and sine: grows with the logarithm of ``factor`` unless given."""
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def scale(self, inverse_frequencies: torch.Tensor, *, theta: float) -> torch.Tensor:
        """Returns each frequency as a mix of itself and itself divided by ``factor``."""
        num_frequencies = inverse_frequencies.shape[0]
        first = self._dimension_with_turns(self.beta_fast, theta, num_frequencies)
        last = self._dimension_with_turns(self.beta_slow, theta, num_frequencies)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
        if first == last:
            last += 0.001  # a step, without dividing by zero
        dimension = torch.arange(num_frequencies, dtype=torch.float32, device=inverse_frequencies.device)
        interpolated = ((dimension - first) / (last - first)).clamp(0, 1)
        return torch.lerp(inverse_frequencies, inverse_frequencies / self.factor, interpolated)

    def _dimension_with_turns(self, turns: float, theta: float, num_frequencies: int) -> float:
        """Returns the (fractional) index of the frequency with so many turns in the context."""
        wavelength = self.original_max_positions / (turns * 2 * math.pi)
        return num_frequencies * math.log(wavelength) / math.log(theta)


@dataclass(frozen=True, kw_only=True)
class FrequencyDivisors(RopeScaling):
    """A scaling given as one divisor per frequency: how GGUF files carry Llama 3's."""

    divisors: tuple[float, ...]

    def scale(self, inverse_frequencies: torch.Tensor, *, theta: float) -> torch.Tensor:
        """Returns the frequencies divided one by one."""
        if len(self.divisors) != inverse_frequencies.shape[0]:
            raise CheckpointError(
                f"rope_freqs.weight holds {len(self.divisors)} divisors, but the head size needs "
                f"{inverse_frequencies.shape[0]}. The file does not fit its own metadata; convert it again."
            )
        return inverse_frequencies / inverse_frequencies.new_tensor(self.divisors)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """RoPE of one model.

    Attributes:
        theta: Base of the frequencies.
        scaling: What is done to them.
    """

    theta: float = 10000.0
    scaling: RopeScaling = field(default_factory=DefaultScaling)

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Returns the scaled inverse frequencies, highest first (float32[D / 2], fresh, on the CPU)."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
        return self.scaling.scale(1.0 / self.theta**exponents, theta=self.theta)


def rope_config_from_hf(settings: Mapping[str, Any], *, max_positions: int, origin: str) -> RopeConfig:
    """Reads RoPE from a Hugging Face ``config.json``, in its older and newer spelling.

    Args:
        settings: The whole of ``config.json``; ``rope_parameters``, or ``rope_theta`` with
            ``rope_scaling``, are read.
        max_positions: Stands in for ``original_max_position_embeddings`` where that is absent.
        origin: Where the settings come from, for errors.

    Raises:
        CheckpointError: A setting that the scaling needs is missing.
        ConfigError: The scaling is not one that we know.
    """
    given: dict[str, Any] = {
        **(settings.get("rope_scaling") or {}),
        **(settings.get("rope_parameters") or {}),
    }
    partial = given.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(
            f"{origin}: partial_rotary_factor is {partial}, but only whole heads can be rotated here (1.0)."
        )
    theta = given.get("rope_theta", settings.get("rope_theta", 10000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _SCALINGS:
        raise ConfigError(
            f"{origin}: RoPE scaling {kind!r} is not supported. {nearest(str(kind), _SCALINGS)}"
        )
    given.setdefault("original_max_position_embeddings", max_positions)
    try:
        scaling = _SCALINGS[kind](given)
    except KeyError as err:
        raise CheckpointError(
            f"{origin}: RoPE scaling {kind!r} needs the setting {err}, which is missing. "
            f"Present: {', '.join(sorted(given))}."
        ) from err
    return RopeConfig(theta=float(theta), scaling=scaling)


def _yarn(given: Mapping[str, Any]) -> YarnScaling:
    return YarnScaling(
        factor=given["factor"],
        original_max_positions=given["original_max_position_embeddings"],
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        given_attention_factor=given.get("attention_factor"),
        truncate=given.get("truncate", True),
    )


_SCALINGS: dict[str, Callable[[Mapping[str, Any]], RopeScaling]] = {
    "default": lambda given: DefaultScaling(),
    "linear": lambda given: LinearScaling(factor=given["factor"]),
    "dynamic": lambda given: DynamicNtkScaling(factor=given["factor"]),
    "llama3": lambda given: Llama3Scaling(
        factor=given["factor"],
        low_freq_factor=given["low_freq_factor"],
        high_freq_factor=given["high_freq_factor"],
        original_max_positions=given["original_max_position_embeddings"],
    ),
    "yarn": _yarn,
}


class RotaryEmbedding(nn.Module):
    """Makes the cosine and sine of every token's angles, once per forward.

    The frequencies stay float32 whatever ``model.to(dtype)`` does: in bfloat16 angles of a few
    thousand tokens would be wrong by whole turns.

    Args:
        config: Base and scaling.
        head_dim: Head size (`D`), even.
        device: Where the frequencies live.
    """

    inverse_frequencies: torch.Tensor

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        frequencies = config.inverse_frequencies(head_dim).to(device)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosine and sine for a kernel set's ``norm_rotate``.

        Args:
            positions_T: Position of each token in its sequence (int64[T]).
            dtype: Of the result; angles are computed in float32.

        Returns:
            ``cos_T1D`` and ``sin_T1D`` (dtype[T, 1, D]), fresh.
        """
        half_angles = positions_T.float().unsqueeze(-1) * self.inverse_frequencies
        angles_T1D = torch.cat((half_angles, half_angles), dim=-1).unsqueeze(1)
        factor = self.config.scaling.attention_factor
        return (angles_T1D.cos() * factor).to(dtype), (angles_T1D.sin() * factor).to(dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryEmbedding:
        # `Module.to(bfloat16)` and `to_empty` come through here: make the values again instead.
        super()._apply(fn, recurse)
        device = self.inverse_frequencies.device
        self.inverse_frequencies = self.config.inverse_frequencies(self.head_dim).to(device)
        return self
