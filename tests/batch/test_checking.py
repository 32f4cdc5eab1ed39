"""Invariants on request: each broken one is found, and its field named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from serving_support import example_mix, scheduled, world

from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.padding import pad_batch
from sgl_piecewise.runtime.batch.request import LogprobRequest, Req
from sgl_piecewise.runtime.batch.sampling import SamplingParams
from sgl_piecewise.runtime.batch.schedule_batch import DllmBlocks, ScheduleBatch, SpeculativeInput
from sgl_piecewise.runtime.errors import BatchError, ConfigError

M = ForwardMode
Break = Callable[[ForwardBatch], ForwardBatch]


def replaced(**fields: object) -> Break:
    return lambda batch: dataclasses.replace(batch, **fields)  # type: ignore[arg-type]


def in_extend(**fields: object) -> Break:
    def broken(batch: ForwardBatch) -> ForwardBatch:
        assert batch.extend is not None
        return dataclasses.replace(batch, extend=dataclasses.replace(batch.extend, **fields))  # type: ignore[arg-type]

    return broken


def written(path: Callable[[ForwardBatch], torch.Tensor], index: int, value: int) -> Break:
    def broken(batch: ForwardBatch) -> ForwardBatch:
        path(batch)[index] = value
        return batch

    return broken


@pytest.mark.parametrize(
    ("field", "mode", "broken"),
    [
        ("positions", M.EXTEND, written(lambda b: b.positions, 2, 9)),
        ("positions", M.DECODE, written(lambda b: b.positions, 0, 7)),
        ("positions", M.DLLM_EXTEND, written(lambda b: b.positions, 0, -1)),
        ("positions", M.EXTEND, replaced(positions=torch.zeros(3))),
        ("input_ids", M.DECODE, written(lambda b: b.input_ids, 1, -3)),
        ("seq_lens_sum", M.DECODE, replaced(seq_lens_sum=3)),
        ("max_seq_len", M.DECODE, replaced(max_seq_len=3)),
        ("seq_lens_cpu", M.DECODE, written(lambda b: b.seq_lens_cpu, 1, 1)),
        ("seq_lens", M.DECODE, replaced(seq_lens=torch.zeros(2))),
        (
            "seq_lens",
            M.EXTEND,
            in_extend(extend_prefix_lens=torch.tensor([1, 1, 1]), extend_prefix_lens_cpu=(1, 1, 1)),
        ),
        ("extend_start_loc", M.EXTEND, written(lambda b: b.extend.extend_start_loc, 0, 1)),  # type: ignore[union-attr]
        ("extend_start_loc", M.MIXED, written(lambda b: b.extend.extend_start_loc, 1, 1)),  # type: ignore[union-attr]
        ("extend_num_tokens", M.EXTEND, in_extend(extend_num_tokens=5)),
        ("extend_seq_lens_cpu", M.EXTEND, in_extend(extend_seq_lens_cpu=(1, 2, 4))),
        ("extend_prefix_lens_cpu", M.EXTEND, in_extend(extend_prefix_lens_cpu=(1, 2, 4))),
        ("num_tokens_per_req", M.TARGET_VERIFY, replaced(num_tokens_per_req=3)),
        ("req_pool_indices", M.DECODE, written(lambda b: b.req_pool_indices, 0, 0)),
        ("req_pool_indices", M.DECODE, written(lambda b: b.req_pool_indices, 0, 3)),
        ("write_slots['full']", M.DECODE, written(lambda b: b.out_cache_loc, 0, 0)),
        ("write_slots['window']", M.DECODE, written(lambda b: b.write_slots["window"].ids, 0, 12)),
        ("num_real_tokens", M.DECODE, lambda b: (b.padding.num_real_tokens.fill_(9), b)[1]),
    ],
)
def test_a_broken_field_is_named(field: str, mode: ForwardMode, broken: Break) -> None:
    at = world()
    batch = at.forward(scheduled(example_mix(mode), at))
    batch.check()
    # The last request's slot of the window, so that writing it makes a double.
    if field == "write_slots['window']":
        broken = written(lambda b: b.write_slots["window"].ids, 0, int(batch.write_slots["window"].ids[2]))
    with pytest.raises(BatchError) as found:
        broken(batch).check()
    assert str(found.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("field", "broken"),
    [
        ("input_ids", written(lambda b: b.input_ids, -1, 5)),
        ("input_ids", written(lambda b: b.input_ids, 0, 5)),
        ("positions", written(lambda b: b.positions, -1, 5)),
        ("req_pool_indices", written(lambda b: b.req_pool_indices, -1, 5)),
        ("write_slots['full']", written(lambda b: b.out_cache_loc, -1, 5)),
        ("write_slots['window']", written(lambda b: b.write_slots["window"].ids, -1, 5)),
        ("num_real_tokens", lambda b: (b.padding.num_real_tokens.fill_(5), b)[1]),
    ],
)
def test_a_stale_tail_is_named(field: str, broken: Break) -> None:
    at = world()
    padded = pad_batch(at.forward(scheduled(example_mix(M.DECODE), at)), batch_size=5)
    padded.check()
    with pytest.raises(BatchError) as found:
        broken(padded).check()
    assert str(found.value).startswith(f"{field}: ")


def schedule_with(**fields: object) -> Callable[[ScheduleBatch], ScheduleBatch]:
    return lambda batch: dataclasses.replace(batch, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "mode", "broken"),
    [
        ("seq_lens_cpu", M.DECODE, schedule_with(seq_lens_cpu=torch.tensor([1]))),
        ("seq_lens_cpu[1]", M.EXTEND, schedule_with(seq_lens_cpu=torch.tensor([5, 9, 6]))),
        ("req_pool_indices_cpu", M.DECODE, schedule_with(req_pool_indices_cpu=torch.tensor([1]))),
        ("req_pool_indices_cpu", M.DECODE, schedule_with(req_pool_indices_cpu=torch.tensor([1, 0, 2]))),
        ("req_pool_indices_cpu", M.DECODE, schedule_with(req_pool_indices_cpu=torch.tensor([1, 9, 2]))),
        ("seq_lens_cpu", M.DECODE, schedule_with(seq_lens_cpu=torch.tensor([1, 65, 2]))),
        ("reqs", M.DECODE, lambda batch: dataclasses.replace(batch, reqs=[batch.reqs[0]] * 3)),
        ("out_cache_loc", M.DECODE, schedule_with(input_ids=torch.tensor([1]))),
        ("input_ids", M.TARGET_VERIFY, schedule_with(speculative=SpeculativeInput(num_tokens_per_req=3))),
        ("speculative", M.TARGET_VERIFY, schedule_with(speculative=None)),
        ("dllm", M.DLLM_EXTEND, schedule_with(dllm=None)),
        (
            "dllm.block_offsets",
            M.DLLM_EXTEND,
            schedule_with(dllm=DllmBlocks(block_size=4, block_offsets=(1,))),
        ),
        ("extend_lens", M.EXTEND, schedule_with(extend_lens=None)),
        ("extend_lens", M.DECODE, schedule_with(extend_lens=[1, 1, 1])),
        ("extend_lens", M.EXTEND, schedule_with(extend_lens=[7])),
        ("extend_lens", M.EXTEND, schedule_with(extend_lens=[1, 1, 1])),
        ("extend_lens[1]", M.EXTEND, schedule_with(extend_lens=[2, 0, 5])),
        ("prefix_lens", M.EXTEND, schedule_with(prefix_lens=[1])),
        ("top_logprobs_nums", M.DECODE, schedule_with(return_logprob=True)),
        (
            "extend_logprob_start_lens",
            M.EXTEND,
            schedule_with(return_logprob=True, top_logprobs_nums=[0, 0, 0]),
        ),
        (
            "extend_logprob_start_lens[2]",
            M.EXTEND,
            schedule_with(
                return_logprob=True, top_logprobs_nums=[0] * 3, extend_logprob_start_lens=[0, 0, 5]
            ),
        ),
    ],
)
def test_a_broken_decision_names_its_field(
    field: str, mode: ForwardMode, broken: Callable[[ScheduleBatch], ScheduleBatch]
) -> None:
    at = world()
    with pytest.raises(BatchError) as found:
        at.forward(broken(scheduled(example_mix(mode), at)))
    message = str(found.value)
    assert message.startswith((f"{field}: ", f"{field} is "))


def test_requests_are_checked_before_they_wait() -> None:
    with pytest.raises(BatchError, match="'r': token_ids is empty"):
        Req.of_prompt("r", [])
    with pytest.raises(BatchError, match="token_ids holds -1"):
        Req.of_prompt("r", [3, -1])
    req = Req.of_prompt("r", [3, 9])
    req.check(vocab_size=10)
    with pytest.raises(BatchError, match="token_ids holds 9; ids are 0 to 8"):
        req.check(vocab_size=9)
    req.num_computed_tokens = 3
    with pytest.raises(BatchError, match="num_computed_tokens is 3 of 2"):
        req.check()
    req.num_computed_tokens, req.num_prompt_tokens = 0, 3
    with pytest.raises(BatchError, match="num_prompt_tokens is 3"):
        req.check()
    with pytest.raises(BatchError, match="start_len"):
        LogprobRequest(start_len=-1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", 0), ("top_p", 0.0), ("top_p", 1.5)],
)
def test_sampling_parameters_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
