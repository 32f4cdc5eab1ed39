"""From a `ScheduleBatch` to a `ForwardBatch`: one copy to the device, then everything derived.

Nothing here writes to the decision, and nothing in the result shares memory with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from ..errors import BatchError
from ..kv.loc_plan import KVLocPlan
from ..kv.req_to_token import SCRATCH_ROW
from ..kv.staging import copy_to_device
from .fields import ExtendFields, LogprobFields, PaddingFields
from .forward_batch import BatchRunner, ForwardBatch
from .forward_mode import CaptureHiddenMode
from .positions import StartLocEncoding, block_positions, clamp_position, compute_position
from .sampling import BatchSampling
from .schedule_batch import ScheduleBatch


def build_forward_batch(
    batch: ScheduleBatch,
    runner: BatchRunner,
    *,
    capture_hidden_mode: CaptureHiddenMode | None,
    positions: torch.Tensor | None,
    kv_plan: KVLocPlan | None,
    cols: range | None,
) -> ForwardBatch:
    """`ForwardBatch.init_new`; see there."""
    batch.check()
    translator = runner.kv_translator
    seq_lens = batch.seq_lens_cpu.numpy()
    max_seq_len = int(seq_lens.max()) if batch.reqs else 0
    _check_fits(batch, max_seq_len, *translator.table_shape)
    per_req = batch.num_tokens_per_req
    num_rows = len(batch.reqs) if per_req and batch.reqs else 1
    slots = {} if kv_plan is not None else translator.host_slots(batch.out_cache_loc, num_rows=num_rows)
    owned = _owned_tensors(batch, runner.device, slots)
    extend, cache_positions = _extend_and_positions(batch, owned, runner.start_loc_encoding)
    own_positions = _own_positions(batch, owned, positions, runner.device)
    if kv_plan is None:
        kv_plan = translator.begin_iteration(owned, num_rows=num_rows)
    forward = ForwardBatch(
        forward_mode=batch.forward_mode,
        batch_size=len(batch.reqs),
        input_ids=owned["input_ids"],
        req_pool_indices=owned["req_pool_indices"],
        seq_lens=owned["seq_lens"],
        seq_lens_cpu=batch.seq_lens_cpu.to(torch.int64, copy=True),
        write_slots=kv_plan.write_slots(translator, batch.input_ids.numel(), cols),
        positions=cache_positions if own_positions is None else own_positions,
        seq_lens_sum=int(seq_lens.sum()),
        max_seq_len=max_seq_len,
        num_tokens_per_req=per_req,
        capture_hidden_mode=(
            resolve_capture_hidden_mode(batch, runner) if capture_hidden_mode is None else capture_hidden_mode
        ),
        padding=PaddingFields(
            num_real_tokens=owned["num_real_tokens"], num_real_tokens_cpu=batch.input_ids.numel()
        ),
        sampling=BatchSampling(
            is_all_greedy=all(req.sampling.is_greedy for req in batch.reqs),
            temperatures=owned["temperatures"],
            top_ks=owned["top_ks"],
            top_ps=owned["top_ps"],
            seeds=owned["seeds"],
        ),
        extend=extend,
        logprobs=_logprobs(batch),
        # Its positions, if it presets any, are the batch's now.
        speculative=(
            None if batch.speculative is None else dataclasses.replace(batch.speculative, positions=None)
        ),
        dllm=batch.dllm,
    )
    kv_plan.record(forward, cols=cols, cache_positions=cache_positions)
    return forward


def resolve_capture_hidden_mode(batch: ScheduleBatch, runner: BatchRunner) -> CaptureHiddenMode:
    """Returns the hidden states that a batch hands out.

    The most that the server and the requests ask for; in a draft worker neither counts. What the
    speculation needs comes on top in both.
    """
    asked = (
        CaptureHiddenMode.NULL
        if runner.is_draft_worker
        else max(runner.capture_hidden_mode, batch.capture_hidden_mode)
    )
    return asked if batch.speculative is None else max(asked, batch.speculative.capture_hidden_mode)


def _check_fits(batch: ScheduleBatch, longest: int, num_rows: int, max_context: int) -> None:
    """Raises for what would be an index out of range on the device, where no error names a field."""
    if not batch.reqs:
        return
    if longest > max_context:
        raise BatchError(f"seq_lens_cpu: {longest} tokens, and the pool allows max_context={max_context}.")
    rows = batch.req_pool_indices_cpu.numpy()
    lowest, highest = int(rows.min()), int(rows.max())
    if lowest <= SCRATCH_ROW or highest >= num_rows:
        raise BatchError(
            f"req_pool_indices_cpu: rows {lowest} to {highest}; requests have rows 1 to {num_rows - 1}."
        )


def _owned_tensors(
    batch: ScheduleBatch, device: torch.device, slots: dict[str, np.ndarray]
) -> dict[str, torch.Tensor]:
    """Copies all that the host knows, slots among it, in one piece."""
    params = [req.sampling for req in batch.reqs]
    host = {
        **slots,
        "req_pool_indices": _int64(batch.req_pool_indices_cpu),
        "seq_lens": _int64(batch.seq_lens_cpu),
        "temperatures": np.array([param.temperature for param in params], dtype=np.float32),
        "top_ks": np.array([param.top_k for param in params], dtype=np.int32),
        "top_ps": np.array([param.top_p for param in params], dtype=np.float32),
        "seeds": np.array([param.seed for param in params], dtype=np.int64),
        "num_real_tokens": np.array(batch.input_ids.numel(), dtype=np.int32),
    }
    if batch.extend_lens is not None and batch.prefix_lens is not None:
        host["extend_seq_lens"] = np.array(batch.extend_lens, dtype=np.int32)
        host["extend_prefix_lens"] = np.array(batch.prefix_lens, dtype=np.int32)
    elif batch.num_tokens_per_req == 1:
        host["positions"] = np.maximum(host["seq_lens"] - 1, 0)  # `clamp_position`, without a launch
    if batch.dllm is not None:
        host["block_offsets"] = np.array(batch.dllm.block_offsets, dtype=np.int64)
    if batch.input_ids.device.type == "cpu":
        host["input_ids"] = _int64(batch.input_ids)
        return copy_to_device(host, device)
    return copy_to_device(host, device) | {"input_ids": _own(batch.input_ids, device, torch.int64)}


def _int64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.int64, copy=False)


def _own(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy, also where tensor, device and dtype are such already."""
    return tensor.to(device=device, dtype=dtype, copy=True)


def _extend_and_positions(
    batch: ScheduleBatch, owned: dict[str, torch.Tensor], encoding: StartLocEncoding
) -> tuple[ExtendFields | None, torch.Tensor]:
    """Returns the extend group, and each token's index among the tokens of its sequence."""
    num_tokens, per_req = batch.input_ids.numel(), batch.num_tokens_per_req
    if batch.extend_lens is None or batch.prefix_lens is None:
        if per_req == 0:
            return None, torch.empty(0, dtype=torch.int64, device=owned["seq_lens"].device)
        return None, owned["positions"] if per_req == 1 else clamp_position(owned["seq_lens"], per_req or 1)
    positions, start_loc = compute_position(
        owned["extend_prefix_lens"], owned["extend_seq_lens"], num_tokens, encoding
    )
    if per_req is not None:
        positions = clamp_position(owned["seq_lens"], per_req)
    extend = ExtendFields(
        extend_seq_lens=owned["extend_seq_lens"],
        extend_prefix_lens=owned["extend_prefix_lens"],
        extend_start_loc=start_loc,
        extend_num_tokens=num_tokens,
        extend_seq_lens_cpu=tuple(batch.extend_lens),
        extend_prefix_lens_cpu=tuple(batch.prefix_lens),
        start_loc_encoding=encoding,
    )
    return extend, positions


def _own_positions(
    batch: ScheduleBatch,
    owned: dict[str, torch.Tensor],
    positions: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Returns positions that do not follow from the lengths: preset ones, or those of blocks."""
    if positions is None and batch.speculative is not None:
        positions = batch.speculative.positions
    if positions is None:
        return None if batch.dllm is None else block_positions(owned["block_offsets"], batch.dllm.block_size)
    if positions.shape[-1] != batch.input_ids.numel():
        raise BatchError(
            f"positions: shape {tuple(positions.shape)} for {batch.input_ids.numel()} tokens; the last "
            "dimension runs over the tokens."
        )
    return _own(positions, device, torch.int64)


def _logprobs(batch: ScheduleBatch) -> LogprobFields | None:
    if not batch.return_logprob or batch.top_logprobs_nums is None:
        return None
    starts = batch.extend_logprob_start_lens
    return LogprobFields(
        top_logprobs_nums=tuple(batch.top_logprobs_nums),
        extend_logprob_start_lens=None if starts is None else tuple(starts),
        input_token_ids=() if starts is None else _input_token_ids(batch, starts),
    )


def _input_token_ids(batch: ScheduleBatch, starts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    prefix_lens, extend_lens = batch.prefix_lens or [], batch.extend_lens or []
    return tuple(
        tuple(req.token_ids[prefix + start + 1 : min(prefix + new + 1, req.num_prompt_tokens)])
        for req, prefix, new, start in zip(batch.reqs, prefix_lens, extend_lens, starts, strict=True)
    )
