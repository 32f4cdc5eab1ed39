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
from dataclasses import dataclass

import torch

from ..errors import BatchError
from .fields import ExtendFields, PaddingFields
from .forward_batch import ForwardBatch
from .forward_mode import ForwardMode, NewTokens
from .padded_room import FreshStorage, PaddedRoom, PaddedSizes, Storage
from .positions import StartLocEncoding

_FRESH = FreshStorage()


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
    storage: Storage = _FRESH,
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
    if batch.batch_size > batch_size:
        raise _too_small("batch_size", batch.batch_size, batch_size)
    if batch.num_tokens > num_tokens:
        raise _too_small("num_tokens", batch.num_tokens, num_tokens)
    extend = shaped.extend
    sizes = PaddedSizes(
        batch.batch_size,
        batch.num_tokens,
        batch_size,
        num_tokens,
        # A padded request reads what it writes, so its length is that of its own new tokens.
        per_req or 0,
        batch.padding.num_real_tokens_cpu,
        batch.positions.ndim,
        None if extend is None else extend.start_loc_encoding,
    )
    room = storage.room(sizes, shaped)
    room.write(shaped)
    return _padded(shaped, batch, room, sizes)


def _too_small(name: str, real: int, padded: int) -> BatchError:
    return BatchError(f"{name}: the batch has {real}, which is more than the padded size {padded}.")


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


def _padded(
    batch: ForwardBatch, unpadded: ForwardBatch, room: PaddedRoom, sizes: PaddedSizes
) -> ForwardBatch:
    """Returns the batch with the tensors of a room, in which it was written."""
    num_pads, pad_len = sizes.num_pad_requests, sizes.pad_len
    return ForwardBatch(
        forward_mode=batch.forward_mode,
        batch_size=sizes.padded_requests,
        input_ids=room.input_ids,
        req_pool_indices=room.req_pool_indices,
        seq_lens=room.seq_lens,
        seq_lens_cpu=torch.cat([batch.seq_lens_cpu, room.pad_lens_cpu]) if num_pads else batch.seq_lens_cpu,
        write_slots=room.write_slots,
        positions=room.positions,
        seq_lens_sum=batch.seq_lens_sum + num_pads * pad_len,
        max_seq_len=max(batch.max_seq_len, pad_len) if num_pads else batch.max_seq_len,
        num_tokens_per_req=batch.num_tokens_per_req,
        capture_hidden_mode=batch.capture_hidden_mode,
        padding=PaddingFields(
            num_real_tokens=room.num_real_tokens,
            num_real_tokens_cpu=batch.padding.num_real_tokens_cpu,
            unpadded=unpadded,
            is_static=room.is_static,
        ),
        sampling=batch.sampling,
        extend=None if batch.extend is None else _padded_extend(batch.extend, room, num_pads, pad_len),
        logprobs=batch.logprobs,
        speculative=batch.speculative,
        dllm=batch.dllm,
    )


def _padded_extend(extend: ExtendFields, room: PaddedRoom, num_pads: int, pad_len: int) -> ExtendFields:
    assert room.extend is not None, "made for a batch with extend fields"
    extend_seq_lens, extend_prefix_lens, extend_start_loc = room.extend
    return ExtendFields(
        extend_seq_lens=extend_seq_lens,
        extend_prefix_lens=extend_prefix_lens,
        extend_start_loc=extend_start_loc,
        extend_num_tokens=extend.extend_num_tokens + num_pads * pad_len,
        extend_seq_lens_cpu=extend.extend_seq_lens_cpu + (pad_len,) * num_pads,
        extend_prefix_lens_cpu=extend.extend_prefix_lens_cpu + (0,) * num_pads,
        start_loc_encoding=extend.start_loc_encoding,
    )


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
    return rows if real == padded else rows[:real]
