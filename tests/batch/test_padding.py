"""Padding and the cut back: the identity on real rows in every mode, and harmless tails."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving_support import (
    BLOCK_SIZE,
    Mix,
    assert_same,
    example_mix,
    mixes,
    scheduled,
    snapshot,
    tensors_of,
    world,
)

from sgl_piecewise.runtime.batch import static_buffers
from sgl_piecewise.runtime.batch.fields import PaddingFields
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode, NewTokens
from sgl_piecewise.runtime.batch.padding import (
    IdleShape,
    cut_logits,
    cut_requests,
    cut_tokens,
    num_logit_rows,
    pad_batch,
    padded_batch_size,
    padded_num_tokens,
)
from sgl_piecewise.runtime.batch.positions import StartLocEncoding
from sgl_piecewise.runtime.batch.static_buffers import StaticBatchBuffers
from sgl_piecewise.runtime.errors import BatchError

PADDABLE = [mode for mode in ForwardMode if mode is not ForwardMode.PREBUILT]
REAL_MODES = [mode for mode in PADDABLE if mode is not ForwardMode.IDLE]
RAGGED = [mode for mode in ForwardMode if mode.properties.new_tokens is NewTokens.RAGGED]
IDLE_SHAPES = [
    IdleShape(forward_mode=ForwardMode.DECODE, num_tokens_per_req=1),
    IdleShape(forward_mode=ForwardMode.TARGET_VERIFY, num_tokens_per_req=BLOCK_SIZE),
    IdleShape(
        forward_mode=ForwardMode.EXTEND,
        num_tokens_per_req=None,
        start_loc_encoding=StartLocEncoding.KV_OFFSET,
    ),
]


def padded_by(
    batch: ForwardBatch, requests: int, tokens: int, idle_as: IdleShape = IDLE_SHAPES[0], **options: object
) -> ForwardBatch:
    """Pads by that much, in the way of the batch's mode."""
    shape = idle_as if batch.forward_mode.is_idle() else None
    per_req = batch.num_tokens_per_req if shape is None else shape.num_tokens_per_req
    return pad_batch(
        batch,
        batch_size=batch.batch_size + requests,
        num_tokens=batch.num_tokens + tokens if per_req is None else None,
        idle_as=shape,
        **options,  # type: ignore[arg-type]
    )


@given(mixes(PADDABLE), st.integers(0, 5), st.integers(0, 9), st.sampled_from(IDLE_SHAPES))
def test_padding_then_cutting_is_the_identity_on_real_rows(
    mix: Mix, requests: int, tokens: int, idle_as: IdleShape
) -> None:
    at = world()
    batch = at.forward(scheduled(mix, at))
    expected = snapshot(batch)
    padded = padded_by(batch, requests, tokens, idle_as)
    padded.check()
    assert padded.real is batch
    assert_same(tensors_of(batch), expected)
    # Results carry the number of their row.
    for cut, num_padded, num_real in (
        (cut_tokens, padded.num_tokens, batch.num_tokens),
        (cut_requests, padded.batch_size, batch.batch_size),
        (cut_logits, num_logit_rows(padded), num_logit_rows(batch)),
    ):
        assert cut(padded, torch.arange(num_padded)).tolist() == list(range(num_real))


@given(mixes(PADDABLE), st.integers(1, 5), st.integers(1, 9))
def test_mode_and_size_are_restored_after_the_forward(mix: Mix, requests: int, tokens: int) -> None:
    """An idle rank that ran a decode graph is idle again, with no row of it."""
    at = world()
    batch = at.forward(scheduled(mix, at))
    padded = padded_by(batch, requests, tokens)
    assert padded.batch_size == mix.batch_size + requests
    assert (padded.real.forward_mode, padded.real.batch_size) == (mix.mode, mix.batch_size)


@given(mixes(REAL_MODES), st.integers(0, 5), st.integers(0, 9))
def test_every_tensor_of_the_padded_batch_begins_with_the_real_one(
    mix: Mix, requests: int, tokens: int
) -> None:
    at = world()
    batch = at.forward(scheduled(mix, at))
    padded = tensors_of(dataclasses.replace(padded_by(batch, requests, tokens), padding=batch.padding))
    for path, tensor in tensors_of(batch).items():
        assert torch.equal(padded[path][: len(tensor)] if tensor.ndim else padded[path], tensor), path


@pytest.mark.parametrize(
    "mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DLLM_EXTEND]
)
def test_verify_and_draft_extend_keep_their_rows_per_request(mode: ForwardMode) -> None:
    at = world()
    batch = at.forward(scheduled(example_mix(mode), at))
    padded = padded_by(batch, 5, 0)
    assert padded.num_tokens == 8 * BLOCK_SIZE
    logits = torch.arange(8 * BLOCK_SIZE)
    assert (
        cut_logits(padded, logits).view(3, BLOCK_SIZE).tolist()
        == logits[: 3 * BLOCK_SIZE].view(3, -1).tolist()
    )


@pytest.mark.parametrize("mode", RAGGED)
def test_unused_request_slots_are_sentinels_of_length_zero(mode: ForwardMode) -> None:
    at = world()
    for encoding in StartLocEncoding:
        mix = dataclasses.replace(example_mix(mode), encoding=encoding)
        padded = padded_by(at.forward(scheduled(mix, at)), 2, 4)
        padded.check()
        assert padded.extend is not None
        end = sum(mix.new_lens) + (sum(mix.prefix_lens) if encoding is StartLocEncoding.KV_OFFSET else 0)
        assert padded.extend.extend_start_loc[3:].tolist() == [end, end]
        assert padded.extend.extend_seq_lens_cpu[3:] == (0, 0)
        assert padded.seq_lens[3:].tolist() == [0, 0]
        at = world()


@given(mixes(REAL_MODES), mixes(REAL_MODES))
def test_static_buffers_hold_nothing_of_an_older_batch(older: Mix, newer: Mix) -> None:
    """Every tail is written anew, whatever stood there."""
    at = world(num_slots=512, num_window_slots=512, max_requests=16)
    buffers = StaticBatchBuffers(
        max_batch_size=12, max_num_tokens=80, pools=at.kv_translator.pools, device=at.device
    )
    for tensor in buffers.static_tensors().values():
        tensor.fill_(-9)
    first = at.forward(scheduled(older, at))
    padded_by(first, 12 - first.batch_size, 80 - first.num_tokens, storage=buffers)
    batch = at.forward(scheduled(newer, at))
    static = padded_by(batch, 1, 3, storage=buffers)
    static.check()
    assert_same(tensors_of(static), tensors_of(padded_by(batch, 1, 3)))


def test_rooms_of_static_buffers_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal sizes find the same views; so many sizes that rooms are dropped still find the same addresses."""
    monkeypatch.setattr(static_buffers, "_MAX_ROOMS", 2)
    at = world()
    buffers = StaticBatchBuffers(
        max_batch_size=8, max_num_tokens=32, pools=at.kv_translator.pools, device=at.device
    )
    batch = at.forward(scheduled(example_mix(ForwardMode.DECODE), at))
    first = padded_by(batch, 1, 0, storage=buffers)
    assert padded_by(batch, 1, 0, storage=buffers).seq_lens is first.seq_lens
    for more in (2, 3, 4):
        padded_by(batch, more, 0, storage=buffers)
    assert padded_by(batch, 1, 0, storage=buffers).seq_lens is first.seq_lens
    assert len(buffers._rooms) <= 2


def test_a_count_over_the_buffers_is_kept_whole() -> None:
    """Ranks together may have more tokens than one rank's buffers."""
    at = world()
    buffers = StaticBatchBuffers(
        max_batch_size=8, max_num_tokens=8, pools=at.kv_translator.pools, device=at.device
    )
    batch = at.forward(scheduled(example_mix(ForwardMode.DECODE), at))
    many = dataclasses.replace(
        batch,
        padding=PaddingFields(
            num_real_tokens=torch.tensor(70_000, dtype=torch.int32), num_real_tokens_cpu=70_000
        ),
    )
    padded = padded_by(many, 1, 0, storage=buffers)
    assert padded.padding.num_real_tokens.dtype == torch.int32
    assert padded.padding.num_real_tokens.item() == 70_000
    assert padded_by(batch, 1, 0, storage=buffers).padding.num_real_tokens.item() == batch.num_tokens


def test_static_buffers_stay_where_they_are() -> None:
    at = world()
    buffers = StaticBatchBuffers(
        max_batch_size=8, max_num_tokens=32, pools=at.kv_translator.pools, device=at.device
    )
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.static_tensors().items()}
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
        batch = padded_by(at.forward(scheduled(example_mix(mode), at)), 1, 1, storage=buffers)
        assert batch.input_ids.data_ptr() == addresses["input_ids"]
        assert batch.out_cache_loc.data_ptr() == addresses["write_slots.full"]
        assert batch.padding.num_real_tokens.data_ptr() == addresses["num_real_tokens"]
        at = world()


@pytest.mark.parametrize("mode", REAL_MODES)
def test_every_tensor_that_a_graph_may_read_is_static(mode: ForwardMode) -> None:
    """A field that is added to the batch and not to the buffers is found here; host twins and sampling stay live."""
    at = world()
    buffers = StaticBatchBuffers(
        max_batch_size=8, max_num_tokens=32, pools=at.kv_translator.pools, device=at.device
    )
    static = {tensor.untyped_storage().data_ptr() for tensor in buffers.static_tensors().values()}
    padded = padded_by(at.forward(scheduled(example_mix(mode), at)), 1, 1, storage=buffers)
    found = {
        path.removeprefix("batch."): tensor.untyped_storage().data_ptr() in static
        for path, tensor in tensors_of(padded).items()
        if not path.startswith("batch.padding.unpadded")
    }
    live = {path for path, is_static in found.items() if not is_static}
    sampling = {f"sampling.{name}" for name in ("temperatures", "top_ks", "top_ps", "seeds")}
    assert live == {"seq_lens_cpu", *sampling}


def test_static_buffers_name_what_does_not_fit() -> None:
    at = world()
    batch = at.forward(scheduled(example_mix(ForwardMode.EXTEND), at))
    for options, message in (
        ({"max_num_tokens": 7, "pools": ("full",)}, r"write_slots.window.*did you mean 'write_slots.full'"),
        ({"max_num_tokens": 6, "pools": at.kv_translator.pools}, "input_ids: 7 rows.*has 6"),
    ):
        buffers = StaticBatchBuffers(max_batch_size=4, device=at.device, **options)  # type: ignore[arg-type]
        with pytest.raises(BatchError, match=message):
            pad_batch(batch, storage=buffers)
    axes = dataclasses.replace(batch, positions=torch.zeros(3, 7, dtype=torch.int64))
    buffers = StaticBatchBuffers(
        max_batch_size=4, max_num_tokens=8, pools=at.kv_translator.pools, device=at.device
    )
    with pytest.raises(BatchError, match="positions: the static buffer"):
        pad_batch(axes, storage=buffers)


def test_sizes_are_multiples_of_the_tensor_parallel_size() -> None:
    assert [padded_num_tokens(count, 4) for count in (0, 1, 4, 5)] == [0, 4, 4, 8]
    # Five requests of three rows: with four ranks only multiples of four requests divide.
    assert [padded_batch_size(5, rows, 4) for rows in (1, 2, 3, 4)] == [8, 6, 8, 5]


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 16))
def test_padded_batch_size_is_the_smallest_that_divides(size: int, rows: int, multiple_of: int) -> None:
    found = padded_batch_size(size, rows, multiple_of)
    assert found == next(n for n in range(size, size + multiple_of) if n * rows % multiple_of == 0)


def test_results_of_another_size_are_refused() -> None:
    at = world()
    padded = padded_by(at.forward(scheduled(example_mix(ForwardMode.DECODE), at)), 1, 0)
    with pytest.raises(BatchError, match="3 rows, and the padded batch 4 tokens"):
        cut_tokens(padded, torch.zeros(3))


def test_refusals_name_the_field() -> None:
    at = world()
    decode = at.forward(scheduled(example_mix(ForwardMode.DECODE), at))
    with pytest.raises(BatchError, match="padding: the batch is padded already"):
        pad_batch(pad_batch(decode, batch_size=4), batch_size=8)
    with pytest.raises(BatchError, match="num_tokens: DECODE has 1 tokens"):
        pad_batch(decode, num_tokens=4)
    with pytest.raises(BatchError, match="batch_size: the batch has 3"):
        pad_batch(decode, batch_size=2)
    with pytest.raises(BatchError, match="idle_as: DECODE"):
        pad_batch(decode, batch_size=4, idle_as=IDLE_SHAPES[0])
    idle = at.forward(scheduled(example_mix(ForwardMode.IDLE), at))
    with pytest.raises(BatchError, match="idle_as: IDLE"):
        pad_batch(idle, batch_size=4)
    with pytest.raises(BatchError, match="num_tokens_per_req is 2"):
        pad_batch(
            idle, batch_size=4, idle_as=IdleShape(forward_mode=ForwardMode.EXTEND, num_tokens_per_req=2)
        )
    prebuilt = at.forward(scheduled(example_mix(ForwardMode.PREBUILT), at))
    with pytest.raises(BatchError, match="idle_as: PREBUILT"):
        pad_batch(prebuilt, batch_size=4)
