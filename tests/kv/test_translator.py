"""From virtual slots to physical ones: every request reads back its own tokens, in every sub-pool."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_support import WINDOW, World, example_mix, scheduled, world

from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.padding import pad_batch
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.scheduling import can_schedule, release, release_out_of_window, schedule
from sgl_piecewise.runtime.errors import BatchError, ConfigError, PoolError
from sgl_piecewise.runtime.kv.allocator import KVSlotAllocator
from sgl_piecewise.runtime.kv.slots import FULL_POOL, WINDOW_POOL, VirtualSlots
from sgl_piecewise.runtime.kv.translator import KVIndexTranslator, KVRead, bind_and_verify_backends

LAYERS = {0: FULL_POOL, 1: WINDOW_POOL}


def write_tokens(at: World, batch: ForwardBatch) -> None:
    """A toy model: the key of a token is its id, the value its position. Padded rows write NaN."""
    is_real = torch.arange(batch.num_tokens) < batch.padding.num_real_tokens
    for layer_id, pool in LAYERS.items():
        k, v = (
            rows.float().masked_fill(~is_real, torch.nan).view(-1, 1, 1).expand(-1, 2, 4)
            for rows in (batch.input_ids, batch.positions)
        )
        at.pool.set_kv(layer_id, batch.write_slots[pool], k, v)


def assert_reads_own_tokens(at: World, batch: ForwardBatch, reqs: list[Req]) -> None:
    """As a backend would: rows of the table, then the buffers; a window begins with its first new token's."""
    for index, req in enumerate(reqs):
        seq_len = int(batch.seq_lens_cpu[index])
        for layer_id, pool in LAYERS.items():
            begin = 0 if pool == FULL_POOL else max(0, req.num_computed_tokens + 1 - WINDOW)
            row = at.kv_translator.req_to_token(pool)[batch.req_pool_indices[index], begin:seq_len].long()
            assert at.pool.k_buffer(layer_id)[row, 0, 0].tolist() == req.token_ids[begin:seq_len]
            assert at.pool.v_buffer(layer_id)[row, 0, 0].tolist() == list(range(begin, seq_len))


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 4))
def test_requests_read_their_own_tokens_whoever_comes_and_goes(seed: int, padding: int) -> None:
    """Chunked prefills and decodes in one pool that is too small for all, windows released as they move."""
    rng = random.Random(seed)
    at = world(num_slots=40, num_window_slots=24, max_requests=4, max_context=16)
    at.pool.poison_scratch()
    waiting = [
        Req.of_prompt(str(index), [1000 * (index + 1) + token for token in range(rng.randint(1, 12))])
        for index in range(6)
    ]
    running: list[Req] = []
    for _ in range(14):
        chosen = [req for req in [*running, *waiting] if rng.random() < 0.7]
        while chosen:
            news = [rng.randint(1, len(req.token_ids) - req.num_computed_tokens) for req in chosen]
            if can_schedule(chosen, news, at.allocator, at.table):
                break
            chosen.pop()
        if not chosen:
            continue
        batch = at.forward(schedule(ForwardMode.MIXED, chosen, news, at.allocator, at.table))
        padded = pad_batch(
            batch, num_tokens=batch.num_tokens + padding, batch_size=batch.batch_size + padding
        )
        padded.check()
        write_tokens(at, padded)
        assert_reads_own_tokens(at, batch, chosen)
        for req, new in zip(chosen, news, strict=True):
            req.num_computed_tokens += new
            if req in waiting:
                waiting.remove(req)
                running.append(req)
            if req.num_computed_tokens == len(req.token_ids):
                req.token_ids.append(rng.randint(0, 999))
            release_out_of_window(req, at.pool, at.allocator, at.table)
            if len(req.token_ids) > 14 or rng.random() < 0.1:
                running.remove(req)
                release(req, at.allocator, at.table)
    for req in running:
        release(req, at.allocator, at.table)
    assert [at.allocator.num_free(pool) for pool in at.allocator.pools] == [40, 24]
    assert at.table.num_free == 4


def test_a_window_keeps_what_the_next_token_reads() -> None:
    """Of a window of 4: itself and three before it."""
    at = world()
    req = Req.of_prompt("r", range(9))
    assert release_out_of_window(req, at.pool, at.allocator, at.table) == {}
    schedule(ForwardMode.EXTEND, [req], [8], at.allocator, at.table)
    assert release_out_of_window(req, at.pool, at.allocator, at.table) == {WINDOW_POOL: 0}
    req.num_computed_tokens = 8
    assert [release_out_of_window(req, at.pool, at.allocator, at.table) for _ in range(2)] == [
        {WINDOW_POOL: 5},
        {WINDOW_POOL: 0},
    ]
    assert at.allocator.num_free(WINDOW_POOL) == 160 - 3
    assert at.allocator.num_free(FULL_POOL) == 256 - 8


def test_a_token_whose_slot_was_released_is_not_lost_in_silence() -> None:
    at = world()
    batch = scheduled(example_mix(ForwardMode.EXTEND), at)
    plan = at.kv_translator.own_plan(batch.out_cache_loc)
    at.allocator.release(VirtualSlots(batch.out_cache_loc.ids[:2]), pool=WINDOW_POOL)
    with pytest.raises(PoolError, match="'window': 2 of 7 new tokens have no slot"):
        at.forward(batch)
    assert plan.is_open  # A refusal ends nothing.


def test_slots_are_translated_once_per_iteration() -> None:
    at = world()
    batch = scheduled(example_mix(ForwardMode.DECODE), at)
    plan = at.kv_translator.own_plan(batch.out_cache_loc, num_rows=3)
    before = at.kv_translator.num_translations
    forwards = [ForwardBatch.init_new(batch, at, kv_plan=plan) for _ in range(3)]
    assert at.kv_translator.num_translations == before
    assert plan.num_columns == 1
    for pool in at.kv_translator.pools:
        for forward in forwards:
            assert torch.equal(forward.write_slots[pool].ids, plan.write_ids(pool).ids)


def test_a_plan_ends_with_its_iteration() -> None:
    """Slots that an old plan named may be another request's."""
    at = world()
    batch = scheduled(example_mix(ForwardMode.DECODE), at)
    old = at.kv_translator.own_plan(batch.out_cache_loc)
    new = at.kv_translator.own_plan(batch.out_cache_loc)
    assert (old.is_open, new.is_open) == (False, True)
    with pytest.raises(PoolError, match="iteration that is over"):
        old.write_ids(FULL_POOL)
    with pytest.raises(PoolError, match="iteration that is over"):
        old.record(at.forward(batch))


def test_windows_and_pools_that_do_not_exist() -> None:
    at = world()
    batch = scheduled(example_mix(ForwardMode.TARGET_VERIFY), at)
    plan = at.kv_translator.own_plan(batch.out_cache_loc, num_rows=3)
    for cols in (range(2, 5), range(-1, 2), range(0, 4, 2), range(3, 1)):
        with pytest.raises(PoolError, match="is not inside the plan's 4 columns"):
            plan.write_ids(FULL_POOL, cols)
    with pytest.raises(PoolError, match="No sub-pool 'ful' was planned; did you mean 'full'"):
        plan.write_ids("ful")
    with pytest.raises(PoolError, match="No sub-pool 'windw'; did you mean 'window'"):
        at.kv_translator.req_to_token("windw")
    with pytest.raises(BatchError, match="12 slots do not divide into 5 rows"):
        at.kv_translator.own_plan(batch.out_cache_loc, num_rows=5)
    with pytest.raises(PoolError, match="another translator's"):
        ForwardBatch.init_new(batch, world(), kv_plan=plan)


def test_a_prebuilt_prefix_is_entered_for_backends() -> None:
    at = world()
    batch = scheduled(example_mix(ForwardMode.PREBUILT), at)
    row = batch.reqs[1].req_pool_index
    assert row is not None
    at.kv_translator.req_to_token(WINDOW_POOL)[row].zero_()
    at.kv_translator.record_prefix(row, at.table.slots(row))
    expected = at.allocator.translate(at.table.slots(row), pool=WINDOW_POOL)
    assert at.kv_translator.req_to_token(WINDOW_POOL)[row, :5].tolist() == expected.tolist()


def test_tables_stay_where_they_are() -> None:
    at = world()
    before = {name: tensor.data_ptr() for name, tensor in at.kv_translator.static_tensors().items()}
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
        at.forward(scheduled(example_mix(mode), at))
    assert before == {name: tensor.data_ptr() for name, tensor in at.kv_translator.static_tensors().items()}
    assert before.keys() == {"req_to_token.full", "req_to_token.window"}


def test_pool_and_allocator_must_agree() -> None:
    at = world()
    with pytest.raises(ConfigError, match="sub-pools"):
        KVIndexTranslator(at.pool, KVSlotAllocator({FULL_POOL: 4}), at.table)


class Reader:
    """A backend that reads what it is told to, or, as a fault, what stands in ``wrong``."""

    def __init__(self, **wrong: torch.Tensor) -> None:
        self.wrong = wrong

    def bind_kv(self, translator: KVIndexTranslator) -> None:
        self.translator = translator

    def kv_read(self, layer_id: int) -> KVRead:
        pool = self.translator.pool
        read = KVRead(
            k_buffer=pool.k_buffer(layer_id),
            v_buffer=pool.v_buffer(layer_id),
            req_to_token=self.translator.req_to_token(pool.of_layer(layer_id).spec.name),
        )
        return dataclasses.replace(read, **self.wrong) if layer_id == 1 else read


@pytest.mark.parametrize("field", ["k_buffer", "v_buffer", "req_to_token"])
def test_a_backend_that_would_index_another_pool_fails_at_start(field: str) -> None:
    at = world()
    wrong = {
        "k_buffer": at.pool.k_buffer(0),
        "v_buffer": at.pool.v_buffer(3),
        "req_to_token": at.kv_translator.req_to_token(FULL_POOL),
    }
    bind_and_verify_backends(at.kv_translator, {"good": Reader()}, range(4))
    with pytest.raises(ConfigError, match=f"'bad', layer 1: reads a {field}.*'window'"):
        bind_and_verify_backends(
            at.kv_translator, {"good": Reader(), "bad": Reader(**{field: wrong[field]})}, range(4)
        )


def test_a_translation_is_the_callers_own() -> None:
    """Writing to it must not reach the scheduler's slots; on a CPU both lie in the same memory space."""
    at = world()
    slots = at.allocator.allocate(3)
    kept = slots.ids.clone()
    for physical in at.kv_translator.translate(slots).values():
        physical.ids.fill_(9)
    assert torch.equal(slots.ids, kept)
    assert at.allocator.translate(VirtualSlots(kept), pool=WINDOW_POOL).tolist() == [1, 2, 3]
