"""A runner's pools without a model, random request mixes, and what batches of every mode look like."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import CaptureHiddenMode, ForwardMode, NewTokens
from sgl_piecewise.runtime.batch.positions import StartLocEncoding
from sgl_piecewise.runtime.batch.request import LogprobRequest, Req
from sgl_piecewise.runtime.batch.schedule_batch import DllmBlocks, ScheduleBatch, SpeculativeInput
from sgl_piecewise.runtime.batch.scheduling import schedule
from sgl_piecewise.runtime.kv.allocator import KVSlotAllocator
from sgl_piecewise.runtime.kv.pool import KVPool, KVSubPool, SubPoolSpec
from sgl_piecewise.runtime.kv.req_to_token import ReqToTokenPool
from sgl_piecewise.runtime.kv.slots import FULL_POOL, WINDOW_POOL
from sgl_piecewise.runtime.kv.translator import KVIndexTranslator

CPU = torch.device("cpu")
BLOCK_SIZE = 4
WINDOW = 4


def sub_pool(
    name: str,
    layer_ids: tuple[int, ...],
    num_slots: int,
    window: int | None = None,
    device: torch.device = CPU,
) -> KVSubPool:
    spec = SubPoolSpec(
        name=name, layer_ids=layer_ids, num_kv_heads=2, head_dim=4, dtype=torch.float32, window=window
    )
    return KVSubPool(spec, num_slots=num_slots, device=device)


@dataclass(kw_only=True)
class World:
    """Pools of a hybrid model, and the runner that `ForwardBatch.init_new` asks."""

    pool: KVPool
    allocator: KVSlotAllocator
    table: ReqToTokenPool
    kv_translator: KVIndexTranslator
    device: torch.device = CPU
    start_loc_encoding: StartLocEncoding = StartLocEncoding.TOKEN_OFFSET
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    is_draft_worker: bool = False

    def forward(self, batch: ScheduleBatch) -> ForwardBatch:
        return ForwardBatch.init_new(batch, self)


def world(
    *,
    num_slots: int = 256,
    num_window_slots: int = 160,
    max_requests: int = 8,
    max_context: int = 64,
    device: torch.device = CPU,
) -> World:
    pool = KVPool(
        [
            sub_pool(FULL_POOL, (0, 2), num_slots, device=device),
            sub_pool(WINDOW_POOL, (1, 3), num_window_slots, window=WINDOW, device=device),
        ]
    )
    allocator = KVSlotAllocator.of_pool(pool)
    table = ReqToTokenPool(max_requests=max_requests, max_context=max_context)
    translator = KVIndexTranslator(pool, allocator, table)
    return World(pool=pool, allocator=allocator, table=table, kv_translator=translator, device=device)


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Requests of one batch: tokens that are computed, new ones, and what they ask for."""

    mode: ForwardMode
    prefix_lens: tuple[int, ...]
    new_lens: tuple[int, ...]
    has_logprobs: bool = False
    encoding: StartLocEncoding = StartLocEncoding.TOKEN_OFFSET

    @property
    def batch_size(self) -> int:
        return len(self.prefix_lens)


def lens_of(mode: ForwardMode, size: int, ragged: Sequence[int]) -> tuple[int, ...]:
    """New tokens of ``size`` requests in a mode; ``ragged`` are used where they may differ."""
    new_tokens = mode.properties.new_tokens
    if new_tokens is NewTokens.RAGGED:
        return tuple(ragged[:size])
    return ({NewTokens.NONE: 0, NewTokens.ONE: 1, NewTokens.FIXED: BLOCK_SIZE}[new_tokens],) * size


@st.composite
def mixes(draw: st.DrawFn, modes: Sequence[ForwardMode] = tuple(ForwardMode)) -> Mix:
    mode = draw(st.sampled_from(modes))
    size = 0 if mode.is_idle() else draw(st.integers(1, 6))
    ragged = draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    least = 1 if mode.is_decode() or mode.is_prebuilt() else 0
    prefixes = draw(st.lists(st.integers(least, 9), min_size=size, max_size=size))
    return Mix(
        mode=mode,
        prefix_lens=tuple(prefixes),
        new_lens=lens_of(mode, size, ragged),
        has_logprobs=draw(st.booleans()),
        encoding=draw(st.sampled_from(StartLocEncoding)),
    )


def example_mix(mode: ForwardMode) -> Mix:
    """Three requests of a mode (none in IDLE), with prefixes."""
    size = 0 if mode.is_idle() else 3
    return Mix(mode=mode, prefix_lens=(3, 5, 2)[:size], new_lens=lens_of(mode, size, (2, 1, 4)))


def scheduled(mix: Mix, at: World) -> ScheduleBatch:
    """Schedules a mix whose prefixes were computed before."""
    at.start_loc_encoding = mix.encoding
    reqs = []
    for index, (prefix, new) in enumerate(zip(mix.prefix_lens, mix.new_lens, strict=True)):
        length = prefix + new
        req = Req.of_prompt(
            f"request {index}",
            [100 * index + token + 1 for token in range(length + 1)],
            logprobs=LogprobRequest(start_len=prefix, top_num=index) if mix.has_logprobs else None,
        )
        if prefix:
            at.forward(schedule(ForwardMode.EXTEND, [req], [prefix], at.allocator, at.table))
            req.num_computed_tokens = prefix
        reqs.append(req)
    speculative = dllm = None
    if mix.mode.is_dllm_extend():
        dllm = DllmBlocks(block_size=BLOCK_SIZE, block_offsets=mix.prefix_lens)
    elif mix.mode.properties.new_tokens is NewTokens.FIXED:
        speculative = SpeculativeInput(num_tokens_per_req=BLOCK_SIZE)
    return schedule(mix.mode, reqs, mix.new_lens, at.allocator, at.table, speculative=speculative, dllm=dllm)


def tensors_of(value: object, path: str = "batch") -> dict[str, torch.Tensor]:
    """Every tensor of a batch by path, found by walking all fields, so that none is forgotten."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    found: dict[str, torch.Tensor] = {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            found |= tensors_of(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            found |= tensors_of(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            found |= tensors_of(item, f"{path}[{index}]")
    return found


def snapshot(value: object) -> dict[str, torch.Tensor]:
    return {path: tensor.clone() for path, tensor in tensors_of(value).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        assert torch.equal(found[path], tensor), path
