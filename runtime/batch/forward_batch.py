"""The forward batch: every tensor of one forward, owned by it, in groups.

A batch is frozen. Padding makes another batch that remembers this one, so the cut back after the
forward is a look-up and nothing has to be restored by hand (`runtime/batch/padding.py`).

Shapes: `T` tokens, `B` requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ..kv.loc_plan import KVLocPlan
from ..kv.slots import FULL_POOL, PhysicalSlots
from ..kv.translator import KVIndexTranslator
from .fields import ExtendFields, LogprobFields, PaddingFields
from .forward_mode import CaptureHiddenMode, ForwardMode
from .positions import StartLocEncoding
from .sampling import BatchSampling
from .schedule_batch import DllmBlocks, ScheduleBatch, SpeculativeInput


class BatchRunner(Protocol):
    """What `ForwardBatch.init_new` needs of who will run the batch."""

    @property
    def device(self) -> torch.device:
        """Where the batch's tensors go."""

    @property
    def start_loc_encoding(self) -> StartLocEncoding:
        """What the attention backend wants ``extend_start_loc`` to count."""

    @property
    def capture_hidden_mode(self) -> CaptureHiddenMode:
        """What the server hands out for every batch, so that one graph serves all."""

    @property
    def is_draft_worker(self) -> bool:
        """Whether it runs a draft model, whose hidden states only the speculation reads."""

    @property
    def kv_translator(self) -> KVIndexTranslator:
        """Who knows the slots of its pools."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """Tensors and facts of one forward.

    Attributes:
        forward_mode: What the forward is for.
        batch_size: Requests, padded ones included.
        input_ids: Token ids (int64[T]).
        req_pool_indices: Row of each request in ``req_to_token`` (int64[B]).
        seq_lens: Tokens that attention may read of each request once this forward has written its
            own, in every mode (int64[B]). Differs: in SGLang's verify they leave out the drafts.
        seq_lens_cpu: The same on the host (int64[B]).
        write_slots: Where this forward writes keys and values, by sub-pool; one slot per token.
        positions: Position of each token in its sequence (int64[T]).
        seq_lens_sum: Sum of ``seq_lens``, padded requests included.
        max_seq_len: The longest of them; 0 where there is no request.
        num_tokens_per_req: Rows of every request where all have equally many; None in ragged modes.
        capture_hidden_mode: Which hidden states to hand out.
        extend: Set where requests may bring several tokens; None in DECODE, IDLE and PREBUILT.
        padding: Real and padded extents.
        sampling: Sampling parameters of the real requests.
        logprobs: Set where a request asked for log-probabilities.
        speculative: Set in TARGET_VERIFY and DRAFT_EXTEND_V2.
        dllm: Set in DLLM_EXTEND.
    """

    # Core
    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    write_slots: Mapping[str, PhysicalSlots]
    # Derived
    positions: torch.Tensor
    seq_lens_sum: int
    max_seq_len: int
    num_tokens_per_req: int | None
    capture_hidden_mode: CaptureHiddenMode
    # Groups
    padding: PaddingFields
    sampling: BatchSampling
    extend: ExtendFields | None = None
    logprobs: LogprobFields | None = None
    speculative: SpeculativeInput | None = None
    dllm: DllmBlocks | None = None

    @classmethod
    def init_new(
        cls,
        batch: ScheduleBatch,
        runner: BatchRunner,
        *,
        capture_hidden_mode: CaptureHiddenMode | None = None,
        positions: torch.Tensor | None = None,
        kv_plan: KVLocPlan | None = None,
        cols: range | None = None,
    ) -> ForwardBatch:
        """Makes the batch of one forward from a scheduling decision, which stays as it is.

        Args:
            batch: The decision. Its buffers may be written again as soon as this returns.
            runner: Who will run it.
            capture_hidden_mode: Hidden states to hand out; by default the most that server, request
                and speculation ask for.
            positions: Preset positions (int64[T], or int64[A, T] for several axes), copied.
            kv_plan: The iteration's plan, shared with its other forwards; by default this forward
                is an iteration of its own.
            cols: Write window in the plan.

        Raises:
            BatchError: Fields of the decision contradict each other; names them.
            PoolError: The plan is another iteration's or another runner's.
        """
        from .building import build_forward_batch

        return build_forward_batch(
            batch,
            runner,
            capture_hidden_mode=capture_hidden_mode,
            positions=positions,
            kv_plan=kv_plan,
            cols=cols,
        )

    def check(self) -> None:
        """Checks the batch against itself; reads tensors, so it waits for the device.

        Raises:
            BatchError: An invariant does not hold; names the field.
        """
        from .checking import check_forward_batch

        check_forward_batch(self)

    @property
    def num_tokens(self) -> int:
        """Rows of the token dimension, padded ones included."""
        return self.input_ids.shape[0]

    @property
    def out_cache_loc(self) -> torch.Tensor:
        """Slots of the full-attention sub-pool that this forward writes (int64[T])."""
        return self.write_slots[FULL_POOL].ids

    @property
    def real(self) -> ForwardBatch:
        """This batch without padding: mode, size and tensors as they were."""
        return self if self.padding.unpadded is None else self.padding.unpadded

    def req_rows_of_tokens(self) -> torch.Tensor:
        """Returns each token's row in ``req_to_token`` (int64[T]); of an unpadded batch."""
        if self.num_tokens_per_req == 1:
            return self.req_pool_indices
        if self.extend is None or self.num_tokens_per_req is not None:
            return self.req_pool_indices.repeat_interleave(self.num_tokens_per_req or 0)
        return torch.repeat_interleave(
            self.req_pool_indices, self.extend.extend_seq_lens.long(), output_size=self.num_tokens
        )

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
