"""A little world for attention tests: a pool with poisoned slots, requests, batches, a float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from sgl_piecewise.runtime.attention.base import AttentionSpec
from sgl_piecewise.runtime.attention.paged import PagedAttention
from sgl_piecewise.runtime.attention.plan import PlanLimits
from sgl_piecewise.runtime.attention.torch_paged import TorchAttention
from sgl_piecewise.runtime.batch.fields import ExtendFields, PaddingFields
from sgl_piecewise.runtime.batch.forward_batch import ForwardBatch
from sgl_piecewise.runtime.batch.forward_mode import CaptureHiddenMode, ForwardMode
from sgl_piecewise.runtime.batch.positions import StartLocEncoding
from sgl_piecewise.runtime.batch.sampling import BatchSampling
from sgl_piecewise.runtime.kernels.kernel_set import kernel_set
from sgl_piecewise.runtime.kv.pool import KVPool, KVSubPool, SubPoolSpec
from sgl_piecewise.runtime.kv.slots import FULL_POOL, PhysicalSlots
from sgl_piecewise.runtime.kv.translator import KVIndexTranslator

NUM_SLOTS = 600
NUM_ROWS = 8
LIMITS = PlanLimits(max_requests=6, max_tokens=192, max_context=256)

# Twice what rounding inputs, weights and the result to the dtype can do to values of size one.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Request:
    """A request as a test names it: a row of the page table, its prefix and its new tokens."""

    row: int
    prefix: int
    new: int

    @property
    def total(self) -> int:
        return self.prefix + self.new


def spec(
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    window: int | None = None,
    logit_soft_cap: float | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        layer_index=0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        logit_soft_cap=logit_soft_cap,
    )


def backend_class(name: str) -> type[PagedAttention]:
    if name == "torch":
        return TorchAttention
    if name == "triton":
        from sgl_piecewise.runtime.attention.triton_paged import TritonAttention

        return TritonAttention
    from sgl_piecewise.runtime.attention.flashinfer_paged import FlashInferAttention

    return FlashInferAttention


class Tables:
    """Stands in for the translator: one sub-pool, and a table that tests fill by hand."""

    def __init__(self, pool: KVPool, table: torch.Tensor) -> None:
        self.pool, self.device, self._table = pool, table.device, table

    def req_to_token(self, pool: str) -> torch.Tensor:
        assert pool == FULL_POOL
        return self._table


class World:
    """One layer's pool, of which nothing but written tokens is finite."""

    def __init__(
        self,
        layer: AttentionSpec,
        *,
        backend: str,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        limits: PlanLimits = LIMITS,
    ) -> None:
        self.layer, self.device, self.dtype = layer, device, dtype
        sub_pool = KVSubPool(
            SubPoolSpec(
                name=FULL_POOL,
                layer_ids=(layer.layer_index,),
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                dtype=dtype,
            ),
            num_slots=NUM_SLOTS,
            device=device,
        )
        self.pool = KVPool(
            [sub_pool], kernels=kernel_set("torch" if backend == "torch" else "triton", device)
        )
        for buffer in sub_pool.buffers(layer.layer_index):
            buffer.fill_(torch.nan)
        # Whatever stands behind a context's end is a real slot, of somebody else.
        order = torch.stack([torch.randperm(NUM_SLOTS)[: limits.max_context] for _ in range(NUM_ROWS)])
        self.page_table = (order + 1).to(torch.int32)
        self.page_table[:, : limits.max_context // 4 + 1] = (
            torch.randperm(NUM_SLOTS)[: NUM_ROWS * (limits.max_context // 4 + 1)].view(NUM_ROWS, -1) + 1
        )
        self.page_table = self.page_table.to(device)
        self.backend = backend_class(backend)([layer], limits=limits)
        self.backend.bind_kv(cast("KVIndexTranslator", Tables(self.pool, self.page_table)))
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def give_rows(self, requests: Sequence[Request]) -> None:
        """Gives requests slots of their own, and writes their prefixes."""
        order = (torch.randperm(NUM_SLOTS) + 1).to(self.device)
        begin = 0
        for request in requests:
            slots = order[begin : begin + request.total]
            begin += request.total
            self.page_table[request.row, : request.total] = slots.int()
            keys, values = self.random(request.prefix), self.random(request.prefix)
            self.keys[request.row], self.values[request.row] = keys, values
            self.pool.k_buffer(0)[slots[: request.prefix]] = keys
            self.pool.v_buffer(0)[slots[: request.prefix]] = values

    def random(self, num_tokens: int, num_heads: int | None = None) -> torch.Tensor:
        shape = (num_tokens, num_heads or self.layer.num_kv_heads, self.layer.head_dim)
        return torch.randn(shape).to(self.dtype).to(self.device)

    def batch(
        self,
        mode: ForwardMode,
        requests: Sequence[Request],
        *,
        num_tokens: int | None = None,
        num_requests: int | None = None,
    ) -> ForwardBatch:
        """Returns a batch, padded to what is asked for; padded requests are as the mode wants them."""
        is_ragged = mode.is_extend_without_speculative() and not mode.is_dllm_extend()
        each = 0 if is_ragged else requests[0].new
        padded = [*requests]
        padded += [Request(0, 0, each)] * ((num_requests or len(requests)) - len(requests))
        slots = [
            self.page_table[one.row, one.prefix : one.total].long()
            if index < len(requests)
            else torch.zeros(one.new, dtype=torch.int64, device=self.device)
            for index, one in enumerate(padded)
        ]
        tail = (num_tokens or 0) - sum(one.new for one in padded)
        slots.append(torch.zeros(max(tail, 0), dtype=torch.int64, device=self.device))
        out_cache_loc = torch.cat(slots)
        seq_lens = torch.tensor([one.total for one in padded], dtype=torch.int64)
        new_lens = torch.tensor([one.new for one in padded], dtype=torch.int32)
        prefix_lens = torch.tensor([one.prefix for one in padded], dtype=torch.int32)
        total = out_cache_loc.shape[0]
        real = sum(one.new for one in requests)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(padded),
            input_ids=torch.zeros(total, dtype=torch.int64, device=self.device),
            positions=torch.zeros(total, dtype=torch.int64, device=self.device),
            req_pool_indices=torch.tensor([one.row for one in padded], device=self.device),
            seq_lens=seq_lens.to(self.device),
            seq_lens_cpu=seq_lens,
            seq_lens_sum=int(seq_lens.sum()),
            max_seq_len=int(seq_lens.max()),
            write_slots={FULL_POOL: PhysicalSlots(FULL_POOL, out_cache_loc)},
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_tokens_per_req=None if is_ragged else each,
            padding=PaddingFields(
                num_real_tokens=torch.tensor(real, dtype=torch.int32, device=self.device),
                num_real_tokens_cpu=real,
            ),
            sampling=cast("BatchSampling", None),  # attention does not look at it
            extend=ExtendFields(
                extend_seq_lens=new_lens.to(self.device),
                extend_prefix_lens=prefix_lens.to(self.device),
                extend_start_loc=(new_lens.cumsum(0) - new_lens).to(self.device),
                extend_num_tokens=real,
                extend_seq_lens_cpu=tuple(new_lens.tolist()),
                extend_prefix_lens_cpu=tuple(prefix_lens.tolist()),
                start_loc_encoding=StartLocEncoding.TOKEN_OFFSET,
            )
            if mode.is_extend()
            else None,
        )

    def new_tokens(self, batch: ForwardBatch, real: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q, k and v as the split views that layers pass; padded rows are NaN."""
        heads = [self.layer.num_heads, self.layer.num_kv_heads, self.layer.num_kv_heads]
        qkv = self.random(batch.num_tokens, sum(heads))
        qkv[real:] = torch.nan
        q, k, v = qkv.split(heads, dim=1)
        return q, k, v

    def expected(
        self,
        requests: Sequence[Request],
        tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        is_causal: bool = True,
    ) -> torch.Tensor:
        """Attention of the real rows in float64, from the tensors and not from the pool."""
        rows, begin = [], 0
        for one in requests:
            q, k, v = (tensor[begin : begin + one.new].double().cpu() for tensor in tokens)
            begin += one.new
            keys = torch.cat([self.keys[one.row].double().cpu(), k])
            values = torch.cat([self.values[one.row].double().cpu(), v])
            rows.append(dense_attention(q, keys, values, one.prefix, self.layer, is_causal=is_causal))
        return torch.cat(rows)

    def run(
        self, batch: ForwardBatch, tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        self.backend.plan(batch)
        return self.backend.run(*tokens, self.layer)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix: int,
    layer: AttentionSpec,
    *,
    is_causal: bool = True,
) -> torch.Tensor:
    """Attention of one request's new tokens to all of its keys, in the dtype given."""
    group = layer.num_heads // layer.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    if layer.logit_soft_cap is not None:
        scores = layer.logit_soft_cap * (scores / layer.logit_soft_cap).tanh()
    key = torch.arange(k.shape[0])
    query = torch.arange(q.shape[0]).unsqueeze(1) + prefix
    if not is_causal:
        query = torch.full_like(query, k.shape[0] - 1)
    is_seen = key <= query
    if layer.window is not None:
        is_seen = is_seen & (key > query - layer.window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), v)
