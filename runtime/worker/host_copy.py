"""Sampled tokens on their way to the host.

The copy begins right behind the sampling, so reading it waits for that forward and for none that was
launched after it. On a device that computes while it is called there is nothing to wait for.
"""

from __future__ import annotations

import dataclasses

import torch

from ..sampler.logprobs import TopLogprobs
from .result import SampledTokens


class HostCopy:
    """A copy of one batch's tokens and log-probabilities to the host, begun when it is made.

    Args:
        sampled: On the device; nothing may write to it before the copy is done, which is so for what a
            worker returns.
    """

    def __init__(self, sampled: SampledTokens) -> None:
        logprobs = sampled.logprobs
        if logprobs is not None:
            logprobs = dataclasses.replace(
                logprobs,
                next_token=_begin(logprobs.next_token),
                next_top=_begin_top(logprobs.next_top),
                input=None if logprobs.input is None else _begin(logprobs.input),
                input_top=_begin_top(logprobs.input_top),
            )
        self._found = SampledTokens(next_token_ids=_begin(sampled.next_token_ids), logprobs=logprobs)
        self._done: torch.cuda.Event | None = None
        if sampled.next_token_ids.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(sampled.next_token_ids.device))

    def wait(self) -> SampledTokens:
        """Returns tokens and log-probabilities on the host, once they are there; may be called again."""
        if self._done is not None:
            self._done.synchronize()
        return self._found


def _begin(tensor: torch.Tensor) -> torch.Tensor:
    """Returns host memory that is filled in the order of the current stream; the tensor itself if it is there."""
    if not tensor.is_cuda:
        return tensor
    # Only into pinned memory does a copy run beside the host.
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


def _begin_top(top: TopLogprobs | None) -> TopLogprobs | None:
    return None if top is None else TopLogprobs(values=_begin(top.values), token_ids=_begin(top.token_ids))
