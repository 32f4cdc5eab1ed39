"""The forward batch: every tensor of one forward, owned by it, in groups.

A batch is frozen. Padding makes another batch that remembers this one, so the cut back after the
forward is a look-up and nothing has to be restored by hand.

Shapes: `T` tokens, `B` requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..kv.slots import FULL_POOL, PhysicalSlots
from .forward_mode import CaptureHiddenMode, ForwardMode
from .sampling import BatchSampling


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtendFields:
    """What only batches with several new tokens per request have.

    Attributes:
        extend_seq_lens: New tokens of each request (int32[B]).
        extend_prefix_lens: Tokens before them (int32[B]).
        extend_start_loc: Where each request begins (int32[B]), in the encoding that the attention
            backend asked for: a token or a KV offset.
        extend_num_tokens: Sum of ``extend_seq_lens``.
        extend_seq_lens_cpu: The same as host integers.
        extend_prefix_lens_cpu: The same as host integers.
    """

    extend_seq_lens: torch.Tensor
    extend_prefix_lens: torch.Tensor
    extend_start_loc: torch.Tensor
    extend_num_tokens: int
    extend_seq_lens_cpu: tuple[int, ...]
    extend_prefix_lens_cpu: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class LogprobFields:
    """Which log-probabilities were asked for; one entry per real request, untouched by padding.

    Attributes:
        top_logprobs_nums: How many most likely tokens to report at each position.
        extend_logprob_start_lens: First of a request's new tokens whose successors' probabilities
            are wanted, counted within its new tokens; None where no prompt is computed.
    """

    top_logprobs_nums: tuple[int, ...]
    extend_logprob_start_lens: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddingFields:
    """Real and padded extents of a batch.

    Attributes:
        num_real_tokens: GLOBAL count of real tokens (int32[], on the device): before any sharding,
            whatever the padding. A rank's share is derived from it at every forward.
        num_real_tokens_cpu: The same on the host.
        unpadded: The batch that was padded; None where there is no padding.
    """

    num_real_tokens: torch.Tensor
    num_real_tokens_cpu: int
    unpadded: ForwardBatch | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """Tensors and facts of one forward.

    Attributes:
        forward_mode: What the forward is for.
        batch_size: Requests, padded ones included.
        input_ids: Token ids (int64[T]).
        positions: Position of each token in its sequence (int64[T]).
        req_pool_indices: Row of each request in ``req_to_token`` (int64[B]).
        seq_lens: Tokens that attention may read of each request once this forward has written its
            own, in every mode (int64[B]). Differs: in SGLang's verify they leave out the drafts.
        seq_lens_cpu: The same on the host (int64[B]).
        seq_lens_sum: Their sum, padded requests included.
        write_slots: Where this forward writes keys and values, by sub-pool; one slot per token.
        capture_hidden_mode: Which hidden states to hand out.
        num_tokens_per_req: Rows of every request where all have equally many; None in ragged modes.
        extend: Set where requests may bring several tokens; None in DECODE, IDLE and PREBUILT.
        padding: Real and padded extents.
        sampling: Sampling parameters of the real requests; None where nothing is sampled.
        logprobs: Set where a request asked for log-probabilities.
    """

    # Core
    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    write_slots: Mapping[str, PhysicalSlots]
    # Derived
    seq_lens_sum: int
    capture_hidden_mode: CaptureHiddenMode
    num_tokens_per_req: int | None
    # Groups
    padding: PaddingFields
    extend: ExtendFields | None = None
    sampling: BatchSampling | None = None
    logprobs: LogprobFields | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens, padded ones included."""
        return self.input_ids.shape[0]

    @property
    def out_cache_loc(self) -> torch.Tensor:
        """Slots of the full-attention sub-pool that this forward writes (int64[T])."""
        return self.write_slots[FULL_POOL].ids

    @property
    def real(self) -> ForwardBatch:
        """This batch without padding."""
        return self.padding.unpadded or self

    @property
    def return_logprob(self) -> bool:
        """Whether a request asked for log-probabilities."""
        return self.logprobs is not None

    @property
    def top_logprobs_nums(self) -> tuple[int, ...] | None:
        """As in `LogprobFields`; None where nobody asked."""
        return None if self.logprobs is None else self.logprobs.top_logprobs_nums

    @property
    def extend_logprob_start_lens(self) -> tuple[int, ...] | None:
        """As in `LogprobFields`; None where nobody asked."""
        return None if self.logprobs is None else self.logprobs.extend_logprob_start_lens

    @property
    def extend_seq_lens(self) -> torch.Tensor | None:
        """As in `ExtendFields`; None in modes without them."""
        return None if self.extend is None else self.extend.extend_seq_lens

    @property
    def extend_prefix_lens(self) -> torch.Tensor | None:
        """As in `ExtendFields`; None in modes without them."""
        return None if self.extend is None else self.extend.extend_prefix_lens

    @property
    def extend_start_loc(self) -> torch.Tensor | None:
        """As in `ExtendFields`; None in modes without them."""
        return None if self.extend is None else self.extend.extend_start_loc

    @property
    def extend_num_tokens(self) -> int | None:
        """As in `ExtendFields`; None in modes without them."""
        return None if self.extend is None else self.extend.extend_num_tokens

    @property
    def extend_seq_lens_cpu(self) -> tuple[int, ...] | None:
        """As in `ExtendFields`; None in modes without them."""
        return None if self.extend is None else self.extend.extend_seq_lens_cpu

    @property
    def extend_prefix_lens_cpu(self) -> tuple[int, ...] | None:
        """As in `ExtendFields`; None in modes without them."""
        return None if self.extend is None else self.extend.extend_prefix_lens_cpu
