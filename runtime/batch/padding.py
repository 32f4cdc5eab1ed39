"""Padding a batch to a size that has a graph, and the cut back after the forward.

Padded rows are harmless wherever they go: their keys and values go to the scratch slot of every
sub-pool, their requests point at the scratch row of the request table, and every tail is written
anew each time. In modes with equally many tokens per request the padding is whole requests. In
ragged modes it is tokens that belong to no request and, where a graph has a fixed number of request
slots, requests of length zero.

Shapes: `T` tokens, `B` requests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import BatchError
from ..kv.req_to_token import SCRATCH_ROW
from ..kv.slots import SCRATCH_SLOT, PhysicalSlots
from ..torch_private import copy_all, zero_all
from .fields import ExtendFields, PaddingFields
from .forward_batch import ForwardBatch
from .forward_mode import ForwardMode, NewTokens
from .positions import StartLocEncoding

Storage = Callable[[str, tuple[int, ...], torch.Tensor], torch.Tensor]
"""Gives memory for a padded tensor: its name, its shape, and the tensor whose dtype and device it has."""


def fresh_storage(name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Gives new memory for every padded tensor."""
    return torch.empty(shape, dtype=like.dtype, device=like.device)


@dataclass(frozen=True, kw_only=True)
class IdleShape:
    """What an idle rank runs in place of nothing, so that it meets the others' collectives.

    Attributes:
        forward_mode: The mode of the graph.
        num_tokens_per_req: Rows of every request in it; None for a ragged mode.
        start_loc_encoding: As the attention backend wants it; read in extend modes.
    """

    forward_mode: ForwardMode
    num_tokens_per_req: int | None
    start_loc_encoding: StartLocEncoding = StartLocEncoding.TOKEN_OFFSET


def padded_num_tokens(num_tokens: int, multiple_of: int) -> int:
    """Returns the smallest multiple of the tensor-parallel size that holds the tokens."""
    return -(-num_tokens // multiple_of) * multiple_of


def padded_batch_size(batch_size: int, num_tokens_per_req: int, multiple_of: int) -> int:
    """Returns the smallest number of requests whose tokens are a multiple of the tensor-parallel size."""
    return padded_num_tokens(batch_size, multiple_of // math.gcd(num_tokens_per_req, multiple_of))


def pad_batch(
    batch: ForwardBatch,
    *,
    batch_size: int | None = None,
    num_tokens: int | None = None,
    idle_as: IdleShape | None = None,
    storage: Storage = fresh_storage,
) -> ForwardBatch:
    """Returns the batch at a padded size; the given one stays as it is and is the result's ``real``.

    Args:
        batch: A batch without padding.
        batch_size: Requests after padding; by default those it has.
        num_tokens: Tokens after padding. Where every request has equally many they follow from
            ``batch_size``, and only that may be given.
        idle_as: What an IDLE batch becomes; only for such a batch, which cannot be padded without.
        storage: Where padded tensors lie: new memory, or buffers at fixed addresses.

    Raises:
        BatchError: The batch is padded already, is larger than the size, or has no such size.
    """
    if batch.padding.unpadded is not None:
        raise BatchError("padding: the batch is padded already; pad its `real`.")
    shaped = _shaped(batch, idle_as)
    batch_size = batch.batch_size if batch_size is None else batch_size
    per_req = shaped.num_tokens_per_req
    if per_req is None:
        num_tokens = batch.num_tokens if num_tokens is None else num_tokens
    elif num_tokens is not None:
        raise BatchError(
            f"num_tokens: {batch.forward_mode.name} has {per_req} tokens for each request; give batch_size."
        )
    else:
        num_tokens = batch_size * per_req
    for name, real, padded in (
        ("batch_size", batch.batch_size, batch_size),
        ("num_tokens", batch.num_tokens, num_tokens),
    ):
        if real > padded:
            raise BatchError(f"{name}: the batch has {real}, which is more than the padded size {padded}.")
    return _Padder(shaped, batch_size, num_tokens, storage).padded(batch)


def _shaped(batch: ForwardBatch, idle_as: IdleShape | None) -> ForwardBatch:
    """Returns the batch with the mode that it is padded in."""
    mode = batch.forward_mode
    if mode.is_idle() != (idle_as is not None) or mode.is_prebuilt():
        raise BatchError(
            f"idle_as: {mode.name} cannot be padded {'with' if idle_as else 'without'} it; an IDLE batch "
            "needs it, no other takes it, and PREBUILT computes nothing."
        )
    if idle_as is None:
        return batch
    is_ragged = idle_as.forward_mode.properties.new_tokens is NewTokens.RAGGED
    if is_ragged != (idle_as.num_tokens_per_req is None):
        raise BatchError(
            f"idle_as.num_tokens_per_req is {idle_as.num_tokens_per_req} for {idle_as.forward_mode.name}; "
            "it is None in ragged modes only."
        )
    extend = None
    if idle_as.forward_mode.is_extend(include_draft_extend_v2=True):
        none = batch.seq_lens.to(torch.int32)
        extend = ExtendFields(
            extend_seq_lens=none,
            extend_prefix_lens=none,
            extend_start_loc=none,
            extend_num_tokens=0,
            extend_seq_lens_cpu=(),
            extend_prefix_lens_cpu=(),
            start_loc_encoding=idle_as.start_loc_encoding,
        )
    return dataclasses.replace(
        batch,
        forward_mode=idle_as.forward_mode,
        num_tokens_per_req=idle_as.num_tokens_per_req,
        extend=extend,
    )


class _Padder:
    """Writes every tensor of one batch at its padded size."""

    def __init__(self, batch: ForwardBatch, batch_size: int, num_tokens: int, storage: Storage) -> None:
        self._batch = batch
        self._batch_size = batch_size
        self._num_tokens = num_tokens
        self._storage = storage
        # A padded request reads what it writes, so its length is that of its own new tokens.
        self._pad_len = batch.num_tokens_per_req or 0
        self._num_pad_reqs = batch_size - batch.batch_size
        # Copies and tails are written at the end, all at once: each alone is a launch, and there are a dozen.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._zeros: list[torch.Tensor] = []

    def padded(self, unpadded: ForwardBatch) -> ForwardBatch:
        """Returns the padded batch."""
        batch = self._with_tensors(unpadded)
        copy_all(self._copies)
        zero_all(self._zeros)
        return batch

    def _with_tensors(self, unpadded: ForwardBatch) -> ForwardBatch:
        batch = self._batch
        pad_lens = torch.full((self._num_pad_reqs,), self._pad_len, dtype=torch.int64)
        return dataclasses.replace(
            batch,
            batch_size=self._batch_size,
            input_ids=self._tokens("input_ids", batch.input_ids, 0),
            positions=self._tokens("positions", batch.positions, 0),
            write_slots={
                pool: PhysicalSlots(pool, self._tokens(f"write_slots.{pool}", slots.ids, SCRATCH_SLOT))
                for pool, slots in batch.write_slots.items()
            },
            req_pool_indices=self._requests("req_pool_indices", batch.req_pool_indices, SCRATCH_ROW),
            seq_lens=self._requests("seq_lens", batch.seq_lens, self._pad_len),
            seq_lens_cpu=torch.cat([batch.seq_lens_cpu, pad_lens]),
            seq_lens_sum=batch.seq_lens_sum + self._num_pad_reqs * self._pad_len,
            extend=None if batch.extend is None else self._extend(batch.extend),
            padding=PaddingFields(
                num_real_tokens=self._write("num_real_tokens", batch.padding.num_real_tokens, ()),
                num_real_tokens_cpu=batch.padding.num_real_tokens_cpu,
                unpadded=unpadded,
            ),
        )

    def _extend(self, extend: ExtendFields) -> ExtendFields:
        pad_lens = (self._pad_len,) * self._num_pad_reqs
        start = (
            extend.extend_num_tokens
            if extend.start_loc_encoding is StartLocEncoding.TOKEN_OFFSET
            else self._batch.seq_lens_sum
        )
        start_locs: int | torch.Tensor = start
        if self._pad_len:
            end = start + self._num_pad_reqs * self._pad_len
            start_locs = torch.arange(
                start, end, self._pad_len, dtype=torch.int32, device=extend.extend_start_loc.device
            )
        return dataclasses.replace(
            extend,
            extend_seq_lens=self._requests("extend_seq_lens", extend.extend_seq_lens, self._pad_len),
            extend_prefix_lens=self._requests("extend_prefix_lens", extend.extend_prefix_lens, 0),
            extend_start_loc=self._requests("extend_start_loc", extend.extend_start_loc, start_locs),
            extend_num_tokens=extend.extend_num_tokens + sum(pad_lens),
            extend_seq_lens_cpu=extend.extend_seq_lens_cpu + pad_lens,
            extend_prefix_lens_cpu=extend.extend_prefix_lens_cpu + (0,) * self._num_pad_reqs,
        )

    def _tokens(self, name: str, real: torch.Tensor, tail: int) -> torch.Tensor:
        return self._write(name, real, (*real.shape[:-1], self._num_tokens), tail)

    def _requests(self, name: str, real: torch.Tensor, tail: int | torch.Tensor) -> torch.Tensor:
        return self._write(name, real, (self._batch_size,), tail)

    def _write(
        self, name: str, real: torch.Tensor, shape: tuple[int, ...], tail: int | torch.Tensor = 0
    ) -> torch.Tensor:
        """Real values, then the tail along the last dimension: nothing of an older batch is left."""
        padded = self._storage(name, shape, real)
        if not shape:
            self._copies.append((padded, real))
            return padded
        num_real = real.shape[-1]
        self._copies.append((padded[..., :num_real], real))
        rest = padded[..., num_real:]
        if isinstance(tail, torch.Tensor):
            self._copies.append((rest, tail))
        elif tail == 0:
            self._zeros.append(rest)
        else:
            rest.fill_(tail)
        return padded


# The cut ------------------------------------------------------------------------------------------


def cut_tokens(batch: ForwardBatch, rows: torch.Tensor) -> torch.Tensor:
    """Returns the real tokens' rows of a result with one row per token, a view.

    Raises:
        BatchError: The result has another number of rows than the batch has tokens.
    """
    return _cut(rows, padded=batch.num_tokens, real=batch.real.num_tokens, what="tokens")


def cut_requests(batch: ForwardBatch, rows: torch.Tensor) -> torch.Tensor:
    """Returns the real requests' rows of a result with one row per request, a view.

    Raises:
        BatchError: The result has another number of rows than the batch has requests.
    """
    return _cut(rows, padded=batch.batch_size, real=batch.real.batch_size, what="requests")


def cut_logits(batch: ForwardBatch, rows: torch.Tensor) -> torch.Tensor:
    """Returns the real rows of next-token logits, a view.

    One row per request, or ``num_tokens_per_req`` in verify, draft extend and diffusion blocks.

    Raises:
        BatchError: The result has another number of rows.
    """
    return _cut(rows, padded=num_logit_rows(batch), real=num_logit_rows(batch.real), what="logit rows")


def num_logit_rows(batch: ForwardBatch) -> int:
    """Returns how many rows of next-token logits a forward gives, padded ones included."""
    per_req = batch.num_tokens_per_req
    return batch.batch_size * (1 if per_req is None else per_req)


def _cut(rows: torch.Tensor, *, padded: int, real: int, what: str) -> torch.Tensor:
    if rows.shape[0] != padded:
        raise BatchError(f"The result has {rows.shape[0]} rows, and the padded batch {padded} {what}.")
    return rows[:real]
