"""What a worker gives for one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..runners.execution import Execution
from ..runners.split_prefill import SplitProgress
from ..sampler.logprobs import BatchLogprobs
from .pipeline import PPProxyTensors


class TokenGrammar(Protocol):
    """Which tokens a request may take next; asked when it is sampled, not before."""

    def allowed_tokens(self) -> torch.Tensor:
        """Returns which tokens are allowed (bool[V], host or device)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledTokens:
    """Tokens of one batch.

    Attributes:
        next_token_ids: One per request, or per row in modes of several each (int64, on the device);
            `INVALID_TOKEN` where logits hold NaN.
        logprobs: Where a request asked for them.
    """

    next_token_ids: torch.Tensor
    logprobs: BatchLogprobs | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerationBatchResult:
    """What a forward gave.

    Attributes:
        execution: Who ran it, and its sizes.
        sampled: Tokens; None in verify, between the layers of a split prefill, on a pipeline rank
            that is not the last, and while sampling is delayed.
        delayed_sample: Samples when it is called; set in place of ``sampled``. It owns its logits,
            so forwards may run before it does.
        logits: Before sampling (dtype[rows, V]): in verify, and where the caller asked for them; owned.
        hidden: Hidden states that the batch hands out; owned.
        proxy_tensors: For the next pipeline rank.
        split_progress: Where a split prefill stands; None when it is done, and elsewhere.
    """

    execution: Execution
    sampled: SampledTokens | None = None
    delayed_sample: Callable[[], SampledTokens] | None = None
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    proxy_tensors: PPProxyTensors | None = None
    split_progress: SplitProgress | None = None

    @property
    def can_run_graph(self) -> bool:
        """Whether a graph was replayed."""
        return self.execution.has_graph

    def tokens(self) -> SampledTokens | None:
        """Returns the tokens, sampling now where that was delayed."""
        return self.sampled if self.delayed_sample is None else self.delayed_sample()
