"""A scheduling decision: which requests run, how many new tokens each, and where those will lie.

Everything is on the host (but for input ids that the sampler left on the device) and belongs to
the scheduler, which may write its buffers again as soon as a `ForwardBatch` was made of them.

Shapes: `T` tokens, `B` requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import BatchError
from ..kv.slots import VirtualSlots
from .forward_mode import CaptureHiddenMode, ForwardMode, NewTokens
from .request import Req


@dataclass(frozen=True, kw_only=True, eq=False)
class SpeculativeInput:
    """What verify and draft extend bring along.

    Attributes:
        num_tokens_per_req: Rows of every request.
        positions: Positions of a draft tree (int64[T]); None for a chain, whose positions follow.
        capture_hidden_mode: Hidden states that the drafting needs at least.
    """

    num_tokens_per_req: int
    positions: torch.Tensor | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL


@dataclass(frozen=True, kw_only=True)
class DllmBlocks:
    """Blocks that a diffusion language model rewrites.

    Attributes:
        block_size: Tokens of every block.
        block_offsets: Position of each request's block.
    """

    block_size: int
    block_offsets: tuple[int, ...]


@dataclass(kw_only=True, eq=False)
class ScheduleBatch:
    """What the scheduler decided for one forward.

    Attributes:
        reqs: The requests.
        forward_mode: What the forward is for.
        input_ids: New tokens, request by request (int64[T], host or device).
        req_pool_indices_cpu: Row of each request in the request table (int64[B]).
        seq_lens_cpu: Tokens of each request, the new ones included (int64[B]).
        out_cache_loc: Slots of the new tokens.
        extend_lens: New tokens of each request; None in modes that have no extend fields.
        prefix_lens: Tokens before them; None in the same modes.
        extend_logprob_start_lens: As in `LogprobFields`; None where nobody asked or nothing extends.
        return_logprob: A request asked for log-probabilities.
        top_logprobs_nums: As in `LogprobFields`.
        speculative: Set in TARGET_VERIFY and DRAFT_EXTEND_V2.
        dllm: Set in DLLM_EXTEND.
        capture_hidden_mode: Hidden states that a request needs.
    """

    reqs: list[Req]
    forward_mode: ForwardMode
    input_ids: torch.Tensor
    req_pool_indices_cpu: torch.Tensor
    seq_lens_cpu: torch.Tensor
    out_cache_loc: VirtualSlots
    extend_lens: list[int] | None = None
    prefix_lens: list[int] | None = None
    extend_logprob_start_lens: list[int] | None = None
    return_logprob: bool = False
    top_logprobs_nums: list[int] | None = None
    speculative: SpeculativeInput | None = None
    dllm: DllmBlocks | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL

    @property
    def num_tokens_per_req(self) -> int | None:
        """New tokens of every request where the mode fixes them; None in ragged modes."""
        new_tokens = self.forward_mode.properties.new_tokens
        if new_tokens is NewTokens.ONE:
            return 1
        if new_tokens is NewTokens.NONE:
            return 0
        if new_tokens is NewTokens.RAGGED:
            return None
        if self.forward_mode.is_dllm_extend():
            if self.dllm is None:
                raise BatchError("dllm: DLLM_EXTEND needs it, for the blocks' size and offsets.")
            return self.dllm.block_size
        if self.speculative is None:
            raise BatchError(f"speculative: {self.forward_mode.name} needs it, for the rows per request.")
        return self.speculative.num_tokens_per_req

    def check(self) -> None:
        """Checks the decision against itself.

        Raises:
            BatchError: Two fields contradict each other; names them.
        """
        num_reqs, num_tokens = len(self.reqs), self.input_ids.numel()
        if len(set(map(id, self.reqs))) != num_reqs:
            raise BatchError("reqs: a request stands twice in one batch.")
        for name in ("req_pool_indices_cpu", "seq_lens_cpu"):
            if getattr(self, name).numel() != num_reqs:
                raise BatchError(f"{name}: {getattr(self, name).numel()} entries for {num_reqs} requests.")
        if len(self.out_cache_loc) != num_tokens:
            raise BatchError(f"out_cache_loc: {len(self.out_cache_loc)} slots for {num_tokens} input_ids.")
        per_req = self.num_tokens_per_req
        if per_req is not None and num_tokens != num_reqs * per_req:
            raise BatchError(
                f"input_ids: {num_tokens} tokens, but {self.forward_mode.name} has {per_req} for each of "
                f"{num_reqs} requests."
            )
        has_extend = self.forward_mode.is_extend(include_draft_extend_v2=True)
        for name in ("extend_lens", "prefix_lens"):
            lens = getattr(self, name)
            if (lens is not None) != has_extend:
                raise BatchError(
                    f"{name}: {self.forward_mode.name} {'needs' if has_extend else 'cannot have'} it."
                )
            if lens is not None and len(lens) != num_reqs:
                raise BatchError(f"{name}: {len(lens)} entries for {num_reqs} requests.")
        self._check_lens(num_tokens)
        self._check_logprobs(num_reqs)
        if self.dllm is not None and len(self.dllm.block_offsets) != num_reqs:
            raise BatchError(
                f"dllm.block_offsets: {len(self.dllm.block_offsets)} entries for {num_reqs} requests."
            )

    def _check_lens(self, num_tokens: int) -> None:
        if self.extend_lens is None or self.prefix_lens is None:
            return
        if sum(self.extend_lens) != num_tokens:
            raise BatchError(
                f"extend_lens: they sum to {sum(self.extend_lens)}, with {num_tokens} input_ids."
            )
        rows = zip(self.prefix_lens, self.extend_lens, self.seq_lens_cpu.tolist(), strict=True)
        for index, (prefix_len, extend_len, seq_len) in enumerate(rows):
            if extend_len < 1:
                raise BatchError(f"extend_lens[{index}] is {extend_len}; a scheduled request has new tokens.")
            if prefix_len < 0 or prefix_len + extend_len != seq_len:
                raise BatchError(
                    f"seq_lens_cpu[{index}] is {seq_len}, with prefix_lens {prefix_len} and extend_lens "
                    f"{extend_len}; it is their sum."
                )

    def _check_logprobs(self, num_reqs: int) -> None:
        if not self.return_logprob:
            return
        if self.top_logprobs_nums is None or len(self.top_logprobs_nums) != num_reqs:
            raise BatchError(f"top_logprobs_nums: {self.top_logprobs_nums} for {num_reqs} requests.")
        starts = self.extend_logprob_start_lens
        if self.extend_lens is None:
            return
        if starts is None or len(starts) != num_reqs:
            raise BatchError(f"extend_logprob_start_lens: {starts} for {num_reqs} requests.")
        for index, (start, extend_len) in enumerate(zip(starts, self.extend_lens, strict=True)):
            if not 0 <= start <= extend_len:
                raise BatchError(
                    f"extend_logprob_start_lens[{index}] is {start}; it lies among the {extend_len} new tokens."
                )
