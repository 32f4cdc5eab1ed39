"""From the scheduler's slots to those of the buffers: one translation per sub-pool and iteration.

Holds the tables that attention backends read: ``req_to_token`` of every sub-pool, in physical
slots, at fixed addresses. A backend must read the table of the sub-pool that its layer writes;
`bind_and_verify_backends` checks that when the backends are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..errors import BatchError, ConfigError, PoolError, nearest
from .allocator import KVSlotAllocator
from .loc_plan import KVLocPlan
from .pool import KVPool
from .req_to_token import ReqToTokenPool
from .slots import SCRATCH_SLOT, PhysicalSlots, VirtualSlots
from .staging import copy_to_device


class KVIndexTranslator:
    """Translates slots, and keeps the tables that backends read.

    Args:
        pool: The buffers.
        allocator: Who knows which physical slot backs a virtual one.
        req_to_token: The scheduler's table; only its shape is used.

    Attributes:
        pool: The buffers.
        num_translations: How often slots were translated; once per iteration is the aim.

    Raises:
        ConfigError: Pool and allocator have other sub-pools or other sizes.
    """

    def __init__(self, pool: KVPool, allocator: KVSlotAllocator, req_to_token: ReqToTokenPool) -> None:
        if set(allocator.pools) != set(pool.sub_pools):
            raise ConfigError(
                f"The allocator has sub-pools {sorted(allocator.pools)}, the pool {sorted(pool.sub_pools)}."
            )
        self.pool = pool
        self._allocator = allocator
        self._tables = {
            name: torch.zeros(req_to_token.shape, dtype=torch.int32, device=sub_pool.device)
            for name, sub_pool in pool.sub_pools.items()
        }
        self._plan: KVLocPlan | None = None
        self.num_translations = 0

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the sub-pools, ``full`` first."""
        return self._allocator.pools

    @property
    def device(self) -> torch.device:
        """Where slots and tables live."""
        return next(iter(self._tables.values())).device

    @property
    def table_shape(self) -> tuple[int, int]:
        """Rows of each table, the scratch row included, and tokens per row."""
        num_rows, max_context = next(iter(self._tables.values())).shape
        return num_rows, max_context

    def req_to_token(self, pool: str) -> torch.Tensor:
        """Returns a sub-pool's table (int32[requests + 1, max_context]), at a fixed address.

        An entry of a token that has left a sliding window is stale and must not be read.
        """
        table = self._tables.get(pool)
        if table is None:
            raise PoolError(f"No sub-pool {pool!r}; {nearest(pool, self._tables)}")
        return table

    def translate(self, slots: VirtualSlots) -> dict[str, PhysicalSlots]:
        """Returns the slots in every sub-pool, on the device, in one copy."""
        on_device = copy_to_device(self._physical(slots), self.device)
        return {name: PhysicalSlots(name, ids) for name, ids in on_device.items()}

    def _physical(self, slots: VirtualSlots) -> dict[str, torch.Tensor]:
        self.num_translations += 1
        return {name: self._allocator.translate(slots, pool=name) for name in self.pools}

    def own_plan(self, slots: VirtualSlots, *, num_rows: int = 1) -> KVLocPlan:
        """Begins an iteration: translates its slots, and ends the iteration before it.

        Args:
            slots: Of all new tokens of the iteration, request by request.
            num_rows: Number of requests where all have equally many tokens, so that a write window
                names columns of each; 1 where they do not.

        Raises:
            BatchError: The slots do not divide into so many rows.
            PoolError: A sub-pool's slot was released, so its token would be lost in scratch.
        """
        return self.begin_iteration(
            copy_to_device(self.host_slots(slots, num_rows=num_rows), self.device), num_rows=num_rows
        )

    def host_slots(self, slots: VirtualSlots, *, num_rows: int = 1) -> dict[str, np.ndarray]:
        """Translates an iteration's slots, for who copies them to the device with other things.

        Args:
            slots: As in `own_plan`.
            num_rows: Likewise.

        Returns:
            What `begin_iteration` takes, still on the host: slots of each sub-pool, and the same as the tables
            that backends read hold them.

        Raises:
            BatchError: As in `own_plan`.
            PoolError: Likewise.
        """
        if num_rows < 1 or len(slots) % num_rows:
            raise BatchError(
                f"out_cache_loc: {len(slots)} slots do not divide into {num_rows} rows of equal length."
            )
        found: dict[str, np.ndarray] = {}
        for name, ids in self._physical(slots).items():
            array = ids.numpy()
            if not array.all():
                raise PoolError(
                    f"Sub-pool {name!r}: {int((ids == SCRATCH_SLOT).sum())} of {len(slots)} new tokens have no "
                    "slot, since it was released. Release only what no later token reads or writes."
                )
            found[f"write_slots.{name}"] = array
            found[f"table_entries.{name}"] = array.astype(np.int32)
        return found

    def begin_iteration(self, on_device: Mapping[str, torch.Tensor], *, num_rows: int = 1) -> KVLocPlan:
        """Begins an iteration with slots that are on the device, and ends the iteration before it.

        Args:
            on_device: As `host_slots` gave them; other names are passed over.
            num_rows: As there.
        """
        if self._plan is not None:
            self._plan.close()
        self._plan = KVLocPlan(
            self,
            {name: on_device[f"write_slots.{name}"] for name in self.pools},
            {name: on_device[f"table_entries.{name}"] for name in self.pools},
            num_rows=num_rows,
        )
        return self._plan

    def record(self, rows: torch.Tensor, columns: torch.Tensor, entries: Mapping[str, torch.Tensor]) -> None:
        """Enters new tokens into the tables that backends read.

        Args:
            rows: Request row of each token (int64[T], on the device).
            columns: Index of each token in its sequence (int64[T], on the device).
            entries: The tokens' slots by sub-pool (int32[T], on the device).
        """
        for name, slots in entries.items():
            self._tables[name].index_put_((rows, columns), slots)

    def record_prefix(self, row: int, slots: VirtualSlots) -> None:
        """Enters a request's first tokens, which no forward here wrote: their KV came from elsewhere.

        Args:
            row: The request's row.
            slots: Of its tokens from the first on.
        """
        columns = torch.arange(len(slots), device=self.device)
        entries = {name: physical.ids.to(torch.int32) for name, physical in self.translate(slots).items()}
        self.record(torch.full_like(columns, row), columns, entries)

    def static_tensors(self) -> dict[str, torch.Tensor]:
        """Returns every table by name, for who must know that it never moves."""
        return {f"req_to_token.{name}": table for name, table in self._tables.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class KVRead:
    """What a backend will index for one layer.

    Attributes:
        k_buffer: Keys (dtype[S, K, D]).
        v_buffer: Values (dtype[S, K, D]).
        req_to_token: The table that gives the slots along `S`.
    """

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    req_to_token: torch.Tensor


class KVReader(Protocol):
    """The part of an attention backend that is checked at start."""

    def bind_kv(self, translator: KVIndexTranslator) -> None:
        """Takes the buffers and tables that it will read."""

    def kv_read(self, layer_id: int) -> KVRead:
        """Returns what it will index for a layer."""


def bind_and_verify_backends(
    translator: KVIndexTranslator, backends: Mapping[str, KVReader], layer_ids: Iterable[int]
) -> None:
    """Gives backends their buffers, and checks that each reads what the translator writes.

    Args:
        translator: Who writes.
        backends: Who reads, by name.
        layer_ids: The model's attention layers.

    Raises:
        ConfigError: A backend would read another buffer or table than is written; names backend and layer.
    """
    layers = tuple(layer_ids)
    for name, backend in backends.items():
        backend.bind_kv(translator)
        for layer_id in layers:
            _verify_read(translator, name, layer_id, backend.kv_read(layer_id))


def _verify_read(translator: KVIndexTranslator, backend: str, layer_id: int, read: KVRead) -> None:
    pool = translator.pool.of_layer(layer_id).spec.name
    expected = {
        "k_buffer": translator.pool.k_buffer(layer_id),
        "v_buffer": translator.pool.v_buffer(layer_id),
        "req_to_token": translator.req_to_token(pool),
    }
    for field, tensor in expected.items():
        found: torch.Tensor = getattr(read, field)
        if found.data_ptr() != tensor.data_ptr() or found.shape != tensor.shape:
            raise ConfigError(
                f"Attention backend {backend!r}, layer {layer_id}: reads a {field} of shape "
                f"{tuple(found.shape)}, and tokens are written to that of sub-pool {pool!r}, of shape "
                f"{tuple(tensor.shape)}. Take it from the translator in bind_kv."
            )
