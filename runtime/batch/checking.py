"""Invariants of a forward batch, checked on request: each error names the field."""

from __future__ import annotations

import itertools

import torch

from ..errors import BatchError
from ..kv.req_to_token import SCRATCH_ROW
from ..kv.slots import SCRATCH_SLOT
from .fields import ExtendFields
from .forward_batch import ForwardBatch
from .positions import StartLocEncoding


def check_forward_batch(batch: ForwardBatch) -> None:
    """`ForwardBatch.check`; see there."""
    _check_shapes(batch)
    _check_seq_lens(batch)
    if batch.extend is not None:
        _check_extend(batch, batch.extend)
    _check_real(batch.real)
    if batch.padding.unpadded is not None:
        _check_padding(batch)


def _require(is_kept: bool, field: str, message: str) -> None:
    if not is_kept:
        raise BatchError(f"{field}: {message}")


def _check_shapes(batch: ForwardBatch) -> None:
    token_fields = {"positions": batch.positions} | {
        f"write_slots[{pool!r}]": slots.ids for pool, slots in batch.write_slots.items()
    }
    for field, tensor in token_fields.items():
        _require(
            tensor.shape[-1] == batch.num_tokens,
            field,
            f"{tensor.shape[-1]} entries for {batch.num_tokens} input_ids.",
        )
    request_fields = {
        "req_pool_indices": batch.req_pool_indices,
        "seq_lens": batch.seq_lens,
        "seq_lens_cpu": batch.seq_lens_cpu,
    }
    if batch.extend is not None:
        request_fields |= {
            "extend_seq_lens": batch.extend.extend_seq_lens,
            "extend_prefix_lens": batch.extend.extend_prefix_lens,
            "extend_start_loc": batch.extend.extend_start_loc,
        }
    for field, tensor in request_fields.items():
        _require(
            tensor.shape == (batch.batch_size,),
            field,
            f"shape {tuple(tensor.shape)}, and batch_size is {batch.batch_size}.",
        )
    per_req = batch.num_tokens_per_req
    _require(
        per_req is None or batch.num_tokens == batch.batch_size * per_req,
        "num_tokens_per_req",
        f"{per_req}, with {batch.num_tokens} tokens of {batch.batch_size} requests.",
    )


def _check_seq_lens(batch: ForwardBatch) -> None:
    lens = batch.seq_lens.tolist()
    _require(
        lens == batch.seq_lens_cpu.tolist(),
        "seq_lens_cpu",
        f"{batch.seq_lens_cpu.tolist()}, and seq_lens is {lens}.",
    )
    _require(
        batch.max_seq_len == max(lens, default=0),
        "max_seq_len",
        f"{batch.max_seq_len}, and the longest of seq_lens is {max(lens, default=0)}.",
    )
    _require(
        batch.seq_lens_sum == sum(lens),
        "seq_lens_sum",
        f"{batch.seq_lens_sum}, and seq_lens sum to {sum(lens)}.",
    )


def _check_extend(batch: ForwardBatch, extend: ExtendFields) -> None:
    new, prefix = extend.extend_seq_lens.tolist(), extend.extend_prefix_lens.tolist()
    for field, host, device in (
        ("extend_seq_lens_cpu", extend.extend_seq_lens_cpu, new),
        ("extend_prefix_lens_cpu", extend.extend_prefix_lens_cpu, prefix),
    ):
        _require(list(host) == device, field, f"{list(host)}, and on the device {device}.")
    _require(
        extend.extend_num_tokens == sum(new),
        "extend_num_tokens",
        f"{extend.extend_num_tokens}, and extend_seq_lens sum to {sum(new)}.",
    )
    _require(
        extend.extend_num_tokens <= batch.num_tokens,
        "extend_num_tokens",
        f"{extend.extend_num_tokens}, with {batch.num_tokens} input_ids.",
    )
    totals = [before + added for before, added in zip(prefix, new, strict=True)]
    _require(
        totals == batch.seq_lens_cpu.tolist(),
        "seq_lens",
        f"{batch.seq_lens_cpu.tolist()}, with prefixes {prefix} and new lengths {new}; they are the sums.",
    )
    counted = new if extend.start_loc_encoding is StartLocEncoding.TOKEN_OFFSET else totals
    starts = list(itertools.accumulate(counted, initial=0))[:-1]
    found = extend.extend_start_loc.tolist()
    _require(not found or found[0] == 0, "extend_start_loc", f"begins with {found[:1]}, not with 0.")
    _require(found == starts, "extend_start_loc", f"{found}, and the lengths give {starts}.")


def _check_real(real: ForwardBatch) -> None:
    """Of the batch without padding: positions go on from the prefix, slots are its own."""
    if real.positions.ndim == 1 and real.speculative is None and real.dllm is None:
        new = [1] * real.batch_size if real.extend is None else list(real.extend.extend_seq_lens_cpu)
        expected = [
            position
            for seq_len, num_new in zip(real.seq_lens_cpu.tolist(), new, strict=True)
            for position in range(seq_len - num_new, seq_len)
        ]
        if real.num_tokens_per_req != 0:
            found = real.positions.tolist()
            _require(found == expected, "positions", f"{found}, and the lengths give {expected}.")
    _require(
        bool((real.positions >= 0).all()), "positions", f"{real.positions.tolist()}; none may be negative."
    )
    _require(
        bool((real.input_ids >= 0).all()), "input_ids", f"{real.input_ids.tolist()}; none may be negative."
    )
    rows = real.req_pool_indices
    _require(
        bool((rows != SCRATCH_ROW).all()),
        "req_pool_indices",
        f"{rows.tolist()}; row {SCRATCH_ROW} is scratch.",
    )
    _require(
        rows.unique().numel() == rows.numel(),
        "req_pool_indices",
        f"{rows.tolist()}; two requests share a row.",
    )
    for pool, slots in real.write_slots.items():
        field = f"write_slots[{pool!r}]"
        _require(bool((slots.ids != SCRATCH_SLOT).all()), field, "a real token would go to the scratch slot.")
        _require(
            slots.ids.unique().numel() == len(slots), field, f"{slots.ids.tolist()}; two tokens share a slot."
        )
    _require(
        int(real.padding.num_real_tokens) == real.padding.num_real_tokens_cpu == real.num_tokens,
        "num_real_tokens",
        f"{int(real.padding.num_real_tokens)} on the device, {real.padding.num_real_tokens_cpu} on the host, "
        f"and {real.num_tokens} input_ids.",
    )


def _check_padding(batch: ForwardBatch) -> None:
    """Real rows are those of the batch before, and padded rows reach nobody's memory."""
    real = batch.real
    tensors = {
        "input_ids": (batch.input_ids, real.input_ids, 0),
        "positions": (batch.positions, real.positions, 0),
        "req_pool_indices": (batch.req_pool_indices, real.req_pool_indices, SCRATCH_ROW),
    } | {
        f"write_slots[{pool!r}]": (slots.ids, real.write_slots[pool].ids, SCRATCH_SLOT)
        for pool, slots in batch.write_slots.items()
    }
    for field, (padded, unpadded, tail) in tensors.items():
        num_real = unpadded.shape[-1]
        _require(torch.equal(padded[..., :num_real], unpadded), field, "padding changed real entries.")
        _require(
            bool((padded[..., num_real:] == tail).all()),
            field,
            f"padded entries are {padded[..., num_real:].tolist()}; all must be {tail}.",
        )
    _require(
        int(batch.padding.num_real_tokens) == real.num_tokens,
        "num_real_tokens",
        f"{int(batch.padding.num_real_tokens)}, and the batch before padding has {real.num_tokens} tokens.",
    )
