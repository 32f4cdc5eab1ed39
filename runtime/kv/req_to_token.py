"""Which slots hold a request's tokens: the scheduler's table, one row per running request.

It is on the host and holds virtual slots. What the device reads is the translator's physical copy,
one table per sub-pool. Row 0 is a scratch row whose every entry is the scratch slot: requests that
only pad a batch point there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..errors import ConfigError, PoolError
from .slots import VirtualSlots

SCRATCH_ROW = 0


class ReqToTokenPool:
    """Rows for running requests.

    Args:
        max_requests: Requests that may run at once.
        max_context: Tokens that a request may have.
    """

    def __init__(self, *, max_requests: int, max_context: int) -> None:
        if max_requests < 1 or max_context < 1:
            raise ConfigError(
                "max_requests and max_context must be at least 1, "
                f"got max_requests={max_requests} and max_context={max_context}."
            )
        self.max_requests = max_requests
        self.max_context = max_context
        self._table = np.zeros((max_requests + 1, max_context), dtype=np.int32)
        self._num_tokens = np.zeros(max_requests + 1, dtype=np.int64)
        self._free = list(range(max_requests, SCRATCH_ROW, -1))
        self._is_used = np.zeros(max_requests + 1, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        """Rows that no request owns."""
        return len(self._free)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, the scratch row included, and tokens per row."""
        return self.max_requests + 1, self.max_context

    def can_allocate(self, num_rows: int = 1) -> bool:
        """Whether that many rows are free."""
        return num_rows <= len(self._free)

    def allocate(self) -> int:
        """Takes a row.

        Raises:
            PoolError: None is free.
        """
        if not self._free:
            raise PoolError(
                f"All {self.max_requests} request rows are taken. Ask can_allocate first, and let the "
                "request wait until another ends."
            )
        row = self._free.pop()
        self._is_used[row] = True
        return row

    def free(self, row: int) -> None:
        """Gives a row back; its slots are the caller's to free, before.

        Raises:
            PoolError: The row is scratch, out of range or free already.
        """
        self._used([row])
        self._num_tokens[row] = 0
        self._is_used[row] = False
        self._free.append(row)

    def num_tokens(self, row: int) -> int:
        """Returns how many tokens of a row have slots."""
        return int(self.nums_tokens([row])[0])

    def nums_tokens(self, rows: Sequence[int]) -> np.ndarray:
        """Returns how many tokens of each row have slots (int64[B], fresh).

        Raises:
            PoolError: A row is no request's.
        """
        return self._num_tokens[self._used(rows)]

    def append(self, rows: Sequence[int], counts: Sequence[int], slots: VirtualSlots) -> None:
        """Gives the next tokens of rows their slots.

        Args:
            rows: The rows, each once.
            counts: How many tokens each gets.
            slots: As many as ``counts`` sum to, row by row.

        Raises:
            PoolError: A row would be longer than ``max_context``, or is no request's, or the number
                of slots is another; nothing was entered.
        """
        if sum(counts) != len(slots):
            raise PoolError(f"{len(slots)} slots given for {sum(counts)} tokens of rows {list(rows)}.")
        used = self._used(rows)
        begins = self._num_tokens[used]
        ends = begins + np.asarray(counts, dtype=np.int64)
        if (ends > self.max_context).any():
            worst = int(ends.argmax())
            raise PoolError(
                f"Request row {rows[worst]} would hold {ends[worst]} tokens, and the pool allows max_context="
                f"{self.max_context}. Refuse or truncate the request before it is scheduled."
            )
        self._table[_cells(used, begins, ends)] = slots.ids.numpy()
        self._num_tokens[used] = ends

    def gather(self, rows: Sequence[int], begins: Sequence[int], counts: Sequence[int]) -> VirtualSlots:
        """Returns the slots of tokens ``[begin, begin + count)`` of every row, row by row, fresh.

        Raises:
            PoolError: Some of those tokens have no slot, or a row is no request's.
        """
        used = self._used(rows)
        first = np.asarray(begins, dtype=np.int64)
        ends = first + np.asarray(counts, dtype=np.int64)
        is_wrong = (first < 0) | (ends < first) | (ends > self._num_tokens[used])
        if is_wrong.any():
            index = int(is_wrong.argmax())
            raise PoolError(
                f"Request row {rows[index]} has slots for {self._num_tokens[used[index]]} tokens, and "
                f"[{first[index]}, {ends[index]}) was asked for."
            )
        return VirtualSlots(torch.from_numpy(self._table[_cells(used, first, ends)].astype(np.int64)))

    def slots(self, row: int, begin: int = 0, end: int | None = None) -> VirtualSlots:
        """Returns the slots of tokens ``[begin, end)`` of one row, fresh; all of them by default.

        Raises:
            PoolError: As in `gather`.
        """
        end = self.num_tokens(row) if end is None else end
        return self.gather([row], [begin], [end - begin])

    def _used(self, rows: Sequence[int]) -> np.ndarray:
        """Returns the rows as an array (int64[B]), once it is sure that requests own all of them."""
        given = np.asarray(rows, dtype=np.int64)
        is_row = (given > SCRATCH_ROW) & (given <= self.max_requests)
        is_used = is_row & self._is_used[np.where(is_row, given, SCRATCH_ROW)]
        if not is_used.all():
            row = given[int(is_used.argmin())]
            raise PoolError(f"Request row {row} belongs to no request; rows 1 to {self.max_requests} can.")
        return given


def _cells(rows: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each token; the tokens of a row stand side by side."""
    counts = ends - begins
    if (counts == 1).all():  # As in decoding.
        return rows, begins
    shifts = np.repeat(begins - (counts.cumsum() - counts), counts)
    return np.repeat(rows, counts), np.arange(len(shifts)) + shifts
