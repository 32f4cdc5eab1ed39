"""Paged attention by FlashInfer's wrappers, with pages of one token.

A wrapper plans on the host for one kind of layer; in a graph it keeps its plan in buffers of its
own, one wrapper for each kind, mode and size. All share one workspace, and wrappers of one kind
one plan memory: only what was planned last runs. FlashInfer is an optional package.

Shapes: `B` requests, `T` tokens, `N` tokens of all contexts.
Source: flashinfer-python 0.6.6, ``decode.py`` and ``prefill.py``; differs: plan memory is shared
between sizes (each wrapper's own would be 8 MB; flashinfer#2046).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import ForwardMode
from ..errors import ConfigError, DeviceUnavailableError
from ..kernels.flashinfer_library import import_flashinfer
from ..kv.translator import KVIndexTranslator, KVRead
from .backend import COMPUTING_MODES
from .base import AttentionSpec
from .paged import PagedAttention
from .plan import PagedPlan, PlanLimits

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 256)
_PLAN_BYTES = 8 * 1024 * 1024  # what its wrappers give themselves
_PAGE_SIZE = 1
_MIN_TENSOR_CORE_GROUP = 4  # from so many query heads a KV head on, tensor cores win in decode
_CUDA_CORE_GROUPS = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What a wrapper is planned for: equal layers share it."""

    pool: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    logit_soft_cap: float | None


@dataclass(frozen=True, kw_only=True)
class _Lengths:
    """Host side of a plan: where queries and contexts of requests begin (int32[B + 1] each)."""

    query_start_cpu: torch.Tensor
    kv_start_cpu: torch.Tensor
    last_page_len_cpu: torch.Tensor

    @property
    def num_kv(self) -> int:
        """Tokens of all contexts (`N`)."""
        return int(self.kv_start_cpu[-1])


class FlashInferAttention(PagedAttention):
    """Paged attention by FlashInfer.

    Args:
        layers: Constants of the model's attention layers.
        limits: The largest batch.
        workspace_bytes: Memory for partial results, shared by all wrappers.

    Raises:
        MissingExtraError: FlashInfer is not installed.
    """

    name = "flashinfer"
    full_capture_modes = COMPUTING_MODES

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        *,
        limits: PlanLimits,
        workspace_bytes: int = 384 * 1024 * 1024,
    ) -> None:
        super().__init__(layers, limits=limits)
        self._flashinfer = import_flashinfer(purpose="compute attention with the backend 'flashinfer'")
        self._workspace_bytes = workspace_bytes
        self._kinds: dict[int, _Kind] = {}
        self._graph_wrappers: dict[tuple[_Kind, tuple[ForwardMode, int, int]], Any] = {}

    @classmethod
    def takes(cls, layers: Sequence[AttentionSpec], dtype: torch.dtype) -> bool:
        return dtype in _DTYPES and all(layer.head_dim in _HEAD_DIMS for layer in layers)

    def bind_kv(self, translator: KVIndexTranslator) -> None:
        super().bind_kv(translator)
        device = translator.device
        if device.type != "cuda":
            raise DeviceUnavailableError(
                f"FlashInfer runs on CUDA devices, and the KV pool is on {device}. Choose the torch backend there."
            )
        for index, layer in self._layers.items():
            spec = translator.pool.of_layer(index).spec
            self._kinds[index] = _Kind(
                pool=spec.name,
                dtype=spec.dtype,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                scale=layer.scale,
                window=layer.window,
                logit_soft_cap=layer.logit_soft_cap,
            )
        # FlashInfer asks for zeros before the first use.
        self._workspace = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=device)
        self._plan_memory = {
            kind: torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=device) for kind in self._kinds.values()
        }
        self._indices = {
            pool: torch.zeros(
                self.limits.max_requests * self.limits.max_context, dtype=torch.int32, device=device
            )
            for pool in {kind.pool for kind in self._kinds.values()}
        }
        self._eager_wrappers = {
            (kind, is_decode): self._new_wrapper(kind, is_decode=is_decode)
            for kind in self._plan_memory
            for is_decode in (True, False)
        }
        self._graph_wrappers.clear()
        self._current_wrappers: dict[_Kind, Any] = {}
        self._plan_copied = torch.cuda.Event()

    def static_tensors(self) -> dict[str, torch.Tensor]:
        indices = {f"flashinfer.indices.{pool}": tensor for pool, tensor in self._indices.items()}
        memory = {
            f"flashinfer.plan.{number}": tensor for number, tensor in enumerate(self._plan_memory.values())
        }
        return {**super().static_tensors(), **indices, **memory, "flashinfer.workspace": self._workspace}

    def _tile_rows(self, layer: AttentionSpec, dtype: torch.dtype) -> int:
        return 128  # its wrappers make their own tiles; ours only fill the plan

    def _check_layer(self, layer: AttentionSpec, dtype: torch.dtype) -> None:
        if dtype not in _DTYPES:
            raise ConfigError(
                f"FlashInfer computes in {', '.join(map(str, _DTYPES))}, and the KV pool of layer "
                f"{layer.layer_index} is {dtype}. Choose another dtype or attention backend."
            )
        if layer.head_dim not in _HEAD_DIMS:
            raise ConfigError(
                f"FlashInfer takes head sizes {', '.join(map(str, _HEAD_DIMS))}, and layer {layer.layer_index} has "
                f"{layer.head_dim}. Choose the Triton backend."
            )

    def _attend_few(
        self, q_THD: torch.Tensor, read: KVRead, layer: AttentionSpec, plan: PagedPlan
    ) -> torch.Tensor:
        return self._run_wrapper(q_THD, read, layer)

    def _attend_tiles(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        read: KVRead,
        layer: AttentionSpec,
        plan: PagedPlan,
    ) -> torch.Tensor:
        # Rows of no request are zero: the prefill wrapper allocates zeros and writes what was planned.
        return self._run_wrapper(q_THD, read, layer)

    def _run_wrapper(self, q_THD: torch.Tensor, read: KVRead, layer: AttentionSpec) -> torch.Tensor:
        wrapper = self._current_wrappers[self._kinds[layer.layer_index]]
        return wrapper.run(q_THD, (read.k_buffer.unsqueeze(1), read.v_buffer.unsqueeze(1)))

    # Planning

    def _prepare(self, plan: PagedPlan, batch: ForwardBatch, *, is_for_graph: bool) -> None:
        if plan.num_requests == 0 or plan.num_tokens == 0:
            return
        # Its plans are copied from pinned memory of the wrapper, which the copy may still be reading.
        self._plan_copied.synchronize()
        lengths = _lengths(plan, batch)
        indices = {pool: self._kv_indices(pool, plan, lengths) for pool in self._indices}
        is_decode = plan.tokens_per_request == 1 and plan.is_causal
        for kind in self._plan_memory:
            wrapper = (
                self._graph_wrapper(kind, plan, is_decode=is_decode)
                if is_for_graph
                else self._eager_wrappers[kind, is_decode]
            )
            _plan_wrapper(
                wrapper, kind, lengths, indices[kind.pool], is_decode=is_decode, is_causal=plan.is_causal
            )
            self._current_wrappers[kind] = wrapper
        self._plan_copied.record()

    def _kv_indices(self, pool: str, plan: PagedPlan, lengths: _Lengths) -> torch.Tensor:
        """Returns the slots of all contexts, request by request (int32[N], fresh)."""
        table = self._bound().tables[pool]
        end_B = plan.seq_lens.cumsum(0)
        request_N = torch.repeat_interleave(
            torch.arange(plan.num_requests, device=table.device), plan.seq_lens, output_size=lengths.num_kv
        )
        position_N = torch.arange(lengths.num_kv, device=table.device)
        position_N -= (end_B - plan.seq_lens)[request_N]
        return table[plan.req_pool_indices[request_N], position_N]

    def _graph_wrapper(self, kind: _Kind, plan: PagedPlan, *, is_decode: bool) -> Any:
        key = (kind, (plan.mode, plan.num_requests, plan.num_tokens))
        wrapper = self._graph_wrappers.get(key)
        if wrapper is None:
            wrapper = self._new_wrapper(kind, is_decode=is_decode, num_requests=plan.num_requests)
            if not is_decode:
                # Its first plan fixes how many rows a replay may have: plan the most there can be.
                lengths = _widest(plan, self.limits)
                _plan_wrapper(
                    wrapper,
                    kind,
                    lengths,
                    self._indices[kind.pool][: lengths.num_kv],
                    is_decode=False,
                    is_causal=plan.is_causal,
                )
            self._graph_wrappers[key] = wrapper
        return wrapper

    def _new_wrapper(self, kind: _Kind, *, is_decode: bool, num_requests: int | None = None) -> Any:
        """Makes a wrapper; with a number of requests, one whose plans a graph may read."""
        device = self._workspace.device
        starts, lens = {}, {}
        if num_requests is not None:
            starts = {
                name: torch.zeros(num_requests + 1, dtype=torch.int32, device=device)
                for name in ("query", "kv")
            }
            lens = {"last_page": torch.ones(num_requests, dtype=torch.int32, device=device)}
        is_for_graph = num_requests is not None
        if is_decode:
            group = kind.num_heads // kind.num_kv_heads
            wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=is_for_graph,
                use_tensor_cores=group >= _MIN_TENSOR_CORE_GROUP or group not in _CUDA_CORE_GROUPS,
                paged_kv_indptr_buffer=starts.get("kv"),
                paged_kv_indices_buffer=self._indices[kind.pool] if is_for_graph else None,
                paged_kv_last_page_len_buffer=lens.get("last_page"),
            )
        else:
            wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=is_for_graph,
                qo_indptr_buf=starts.get("query"),
                paged_kv_indptr_buf=starts.get("kv"),
                paged_kv_indices_buf=self._indices[kind.pool] if is_for_graph else None,
                paged_kv_last_page_len_buf=lens.get("last_page"),
                # In graphs the kernels whose launch depends on sizes only; else what suits the device.
                backend="fa2" if is_for_graph else "auto",
            )
        wrapper.reset_workspace_buffer(self._workspace, self._plan_memory[kind])
        return wrapper


def _plan_wrapper(
    wrapper: Any, kind: _Kind, lengths: _Lengths, indices: torch.Tensor, *, is_decode: bool, is_causal: bool
) -> None:
    """Plans one wrapper; lengths are on the host, so that it need not wait for the device."""
    options: dict[str, Any] = {
        "page_size": _PAGE_SIZE,
        "window_left": -1 if kind.window is None else kind.window - 1,
        "logits_soft_cap": kind.logit_soft_cap,
        "sm_scale": kind.scale,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.dtype,
    }
    contexts = (lengths.kv_start_cpu, indices, lengths.last_page_len_cpu)
    if is_decode:
        wrapper.plan(
            *contexts,
            num_qo_heads=kind.num_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            **options,
        )
        return
    wrapper.plan(
        lengths.query_start_cpu,
        *contexts,
        num_qo_heads=kind.num_heads,
        num_kv_heads=kind.num_kv_heads,
        head_dim_qk=kind.head_dim,
        causal=is_causal,
        **options,
    )


def _lengths(plan: PagedPlan, batch: ForwardBatch) -> _Lengths:
    if plan.tokens_per_request is not None:
        new_lens = torch.full((plan.num_requests,), plan.tokens_per_request)
    else:
        assert batch.extend is not None, "a ragged batch has extend fields"
        new_lens = torch.tensor(batch.extend.extend_seq_lens_cpu)
    return _from_lens(new_lens, batch.seq_lens_cpu)


def _widest(plan: PagedPlan, limits: PlanLimits) -> _Lengths:
    """Returns lengths with all rows of a graph in use."""
    new_lens = torch.zeros(plan.num_requests, dtype=torch.int64)
    new_lens[0] = plan.num_tokens
    if plan.tokens_per_request is not None:
        new_lens.fill_(plan.tokens_per_request)
    return _from_lens(new_lens, new_lens.clamp(max=limits.max_context))


def _from_lens(new_lens: torch.Tensor, seq_lens: torch.Tensor) -> _Lengths:
    return _Lengths(
        query_start_cpu=_starts(new_lens),
        kv_start_cpu=_starts(seq_lens),
        # With pages of one token the last page is full, or there is none.
        last_page_len_cpu=(seq_lens > 0).to(torch.int32),
    )


def _starts(lens: torch.Tensor) -> torch.Tensor:
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(torch.int32)
