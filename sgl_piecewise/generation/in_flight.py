"""A step in flight: a forward that was launched and sampled, and whose tokens the host has not read.

The next forward can be launched behind it: its tokens are input ids there as they are, on the device. All
work is on one stream, so a forward sees what those before it wrote, and slots that were given back while
a forward still uses them may go to a later one at once.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_piecewise.runtime.batch.schedule_batch import ScheduleBatch
from sgl_piecewise.runtime.kv.staging import copy_to_device
from sgl_piecewise.runtime.worker.host_copy import HostCopy
from sgl_piecewise.runtime.worker.result import SampledTokens

from .requests import RunningRequest


@dataclass(frozen=True, kw_only=True, eq=False)
class UnreadRow:
    """One request's part of a step.

    Attributes:
        index: Its row in the batch.
        one: The request.
        has_token: Whether the sampled token is the request's next: its prompt was through. Others are dropped.
    """

    index: int
    one: RunningRequest
    has_token: bool


class StepInFlight:
    """Tokens of one forward until they are read.

    Made once the forward was launched; notes in its requests what they have in flight.

    Args:
        batch: What was launched.
        members: Its requests.
        sampled: Its tokens, on the device.

    Attributes:
        unread: Rows that were not read yet, in order.
        copy: Brings the tokens to the host.
    """

    def __init__(
        self, batch: ScheduleBatch, members: Sequence[RunningRequest], sampled: SampledTokens
    ) -> None:
        self.copy = HostCopy(sampled)
        self._token_ids = sampled.next_token_ids
        self.unread: collections.deque[UnreadRow] = collections.deque()
        self._row_of: dict[RunningRequest, int] = {}
        nums_new = batch.extend_lens or [1] * len(members)
        for index, (one, num_new) in enumerate(zip(members, nums_new, strict=True)):
            has_token = one.num_missing_tokens == num_new
            one.req.num_computed_tokens += num_new
            one.num_tokens_in_flight += has_token
            self.unread.append(UnreadRow(index=index, one=one, has_token=has_token))
            self._row_of[one] = index

    @property
    def is_wanted(self) -> bool:
        """Whether a request of it has not ended since it was launched."""
        return any(not row.one.has_ended for row in self.unread)

    def input_ids(self, chosen: Sequence[tuple[RunningRequest, int]]) -> torch.Tensor | None:
        """Returns new tokens of the batch behind this one (int64[T], on the device).

        Args:
            chosen: Its requests, with the number of new tokens of each.

        Returns:
            Fresh; None where the host knows all of them.
        """
        host_ids: list[int] = []
        rows: list[int] = []
        places: list[int] = []
        for one, num_new in chosen:
            if one.num_tokens_in_flight:
                assert num_new == 1, "one token of a request is in flight"
                rows.append(self._row_of[one])
                places.append(len(host_ids))
                host_ids.append(0)
            else:
                begin = one.req.num_computed_tokens
                host_ids += one.req.token_ids[begin : begin + num_new]
        if not rows:
            return None
        # Where no token could be chosen there is -1, which is no row of an embedding. Its request has ended by
        # the time that its next token is read.
        token_ids = self._token_ids.clamp(min=0)
        if rows == list(range(len(host_ids))) == list(range(len(token_ids))):
            return token_ids
        fields = {"ids": host_ids, "rows": rows, "places": places}
        host = {name: torch.tensor(values, dtype=torch.int64) for name, values in fields.items()}
        there = copy_to_device(host, token_ids.device)
        return there["ids"].index_copy(0, there["places"], token_ids.index_select(0, there["rows"]))
