"""Plans of paged attention: what kernels read of a batch, for graphs at addresses that never change.

A batch that is read by no graph, or that lies at fixed addresses itself, is read where it lies. For
other batches that graphs read there are buffers as large as the largest; a plan holds views of their
beginnings, so one set serves every capture size. Lengths of new tokens are known on the host, so the
table of query tiles is made there and copied once. This module must not know how attention is computed.

Shapes: `B` requests, `T` tokens, `X` tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import ForwardMode, NewTokens
from ..errors import ConfigError
from ..kv.slots import SCRATCH_SLOT, PhysicalSlots
from ..torch_private import copy_all

NO_REQUEST = -1
"""In a tile's first column: it zeroes rows of no request."""


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """The largest batch that a backend is built for.

    Attributes:
        max_requests: Requests, padded ones included.
        max_tokens: Tokens of one forward, padded ones included.
        max_context: Tokens of one request.

    Raises:
        ConfigError: A size under one.
    """

    max_requests: int
    max_tokens: int
    max_context: int

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "max_context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Plan limits: {name} must be at least 1, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedPlan:
    """What attention reads of one batch; its tensors are the batch's own, or views of fixed buffers.

    Attributes:
        mode: What the forward is for.
        num_requests: `B`, padded ones included.
        num_tokens: `T`, padded ones included.
        tokens_per_request: New tokens of every request where all have equally many; None where the
            tiles say which rows are whose.
        is_causal: Whether a new token sees only those before it; else all of its request's.
        max_seq_len: No context of this plan is longer; in graphs the longest there can be.
        req_pool_indices: Row of each request in the page tables (int64[B]).
        seq_lens: Context of each request, its new tokens included (int64[B]).
        query_start: First token of each request, and the end (int32[B + 1]).
        tiles: See `tile_table` (int32[X, 2]).
        write_slots: Where new keys and values go, by sub-pool (int64[T] each).
    """

    mode: ForwardMode
    num_requests: int
    num_tokens: int
    tokens_per_request: int | None
    is_causal: bool
    max_seq_len: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    tiles: torch.Tensor
    write_slots: Mapping[str, PhysicalSlots]


def num_tiles(num_tokens: int, num_requests: int, rows: int) -> int:
    """Returns how many tiles any batch of these sizes needs at most, padding rows included."""
    return num_tokens // rows + num_requests + 1


def tile_table(
    new_lens: Sequence[int], seq_lens: Sequence[int], *, num_tokens: int, rows: int
) -> list[tuple[int, int]]:
    """Cuts the query rows of a batch into tiles.

    Args:
        new_lens: New tokens of each request, in the order of their rows; 0 for an unused request.
        seq_lens: Context of each request, new tokens included.
        num_tokens: Rows of the batch, padded ones included.
        rows: Rows of a tile.

    Returns:
        A pair for each tile: (request, first of its rows within the request), those that read most
        first, so that none of them ends alone; then (`NO_REQUEST`, first row) for rows of no
        request. Plans for graphs add idle tiles, which begin at the end of the batch.
    """
    tiles = [(request, first) for request, new in enumerate(new_lens) for first in range(0, new, rows)]
    tiles.sort(key=lambda tile: new_lens[tile[0]] - seq_lens[tile[0]] - tile[1])
    tiles += [(NO_REQUEST, first) for first in range(sum(new_lens), num_tokens, rows)]
    return tiles


class PlanBuffers:
    """The fixed memory of plans.

    Args:
        limits: The largest batch.
        pools: Names of the sub-pools that are written.
        tile_rows: Rows of a query tile.
        device: Where the buffers live.
    """

    def __init__(
        self, limits: PlanLimits, pools: Iterable[str], *, tile_rows: int, device: torch.device
    ) -> None:
        self.limits = limits
        self._tile_rows = tile_rows
        self._device = device
        tiles = num_tiles(limits.max_tokens, limits.max_requests, tile_rows)
        self._rows = torch.zeros(limits.max_requests, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(limits.max_requests, dtype=torch.int64, device=device)
        # One buffer and so one copy: first the query starts, then the tiles.
        self._host_made = torch.zeros(limits.max_requests + 1 + 2 * tiles, dtype=torch.int32, device=device)
        self._write_slots = {
            pool: torch.full((limits.max_tokens,), SCRATCH_SLOT, dtype=torch.int64, device=device)
            for pool in pools
        }

    def static_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the buffers by name."""
        return {
            "plan.rows": self._rows,
            "plan.seq_lens": self._seq_lens,
            "plan.tiles": self._host_made,
            **{f"plan.write_slots.{pool}": slots for pool, slots in self._write_slots.items()},
        }

    def plan(self, batch: ForwardBatch) -> PagedPlan:
        """Returns the plan of a batch that no graph reads; it refers to the batch's own tensors.

        Raises:
            ConfigError: The batch is over the limits.
        """
        self._check_sizes(batch)
        tokens_per_request = _tokens_per_request(batch)
        num_tiles_used = 0 if tokens_per_request is not None else self._write_tiles(batch, None)
        return self._plan(
            batch,
            batch,
            tokens_per_request=tokens_per_request,
            num_tiles_used=num_tiles_used,
            max_seq_len=batch.max_seq_len,
        )

    def plan_for_graph(self, batch: ForwardBatch) -> PagedPlan:
        """Returns the plan that graphs of a batch's sizes read for good: its shapes and bounds follow from these.

        A static batch is read where it lies; for another one the tensors are here, and written with it.

        Raises:
            ConfigError: The batch is over the limits.
        """
        self._check_sizes(batch)
        tokens_per_request = _tokens_per_request(batch)
        num_tiles_used = 0
        if tokens_per_request is None:
            num_tiles_used = num_tiles(batch.num_tokens, batch.batch_size, self._tile_rows)
        plan = self._plan(
            batch,
            batch if batch.padding.is_static else None,
            tokens_per_request=tokens_per_request,
            num_tiles_used=num_tiles_used,
            max_seq_len=self.limits.max_context,
        )
        self.rewrite(plan, batch)
        return plan

    def rewrite(self, plan: PagedPlan, batch: ForwardBatch) -> None:
        """Writes a batch into a plan for graphs; nothing is copied of a batch that lies where they read.

        Args:
            plan: Of the batch's mode and sizes.
            batch: The batch.

        Raises:
            ConfigError: The batch is over the limits.
        """
        self._check_sizes(batch)
        moved = [
            (target, source)
            for target, source in _read_of(plan, batch)
            if target is not source and target.data_ptr() != source.data_ptr()
        ]
        if moved:
            copy_all(moved)
        if plan.tokens_per_request is None:
            self._write_tiles(batch, plan.tiles.shape[0])

    def _plan(
        self,
        batch: ForwardBatch,
        tensors: ForwardBatch | None,
        *,
        tokens_per_request: int | None,
        num_tiles_used: int,
        max_seq_len: int,
    ) -> PagedPlan:
        """Returns a plan whose tensors are those of a batch, or buffers of its sizes."""
        num_requests, num_tokens = batch.batch_size, batch.num_tokens
        if tensors is None:
            rows_B, seq_lens_B = self._rows[:num_requests], self._seq_lens[:num_requests]
            write_slots: Mapping[str, PhysicalSlots] = {
                pool: PhysicalSlots(pool, buffer[:num_tokens]) for pool, buffer in self._write_slots.items()
            }
        else:
            rows_B, seq_lens_B, write_slots = tensors.req_pool_indices, tensors.seq_lens, tensors.write_slots
        tiles = self._host_made[self.limits.max_requests + 1 :]
        return PagedPlan(
            mode=batch.forward_mode,
            num_requests=num_requests,
            num_tokens=num_tokens,
            tokens_per_request=tokens_per_request,
            is_causal=not batch.forward_mode.is_dllm_extend(),
            max_seq_len=max_seq_len,
            req_pool_indices=rows_B,
            seq_lens=seq_lens_B,
            query_start=self._host_made[: num_requests + 1],
            tiles=tiles[: 2 * num_tiles_used].view(-1, 2),
            write_slots=write_slots,
        )

    def _write_tiles(self, batch: ForwardBatch, length: int | None) -> int:
        """Writes query starts and tiles, as many as are needed or with idle ones up to a number; returns how many."""
        assert batch.extend is not None, "a ragged batch has extend fields"
        new_lens = batch.extend.extend_seq_lens_cpu
        pairs = tile_table(
            new_lens,
            [prefix + new for prefix, new in zip(batch.extend.extend_prefix_lens_cpu, new_lens, strict=True)],
            num_tokens=batch.num_tokens,
            rows=self._tile_rows,
        )
        num_tiles_used = len(pairs) if length is None else length
        assert len(pairs) <= num_tiles_used, f"{len(pairs)} tiles planned, {length} counted"
        begin, end = self.limits.max_requests + 1, len(pairs)
        # Fresh each time: the copy may still read it at the next plan.
        staged = torch.empty(
            begin + 2 * num_tiles_used, dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        values = staged.numpy()
        values[: len(new_lens) + 1] = [0, *itertools.accumulate(new_lens)]
        values[len(new_lens) + 1 : begin] = 0
        tiles = values[begin:].reshape(-1, 2)
        if pairs:
            tiles[:end] = pairs
        tiles[end:] = (NO_REQUEST, batch.num_tokens)
        self._host_made[: staged.numel()].copy_(staged, non_blocking=True)
        return num_tiles_used

    def _check_sizes(self, batch: ForwardBatch) -> None:
        limits = self.limits
        if (
            batch.batch_size <= limits.max_requests
            and batch.num_tokens <= limits.max_tokens
            and batch.max_seq_len <= limits.max_context
        ):
            return
        sizes = (
            ("requests", batch.batch_size, limits.max_requests),
            ("tokens", batch.num_tokens, limits.max_tokens),
            ("tokens in its longest context", batch.max_seq_len, limits.max_context),
        )
        what, size, most = next(one for one in sizes if one[1] > one[2])
        raise ConfigError(
            f"A {batch.forward_mode.value} batch has {size} {what}; attention was planned for at most "
            f"{most}. Raise the limit where the attention backend is built, or send smaller batches."
        )


def _read_of(plan: PagedPlan, batch: ForwardBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns what a plan holds of a batch beside what the batch has."""
    found = [(plan.req_pool_indices, batch.req_pool_indices), (plan.seq_lens, batch.seq_lens)]
    if plan.write_slots is not batch.write_slots:
        found += [(slots.ids, batch.write_slots[pool].ids) for pool, slots in plan.write_slots.items()]
    return found


def _tokens_per_request(batch: ForwardBatch) -> int | None:
    """Returns how many new tokens each request has where the mode says that all have equally many."""
    if batch.forward_mode.properties.new_tokens is NewTokens.RAGGED:
        return None
    if batch.batch_size == 0 or batch.num_tokens == 0:
        return 1  # Nobody's: rows of an idle batch belong to no request.
    each = 1 if batch.num_tokens_per_req is None else batch.num_tokens_per_req
    if each * batch.batch_size != batch.num_tokens:
        raise ConfigError(
            f"A {batch.forward_mode.value} batch has {batch.num_tokens} tokens for {batch.batch_size} requests of "
            f"{each} each. Pad requests, not tokens."
        )
    return each
