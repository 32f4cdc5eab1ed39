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
from .slots import SCRATCH_SLOT, VirtualSlots

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
        self._num_tokens = [0] * (max_requests + 1)
        self._free = list(range(max_requests, SCRATCH_ROW, -1))
        self._is_used = [False] * (max_requests + 1)

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
        self._check_used(row)
        self._table[row, : self._num_tokens[row]] = SCRATCH_SLOT
        self._num_tokens[row] = 0
        self._is_used[row] = False
        self._free.append(row)

    def num_tokens(self, row: int) -> int:
        """Returns how many tokens of a row have slots."""
        self._check_used(row)
        return self._num_tokens[row]

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
        begins = [self.num_tokens(row) for row in rows]
        for row, begin, count in zip(rows, begins, counts, strict=True):
            if begin + count > self.max_context:
                raise PoolError(
                    f"Request row {row} would hold {begin + count} tokens, and the pool allows max_context="
                    f"{self.max_context}. Refuse or truncate the request before it is scheduled."
                )
        self._table[_cells(rows, begins, counts)] = slots.ids.numpy()
        for row, count in zip(rows, counts, strict=True):
            self._num_tokens[row] += count

    def gather(self, rows: Sequence[int], begins: Sequence[int], counts: Sequence[int]) -> VirtualSlots:
        """Returns the slots of tokens ``[begin, begin + count)`` of every row, row by row, fresh.

        Raises:
            PoolError: Some of those tokens have no slot, or a row is no request's.
        """
        for row, begin, count in zip(rows, begins, counts, strict=True):
            if not 0 <= begin <= begin + count <= self.num_tokens(row):
                raise PoolError(
                    f"Request row {row} has slots for {self._num_tokens[row]} tokens, and "
                    f"[{begin}, {begin + count}) was asked for."
                )
        return VirtualSlots(torch.from_numpy(self._table[_cells(rows, begins, counts)].astype(np.int64)))

    def slots(self, row: int, begin: int = 0, end: int | None = None) -> VirtualSlots:
        """Returns the slots of tokens ``[begin, end)`` of one row, fresh; all of them by default.

        Raises:
            PoolError: As in `gather`.
        """
        end = self.num_tokens(row) if end is None else end
        return self.gather([row], [begin], [end - begin])

    def _check_used(self, row: int) -> None:
        if not SCRATCH_ROW < row <= self.max_requests or not self._is_used[row]:
            raise PoolError(f"Request row {row} belongs to no request; rows 1 to {self.max_requests} can.")


def _cells(
    rows: Sequence[int], begins: Sequence[int], counts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each token; the tokens of a row stand side by side."""
    starts = np.cumsum([0, *counts])[:-1]
    shifts = np.repeat(np.asarray(begins, dtype=np.int64) - starts, counts)
    return np.repeat(np.asarray(rows, dtype=np.int64), counts), np.arange(len(shifts)) + shifts
