"""`ForwardBatch.init_new`: owned tensors, an untouched input, every derived field."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from serving_support import Mix, assert_same, example_mix, mixes, scheduled, snapshot, tensors_of, world

from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import CaptureHiddenMode, ForwardMode
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.sampling import SamplingParams
from sgl_piecewise.runtime.batch.schedule_batch import DllmBlocks, ScheduleBatch, SpeculativeInput
from sgl_piecewise.runtime.batch.scheduling import schedule
from sgl_piecewise.runtime.errors import BatchError, PoolError


def host_values(batch: ScheduleBatch) -> str:
    plain = {name: value for name, value in vars(batch).items() if name != "reqs" and not tensors_of(value)}
    return repr((plain, batch.reqs))


@given(mixes())
def test_input_is_left_as_it_was(mix: Mix) -> None:
    at = world()
    batch = scheduled(mix, at)
    values, tensors = host_values(batch), snapshot(batch)
    at.forward(batch)
    assert host_values(batch) == values
    assert_same(tensors_of(batch), tensors)


@given(mixes())
def test_scribbling_over_the_schedule_buffers_changes_nothing(mix: Mix) -> None:
    """On a CPU ``.to(device)`` returns the caller's tensor itself: ownership has to be made."""
    at = world()
    batch = scheduled(mix, at)
    forward = at.forward(batch)
    expected = snapshot(forward)
    host = repr((forward.extend, forward.logprobs, forward.dllm))
    for tensor in tensors_of(batch).values():
        tensor.fill_(-77)
    lists = (batch.extend_lens, batch.prefix_lens, batch.top_logprobs_nums, batch.extend_logprob_start_lens)
    for numbers in lists:
        if numbers is not None:
            numbers[:] = [-77] * len(numbers)
    for req in batch.reqs:
        req.token_ids[:] = [-77] * len(req.token_ids)
    assert_same(tensors_of(forward), expected)
    assert repr((forward.extend, forward.logprobs, forward.dllm)) == host


@given(mixes())
def test_no_memory_is_shared_with_the_input(mix: Mix) -> None:
    at = world()
    batch = scheduled(mix, at)
    theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch).values() if tensor.numel()}
    for path, tensor in tensors_of(at.forward(batch)).items():
        if tensor.numel():
            assert tensor.untyped_storage().data_ptr() not in theirs, path


@given(mixes())
def test_every_batch_keeps_its_invariants(mix: Mix) -> None:
    at = world()
    forward = at.forward(scheduled(mix, at))
    forward.check()
    assert forward.batch_size == mix.batch_size
    assert forward.num_tokens == sum(mix.new_lens)
    assert (forward.extend is not None) == mix.mode.is_extend(include_draft_extend_v2=True)


@pytest.mark.parametrize("mode", ForwardMode)
def test_positions_of_every_mode(mode: ForwardMode) -> None:
    at, mix = world(), example_mix(mode)
    forward = at.forward(scheduled(mix, at))
    assert forward.positions.tolist() == [
        position
        for prefix, new in zip(mix.prefix_lens, mix.new_lens, strict=True)
        for position in range(prefix, prefix + new)
    ]


def test_a_rewritten_block_has_the_same_positions_and_slots_in_every_pass() -> None:
    at, mix = world(), example_mix(ForwardMode.DLLM_EXTEND)
    batch = scheduled(mix, at)
    first = at.forward(batch)
    again = schedule(batch.forward_mode, batch.reqs, mix.new_lens, at.allocator, at.table, dllm=batch.dllm)
    second = at.forward(again)
    assert torch.equal(second.positions, first.positions)
    assert torch.equal(second.out_cache_loc, first.out_cache_loc)


def test_a_blocks_positions_are_its_own_and_its_places_in_the_cache_are_not() -> None:
    """Positions come from the offsets, places from the prefix."""
    at = world()
    batch = scheduled(example_mix(ForwardMode.DLLM_EXTEND), at)
    batch.dllm = DllmBlocks(block_size=4, block_offsets=(20, 5, 40))
    forward = at.forward(batch)
    forward.check()
    assert forward.positions.view(3, 4)[:, 0].tolist() == [20, 5, 40]
    row = at.kv_translator.req_to_token("full")[forward.req_pool_indices[0]]
    assert row[3:7].tolist() == forward.out_cache_loc[:4].tolist()


def test_preset_positions_are_taken_over_and_copied() -> None:
    """A draft tree's siblings share a position; their places in the cache do not follow from it."""
    at = world()
    tree = torch.tensor([3, 4, 4, 5])
    req = Req.of_prompt("one", range(1, 9))
    schedule(ForwardMode.EXTEND, [req], [3], at.allocator, at.table)
    req.num_computed_tokens = 3
    batch = schedule(
        ForwardMode.TARGET_VERIFY,
        [req],
        [4],
        at.allocator,
        at.table,
        speculative=SpeculativeInput(num_tokens_per_req=4, positions=tree),
    )
    forward = at.forward(batch)
    tree.fill_(0)
    assert forward.positions.tolist() == [3, 4, 4, 5]
    row = at.kv_translator.req_to_token("full")[req.req_pool_index or 0]
    assert row[3:7].tolist() == forward.out_cache_loc.tolist()


def test_positions_of_another_length_are_refused() -> None:
    at = world()
    batch = scheduled(example_mix(ForwardMode.DECODE), at)
    with pytest.raises(BatchError, match="positions: shape"):
        ForwardBatch.init_new(batch, at, positions=torch.zeros(2, dtype=torch.int64))


def test_positions_of_several_axes_keep_their_shape() -> None:
    at = world()
    batch = scheduled(example_mix(ForwardMode.EXTEND), at)
    axes = torch.arange(21).view(3, 7)
    assert torch.equal(ForwardBatch.init_new(batch, at, positions=axes).positions, axes)


@pytest.mark.parametrize("is_draft_worker", [False, True])
def test_hidden_mode_is_the_most_that_anyone_needs(is_draft_worker: bool) -> None:
    at = world()
    at.is_draft_worker = is_draft_worker
    batch = scheduled(example_mix(ForwardMode.DECODE), at)
    null, last, full = CaptureHiddenMode
    assert at.forward(batch).capture_hidden_mode is null
    at.capture_hidden_mode, batch.capture_hidden_mode = null, last
    assert at.forward(batch).capture_hidden_mode is (null if is_draft_worker else last)
    at.capture_hidden_mode = full
    assert at.forward(batch).capture_hidden_mode is (null if is_draft_worker else full)
    batch.speculative = SpeculativeInput(num_tokens_per_req=1, capture_hidden_mode=last)
    assert at.forward(batch).capture_hidden_mode is (last if is_draft_worker else full)
    assert ForwardBatch.init_new(batch, at, capture_hidden_mode=null).capture_hidden_mode is null


def test_sampling_parameters_become_tensors() -> None:
    at = world()
    batch = scheduled(example_mix(ForwardMode.DECODE), at)
    assert at.forward(batch).sampling.is_all_greedy
    batch.reqs[1].sampling = SamplingParams(temperature=0.5, top_k=7, top_p=0.9)
    sampling = at.forward(batch).sampling
    assert not sampling.is_all_greedy
    assert sampling.temperatures.tolist() == [0.0, 0.5, 0.0]
    assert sampling.top_ks.tolist() == [-1, 7, -1]
    assert torch.equal(sampling.top_ps, torch.tensor([1.0, 0.9, 1.0]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_input_ids_that_the_sampler_left_on_the_device_are_copied(device: str) -> None:
    """Samplers write int32 or int64, and use their buffer again in the next step."""
    at = world(device=torch.device(device))
    batch = scheduled(example_mix(ForwardMode.DECODE), at)
    batch.input_ids = torch.tensor([7, 8, 9], dtype=torch.int32, device=device)
    forward = at.forward(batch)
    batch.input_ids.fill_(0)
    assert forward.input_ids.tolist() == [7, 8, 9]
    assert forward.input_ids.dtype == torch.int64
    forward.check()


def test_forwards_of_one_iteration_share_its_plan() -> None:
    """Draft steps write one column each, verify writes them all; slots are translated once."""
    at = world()
    reqs = []
    for index in range(2):
        req = Req.of_prompt(str(index), range(1, 12))
        schedule(ForwardMode.EXTEND, [req], [3], at.allocator, at.table)
        req.num_computed_tokens = 3
        reqs.append(req)
    speculative = SpeculativeInput(num_tokens_per_req=3)
    verify = schedule(
        ForwardMode.TARGET_VERIFY, reqs, [3, 3], at.allocator, at.table, speculative=speculative
    )
    before = at.kv_translator.num_translations
    plan = at.kv_translator.own_plan(verify.out_cache_loc, num_rows=2)
    written = []
    for step in range(3):
        draft = schedule(ForwardMode.DECODE, reqs, [1, 1], at.allocator, at.table)
        draft.seq_lens_cpu = draft.seq_lens_cpu + step
        forward = ForwardBatch.init_new(draft, at, kv_plan=plan, cols=range(step, step + 1))
        written.append(forward.out_cache_loc)
    whole = ForwardBatch.init_new(verify, at, kv_plan=plan)
    assert at.kv_translator.num_translations == before + 1
    assert torch.equal(torch.stack(written, dim=1).flatten(), whole.out_cache_loc)
    with pytest.raises(BatchError, match="out_cache_loc"):
        ForwardBatch.init_new(verify, at, kv_plan=plan, cols=range(1))
    at.forward(scheduled(example_mix(ForwardMode.DECODE), at))
    with pytest.raises(PoolError, match="iteration that is over"):
        ForwardBatch.init_new(verify, at, kv_plan=plan)
