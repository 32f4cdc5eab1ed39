"""What backends over paged KV pools share: the plan and its life, the KV write, the checks.

A subclass gives two computations: few query tokens a request, and tiles of query rows. This module
must not know how they are computed.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import torch

from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import ForwardMode
from ..errors import ConfigError
from ..kv.pool import KVPool
from .backend import AttentionBackend
from .base import AttentionSpec
from .plan import PagedPlan, PlanBuffers, PlanLimits


class PagedAttention(AttentionBackend):
    """A backend that reads keys and values through page tables.

    Args:
        layers: Constants of the model's attention layers.
        pool: Where keys and values lie; written by `run`.
        page_tables: By sub-pool, the slot of each position of each request (int32[R, C]), at an
            address that never changes.
        limits: The largest batch.

    Raises:
        ConfigError: A layer that the pool does not fit, or a sub-pool without a page table.
    """

    def __init__(
        self,
        layers: Sequence[AttentionSpec],
        *,
        pool: KVPool,
        page_tables: Mapping[str, torch.Tensor],
        limits: PlanLimits,
    ) -> None:
        self._layers = tuple(layers)
        self._pool = pool
        self._page_tables = dict(page_tables)
        self._layer_pools = {
            layer.layer_index: pool.of_layer(layer.layer_index).spec.name for layer in self._layers
        }
        self._check_layers(limits)
        device = next(iter(self._page_tables.values())).device
        pools = sorted(set(self._layer_pools.values()))
        self._buffers = PlanBuffers(limits, pools, tile_rows=self._tile_rows(), device=device)
        self._captured: set[tuple[ForwardMode, int, int]] = set()
        self._plan: PagedPlan | None = None

    @property
    def layer_pools(self) -> Mapping[int, str]:
        return self._layer_pools

    @property
    def limits(self) -> PlanLimits:
        """The largest batch that can be planned."""
        return self._buffers.limits

    def plan(self, batch: ForwardBatch) -> None:
        self._plan = self._buffers.fill(batch, is_for_graph=False)
        self._prepare(self._plan, batch, is_for_graph=False)

    def plan_for_capture(self, batch: ForwardBatch) -> None:
        self.require_full_capture(batch.forward_mode)
        self._plan = self._buffers.fill(batch, is_for_graph=True)
        self._prepare(self._plan, batch, is_for_graph=True)
        self._captured.add(_key(batch))

    def plan_for_replay(self, batch: ForwardBatch) -> None:
        if _key(batch) not in self._captured:
            raise ConfigError(
                f"Attention backend {self.name!r} has no graph plan for mode {batch.forward_mode.value!r} with "
                f"{batch.batch_size} requests and {batch.num_tokens} tokens: plan_for_capture comes first, and "
                "replays are padded to its sizes."
            )
        self._plan = self._buffers.fill(batch, is_for_graph=True)
        self._prepare(self._plan, batch, is_for_graph=True)

    def run(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: AttentionSpec
    ) -> torch.Tensor:
        plan = self._current(q_THD)
        if plan.num_requests == 0 or plan.num_tokens == 0:
            return torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        pool_name = self._layer_pools[layer.layer_index]
        self._pool.set_kv(layer.layer_index, plan.write_slots[pool_name], k_TKD, v_TKD)
        page_table_RC = self._page_tables[pool_name]
        if plan.tokens_per_request is None:
            return self._attend_tiles(q_THD, k_TKD, v_TKD, page_table_RC, layer, plan)
        return self._attend_few(q_THD, page_table_RC, layer, plan)

    def static_tensors(self) -> dict[str, torch.Tensor]:
        tables = {f"page_table.{pool}": table for pool, table in self._page_tables.items()}
        return {**self._buffers.static_tensors(), **tables}

    @abc.abstractmethod
    def _tile_rows(self) -> int:
        """Returns how many query rows a tile has; called once, by the constructor."""

    @abc.abstractmethod
    def _attend_few(
        self, q_THD: torch.Tensor, page_table_RC: torch.Tensor, layer: AttentionSpec, plan: PagedPlan
    ) -> torch.Tensor:
        """Attends the last ``plan.tokens_per_request`` tokens of each request to its context in the pool."""

    @abc.abstractmethod
    def _attend_tiles(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        page_table_RC: torch.Tensor,
        layer: AttentionSpec,
        plan: PagedPlan,
    ) -> torch.Tensor:
        """Attends the rows of the plan's tiles to their requests' contexts; other rows become zero."""

    def _prepare(self, plan: PagedPlan, batch: ForwardBatch, *, is_for_graph: bool) -> None:
        """Called when a plan is ready, for what a subclass plans beside it."""

    def _check_layer(self, layer: AttentionSpec) -> None:
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

    def _check_layers(self, limits: PlanLimits) -> None:
        if not self._layers:
            raise ConfigError(
                f"Attention backend {self.name!r} needs the model's attention layers, got none."
            )
        for layer in self._layers:
            where = f"Attention backend {self.name!r}, layer {layer.layer_index}"
            spec = self._pool.of_layer(layer.layer_index).spec
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
            table = self._page_tables.get(spec.name)
            if table is None:
                raise ConfigError(
                    f"{where}: no page table for its sub-pool {spec.name!r}. Given: {sorted(self._page_tables)}."
                )
            if table.shape[1] < limits.max_context:
                raise ConfigError(
                    f"{where}: the page table of {spec.name!r} has {table.shape[1]} columns, and contexts may have "
                    f"{limits.max_context} tokens."
                )
            self._check_layer(layer)


def _key(batch: ForwardBatch) -> tuple[ForwardMode, int, int]:
    # An idle rank replays the decode graph of its peers, with padded requests only.
    mode = ForwardMode.DECODE if batch.forward_mode.is_idle() else batch.forward_mode
    return mode, batch.batch_size, batch.num_tokens
