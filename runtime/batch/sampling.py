"""Sampling parameters of one request, and those of a batch as tensors.

Padding never touches them: padded rows are cut off before anything is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ConfigError

NO_TOP_K = -1
_LARGEST_TEMPERATURE = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen.

    Attributes:
        temperature: Divides the logits, in float32; 0 takes the largest (greedy).
        top_k: Only this many largest logits count; `NO_TOP_K` counts all.
        top_p: Only the most likely tokens that make up this probability count; in (0, 1].
        seed: Of its random draws: equal seeds and equal logits give equal tokens, in any batch.

    Raises:
        ConfigError: A value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = NO_TOP_K
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= _LARGEST_TEMPERATURE:
            raise ConfigError(
                f"temperature must be from 0 (greedy) to {_LARGEST_TEMPERATURE:.3g}, got {self.temperature!r}."
            )
        if type(self.top_k) is not int or (self.top_k != NO_TOP_K and not 1 <= self.top_k < 2**31):
            raise ConfigError(
                f"top_k must be a whole number of at least 1, or {NO_TOP_K} for all, got {self.top_k!r}."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be over 0 and at most 1, got {self.top_p!r}.")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed!r}.")

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is taken."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchSampling:
    """Sampling parameters of a batch; one entry per real request.

    Attributes:
        is_all_greedy: Every request is greedy, so the tensors need not be read.
        temperatures: Float32[B].
        top_ks: Int32[B]; `NO_TOP_K` counts all tokens.
        top_ps: Float32[B].
        seeds: Int64[B].
    """

    is_all_greedy: bool
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    seeds: torch.Tensor
