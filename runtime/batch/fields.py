"""Groups of fields of a forward batch: extend, padding, log-probabilities.

Shapes: `T` tokens, `B` requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .positions import StartLocEncoding

if TYPE_CHECKING:
    from .forward_batch import ForwardBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtendFields:
    """What only batches with several new tokens per request have.

    Attributes:
        extend_seq_lens: New tokens of each request (int32[B]).
        extend_prefix_lens: Tokens before them (int32[B]).
        extend_start_loc: Where each request begins (int32[B]).
        extend_num_tokens: Sum of ``extend_seq_lens``; rows of the batch after it belong to no request.
        extend_seq_lens_cpu: The same as host integers.
        extend_prefix_lens_cpu: The same as host integers.
        start_loc_encoding: What ``extend_start_loc`` counts, as the attention backend asked.
    """

    extend_seq_lens: torch.Tensor
    extend_prefix_lens: torch.Tensor
    extend_start_loc: torch.Tensor
    extend_num_tokens: int
    extend_seq_lens_cpu: tuple[int, ...]
    extend_prefix_lens_cpu: tuple[int, ...]
    start_loc_encoding: StartLocEncoding


@dataclass(frozen=True, kw_only=True, eq=False)
class LogprobFields:
    """Which log-probabilities were asked for; one entry per real request, untouched by padding.

    Attributes:
        top_logprobs_nums: How many most likely tokens to report at each position.
        extend_logprob_start_lens: First of a request's new tokens whose successors' probabilities
            are wanted, counted within its new tokens (their number for none); None where no
            prompt is computed.
        input_token_ids: The tokens whose log-probabilities are wanted, by request: successors of its
            new tokens from the start on, as far as the prompt goes. The last may be a later chunk's.
    """

    top_logprobs_nums: tuple[int, ...]
    extend_logprob_start_lens: tuple[int, ...] | None
    input_token_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddingFields:
    """Real and padded extents of a batch.

    Attributes:
        num_real_tokens: GLOBAL count of real tokens (int32[], on the device): before any sharding,
            whatever the padding. A rank's share is derived from it at every forward.
        num_real_tokens_cpu: The same on the host.
        unpadded: The batch that was padded; None where there is no padding.
        is_static: Whether every later batch of these padded sizes lies at the same addresses, so that
            graphs may read it where it lies.
    """

    num_real_tokens: torch.Tensor
    num_real_tokens_cpu: int
    unpadded: ForwardBatch | None = None
    is_static: bool = False
