"""What backends over paged KV pools share: the plan and its life, the KV write, the checks.

A subclass gives two computations: few query tokens a request, and tiles of query rows. This module
must not know how they are computed.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import ForwardMode
from ..errors import ConfigError
from ..kv.pool import KVPool, SubPoolSpec
from ..kv.translator import KVIndexTranslator, KVRead
from .backend import AttentionBackend
from .base import AttentionSpec
from .plan import PagedPlan, PlanBuffers, PlanLimits


@dataclass(frozen=True, kw_only=True, eq=False)
class _BoundKV:
    """What a backend reads, from `bind_kv` on."""

    pool: KVPool
    pool_of_layer: Mapping[int, str]
    tables: Mapping[str, torch.Tensor]
    buffers: PlanBuffers


class PagedAttention(AttentionBackend):
    """A backend that reads keys and values through page tables.

    Args:
        layers: Constants of the model's attention layers.
        limits: The largest batch.
    """

    def __init__(self, layers: Sequence[AttentionSpec], *, limits: PlanLimits) -> None:
        if not layers:
            raise ConfigError(
                f"Attention backend {self.name!r} needs the model's attention layers, got none."
            )
        self._layers = {layer.layer_index: layer for layer in layers}
        self.limits = limits
        self._kv: _BoundKV | None = None
        self._captured: dict[tuple[ForwardMode, int, int], PagedPlan] = {}
        self._plan: PagedPlan | None = None

    @classmethod
    def takes(cls, layers: Sequence[AttentionSpec], dtype: torch.dtype) -> bool:
        """Tells whether it computes such layers at all; asked where a backend is chosen, not named."""
        return True

    def bind_kv(self, translator: KVIndexTranslator) -> None:
        pool = translator.pool
        for layer in self._layers.values():
            spec = pool.of_layer(layer.layer_index).spec
            self._check_fits(layer, spec, translator.req_to_token(spec.name))
            self._check_layer(layer, spec.dtype)
        pools = {index: pool.of_layer(index).spec.name for index in self._layers}
        rows = {
            self._tile_rows(layer, pool.of_layer(index).spec.dtype) for index, layer in self._layers.items()
        }
        if len(rows) > 1:
            raise ConfigError(
                f"Attention backend {self.name!r} needs one tile size for all layers, and these would have "
                f"{sorted(rows)}: their head sizes or dtypes differ too much."
            )
        self._kv = _BoundKV(
            pool=pool,
            pool_of_layer=pools,
            tables={name: translator.req_to_token(name) for name in sorted(set(pools.values()))},
            buffers=PlanBuffers(
                self.limits, sorted(set(pools.values())), tile_rows=rows.pop(), device=translator.device
            ),
        )
        self._captured.clear()
        self._plan = None

    def kv_read(self, layer_id: int) -> KVRead:
        kv = self._bound()
        return KVRead(
            k_buffer=kv.pool.k_buffer(layer_id),
            v_buffer=kv.pool.v_buffer(layer_id),
            req_to_token=kv.tables[kv.pool_of_layer[layer_id]],
        )

    def plan(self, batch: ForwardBatch) -> None:
        self._plan = self._bound().buffers.plan(batch)
        self._prepare(self._plan, batch, is_for_graph=False)

    def plan_for_capture(self, batch: ForwardBatch) -> None:
        self.require_full_capture(batch.forward_mode)
        buffers, key = self._bound().buffers, _key(batch)
        plan = self._captured.get(key)
        if plan is None:
            plan = buffers.plan_for_graph(batch)
        else:
            buffers.rewrite(plan, batch)  # Graphs of these sizes exist, and read this plan.
        self._plan = plan
        self._prepare(plan, batch, is_for_graph=True)
        self._captured[key] = plan

    def plan_for_replay(self, batch: ForwardBatch) -> None:
        plan = self._captured.get(_key(batch))
        if plan is None:
            raise ConfigError(
                f"Attention backend {self.name!r} has no graph plan for mode {batch.forward_mode.value!r} with "
                f"{batch.batch_size} requests and {batch.num_tokens} tokens: plan_for_capture comes first, and "
                "replays are padded to its sizes."
            )
        self._bound().buffers.rewrite(plan, batch)
        self._plan = plan
        self._prepare(plan, batch, is_for_graph=True)

    def run(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec
    ) -> torch.Tensor:
        plan = self._current(q_THD)
        if plan.num_requests == 0 or plan.num_tokens == 0:
            return torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        kv = self._bound()
        pool_name = kv.pool_of_layer[layer.layer_index]
        # Through the pool's method: what is hooked there sees every write.
        kv.pool.set_kv(layer.layer_index, plan.write_slots[pool_name], k_TKD, v_TKD)
        read = self.kv_read(layer.layer_index)
        if plan.tokens_per_request is None:
            return self._attend_tiles(q_THD, k_TKD, v_TKD, read, layer, plan)
        return self._attend_few(q_THD, read, layer, plan)

    def static_tensors(self) -> dict[str, torch.Tensor]:
        kv = self._bound()
        tables = {f"req_to_token.{pool}": table for pool, table in kv.tables.items()}
        return {**kv.buffers.static_tensors(), **tables}

    @abc.abstractmethod
    def _tile_rows(self, layer: AttentionSpec, dtype: torch.dtype) -> int:
        """Returns how many query rows a tile has; the same for all layers."""

    @abc.abstractmethod
    def _attend_few(
        self, q_THD: torch.Tensor, read: KVRead, layer: AttentionSpec, plan: PagedPlan
    ) -> torch.Tensor:
        """Attends the last ``plan.tokens_per_request`` tokens of each request to its context in the pool."""

    @abc.abstractmethod
    def _attend_tiles(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        read: KVRead,
        layer: AttentionSpec,
        plan: PagedPlan,
    ) -> torch.Tensor:
        """Attends the rows of the plan's tiles to their requests' contexts; other rows become zero."""

    def _prepare(self, plan: PagedPlan, batch: ForwardBatch, *, is_for_graph: bool) -> None:
        """Called when a plan is ready, for what a subclass plans beside it."""

    def _check_layer(self, layer: AttentionSpec, dtype: torch.dtype) -> None:
        """Raises ConfigError for a layer that the subclass cannot compute."""

    def _current(self, q_THD: torch.Tensor) -> PagedPlan:
        plan = self._plan
        if plan is None:
            raise ConfigError(
                f"Attention backend {self.name!r} was asked to run and no batch is planned: call plan(batch) "
                "before the forward."
            )
        if q_THD.shape[0] != plan.num_tokens:
            raise ConfigError(
                f"Attention backend {self.name!r}: the forward brings {q_THD.shape[0]} tokens and the planned "
                f"{plan.mode.value} batch has {plan.num_tokens}. Plan the batch that is run."
            )
        return plan

    def _bound(self) -> _BoundKV:
        if self._kv is None:
            raise ConfigError(
                f"Attention backend {self.name!r} has no KV pool yet: call bind_and_verify_backends (or bind_kv) "
                "before the first plan."
            )
        return self._kv

    def _check_fits(self, layer: AttentionSpec, spec: SubPoolSpec, table: torch.Tensor) -> None:
        where = f"Attention backend {self.name!r}, layer {layer.layer_index}"
        if (spec.num_kv_heads, spec.head_dim) != (layer.num_kv_heads, layer.head_dim):
            raise ConfigError(
                f"{where}: it has {layer.num_kv_heads} KV heads of size {layer.head_dim}, its sub-pool "
                f"{spec.name!r} {spec.num_kv_heads} of size {spec.head_dim}."
            )
        if spec.window is not None and (layer.window is None or layer.window > spec.window):
            raise ConfigError(
                f"{where}: its window is {layer.window or 'unlimited'}, and sub-pool {spec.name!r} keeps only "
                f"{spec.window} tokens."
            )
        if table.shape[1] < self.limits.max_context:
            raise ConfigError(
                f"{where}: the table of {spec.name!r} has {table.shape[1]} columns, and contexts may have "
                f"{self.limits.max_context} tokens."
            )


def _key(batch: ForwardBatch) -> tuple[ForwardMode, int, int]:
    return batch.forward_mode, batch.batch_size, batch.num_tokens
