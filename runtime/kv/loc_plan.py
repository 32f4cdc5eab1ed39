"""The plan of one iteration: where its new tokens lie, translated once for every sub-pool.

All forwards of an iteration (draft, verify, draft extend) share the plan, each with its own write
window. It ends with the iteration: slots that an old plan still named could not be given back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..errors import BatchError, PoolError, nearest
from .slots import FULL_POOL, PhysicalSlots

if TYPE_CHECKING:
    from ..batch.forward_batch import ForwardBatch
    from .translator import KVIndexTranslator


class KVLocPlan:
    """Physical slots of one iteration's new tokens. Made by `KVIndexTranslator.own_plan`.

    Args:
        translator: Who made it, and writes the tables that backends read.
        slots: By sub-pool, row by row (int64[R * C], on the device).
        entries: The same as tables hold them (int32[R * C], on the device).
        num_rows: One row per request where all have equally many tokens, else one (`R`).
    """

    def __init__(
        self,
        translator: KVIndexTranslator,
        slots: Mapping[str, torch.Tensor],
        entries: Mapping[str, torch.Tensor],
        *,
        num_rows: int,
    ) -> None:
        self._translator = translator
        self._slots = dict(slots)
        self._entries = dict(entries)
        self._num_rows = num_rows
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether its iteration still runs."""
        return self._is_open

    @property
    def num_columns(self) -> int:
        """Columns that a write window may name."""
        return self._slots[FULL_POOL].numel() // self._num_rows

    def write_ids(self, pool: str, cols: range | None = None) -> PhysicalSlots:
        """Returns the slots of a write window in one sub-pool, row by row.

        Args:
            pool: The sub-pool.
            cols: Columns of every row; all by default.

        Raises:
            PoolError: The iteration is over, the sub-pool is unknown, or a column does not exist.
        """
        self._require_open()
        slots = self._slots.get(pool)
        if slots is None:
            raise PoolError(f"No sub-pool {pool!r} was planned; {nearest(pool, self._slots)}")
        return PhysicalSlots(pool, self._window(slots, cols))

    def _require_open(self) -> None:
        if not self._is_open:
            raise PoolError(
                "This KVLocPlan belongs to an iteration that is over, and its slots may be other requests' "
                "now. Ask the translator's own_plan for one of this iteration."
            )

    def _window(self, slots: torch.Tensor, cols: range | None) -> torch.Tensor:
        if cols is None:
            return slots
        num_columns = self.num_columns
        if cols.step != 1 or not 0 <= cols.start <= cols.stop <= num_columns:
            raise PoolError(f"The write window {cols} is not inside the plan's {num_columns} columns.")
        return slots.view(self._num_rows, num_columns)[:, cols.start : cols.stop].flatten()

    def bind(
        self,
        batch: ForwardBatch,
        translator: KVIndexTranslator,
        *,
        cols: range | None = None,
        cache_positions: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """Gives a forward its write window, and backends the new tokens' places.

        Args:
            batch: The forward, without padding.
            translator: Of the runner that will run it; it must be the plan's own.
            cols: The write window; all columns by default.
            cache_positions: Each token's index among the tokens of its sequence (int64[T]), where
                ``positions`` say something else (draft trees, several axes).

        Returns:
            The batch with ``write_slots``.

        Raises:
            PoolError: The plan is over or another translator's: backends would index another table.
            BatchError: The window has another number of slots than the batch has tokens.
        """
        write_slots = self.write_slots(translator, batch.num_tokens, cols)
        self.record(batch, cols=cols, cache_positions=cache_positions)
        return dataclasses.replace(batch, write_slots=write_slots)

    def write_slots(
        self, translator: KVIndexTranslator, num_tokens: int, cols: range | None = None
    ) -> dict[str, PhysicalSlots]:
        """Returns the slots of a forward's write window in every sub-pool; `bind` without its batch.

        Args:
            translator: As in `bind`.
            num_tokens: Of the forward.
            cols: As in `bind`.

        Raises:
            PoolError: As in `bind`.
            BatchError: Likewise.
        """
        if translator is not self._translator:
            raise PoolError("The plan is another translator's: backends would read tables it never wrote.")
        write_slots = {pool: self.write_ids(pool, cols) for pool in translator.pools}
        if len(write_slots[FULL_POOL]) != num_tokens:
            raise BatchError(
                f"out_cache_loc: the write window holds {len(write_slots[FULL_POOL])} slots, and the batch "
                f"has {num_tokens} tokens."
            )
        return write_slots

    def record(
        self, batch: ForwardBatch, *, cols: range | None = None, cache_positions: torch.Tensor | None = None
    ) -> None:
        """Tells backends where the new tokens of a forward lie; arguments as in `bind`.

        Raises:
            PoolError: The iteration is over, or a column does not exist.
        """
        self._require_open()
        columns = batch.positions if cache_positions is None else cache_positions
        entries = {pool: self._window(slots, cols) for pool, slots in self._entries.items()}
        self._translator.record(batch.req_rows_of_tokens(), columns, entries)

    def close(self) -> None:
        """Ends it; its slots are not looked up again."""
        self._is_open = False
        self._slots, self._entries = {}, {}
