"""What end-to-end arms can be asked for, checked before any long work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_piecewise.runtime.capture.sizes import validate_capture_sizes
from sgl_piecewise.runtime.errors import ConfigError

from .plans import DEFAULT_PLANS, checked_plans

CPU_PROMPT_LENGTHS, CUDA_PROMPT_LENGTHS = (16, 32), (64, 256, 1024, 2048)
CPU_BATCH_SIZES, CUDA_BATCH_SIZES = (1, 2), (1, 8, 32)
CPU_CONTEXT_TOKENS, CUDA_CONTEXT_TOKENS = 16, 1024
CUDA_STEPS_PER_SAMPLE = 8

NUM_CHECKED_STEPS = 4
"""Decode steps whose logits are compared, with tokens given, before decoding is timed."""


@dataclass(frozen=True, kw_only=True)
class EndToEndOptions:
    """Options of end-to-end arms; rounds, warm-ups and seed are the comparison's.

    Attributes:
        plans: Names, eager first.
        prompt_lengths: Prompts whose first token is timed, ascending; also the sizes of prompt graphs.
        batch_sizes: Requests that decode together, ascending; also the sizes of decode graphs.
        context_tokens: Tokens of every prompt before its decoding is timed.
        attention: Attention backend of prompts and decoding.
        steps_per_sample: Decode steps that are timed as one, since the engine launches each before it has read the one
            before; a step alone would show the host's work between them.
    """

    plans: tuple[str, ...] = DEFAULT_PLANS
    prompt_lengths: tuple[int, ...] = CPU_PROMPT_LENGTHS
    batch_sizes: tuple[int, ...] = CPU_BATCH_SIZES
    context_tokens: int = CPU_CONTEXT_TOKENS
    attention: str = "auto"
    steps_per_sample: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError for what no engine can do."""
        object.__setattr__(self, "plans", checked_plans(self.plans))
        for name in ("prompt_lengths", "batch_sizes"):
            object.__setattr__(self, name, validate_capture_sizes(getattr(self, name), name))
        for name in ("context_tokens", "steps_per_sample"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")

    def longest_request(self, num_samples: int) -> int:
        """Returns the tokens of the longest request: a prompt and its first token, or a context and its steps.

        Args:
            num_samples: Of decoding, warm-ups included.
        """
        num_steps = num_samples * self.steps_per_sample
        return max(self.prompt_lengths[-1] + 1, self.context_tokens + max(num_steps, NUM_CHECKED_STEPS) + 2)


def end_to_end_options(
    device: torch.device,
    capture_sizes: Sequence[int],
    *,
    plans: Sequence[str] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    batch_sizes: Sequence[int] | None = None,
    context_tokens: int | None = None,
    attention: str = "auto",
) -> EndToEndOptions:
    """Returns options with the defaults of a device for what is None.

    Args:
        device: Where the model runs.
        capture_sizes: Of the comparison; no default prompt is longer than the largest.
        plans: As in `EndToEndOptions`, like the others.
        prompt_lengths: Likewise.
        batch_sizes: Likewise.
        context_tokens: Likewise.
        attention: Likewise.

    Raises:
        ConfigError: An option that cannot be used.
    """
    is_cuda, largest = device.type == "cuda", capture_sizes[-1]
    if prompt_lengths is None:
        lengths = CUDA_PROMPT_LENGTHS if is_cuda else CPU_PROMPT_LENGTHS
        prompt_lengths = [length for length in lengths if length <= largest] or [largest]
    if context_tokens is None:
        context_tokens = min(CUDA_CONTEXT_TOKENS if is_cuda else CPU_CONTEXT_TOKENS, largest)
    if batch_sizes is None:
        batch_sizes = CUDA_BATCH_SIZES if is_cuda else CPU_BATCH_SIZES
    return EndToEndOptions(
        plans=DEFAULT_PLANS if plans is None else tuple(plans),
        prompt_lengths=tuple(prompt_lengths),
        batch_sizes=tuple(batch_sizes),
        context_tokens=context_tokens,
        attention=attention,
        steps_per_sample=CUDA_STEPS_PER_SAMPLE if is_cuda else 1,
    )
