"""Room for a padded batch: where its real entries and its tails go, found once for all batches of its sizes.

A decode step pads half a dozen tensors of a few entries each, so what costs is not the bytes but
every view, launch and look-up. A room keeps the views and writes real entries and tails in one
launch per dtype. This module must not know why a batch is padded.

Shapes: `T` tokens, `B` requests.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch

from ..errors import BatchError
from ..kv.req_to_token import SCRATCH_ROW
from ..kv.slots import SCRATCH_SLOT, PhysicalSlots
from ..torch_private import copy_each
from .fields import ExtendFields
from .forward_batch import ForwardBatch
from .positions import StartLocEncoding


class PaddedSizes(NamedTuple):
    """What the views of a padded batch follow from.

    Attributes:
        num_requests: Real requests.
        num_tokens: Real tokens.
        padded_requests: Requests after padding.
        padded_tokens: Tokens after padding.
        pad_len: Tokens of a padded request.
        num_real: Real tokens as the batch counts them for all ranks.
        num_axes: Dimensions of the positions.
        start_loc_encoding: What ``extend_start_loc`` counts; None where there are no extend fields.
    """

    num_requests: int
    num_tokens: int
    padded_requests: int
    padded_tokens: int
    pad_len: int
    num_real: int
    num_axes: int
    start_loc_encoding: StartLocEncoding | None

    @property
    def num_pad_requests(self) -> int:
        """Requests that padding adds."""
        return self.padded_requests - self.num_requests


class Storage(abc.ABC):
    """Gives memory for padded tensors.

    Attributes:
        is_static: Whether every batch of some padded sizes gets the same memory, for good.
    """

    is_static: ClassVar[bool]

    @abc.abstractmethod
    def give(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Returns memory for a padded tensor.

        Args:
            name: The tensor's name in the batch.
            shape: Its padded shape.
            like: The tensor whose dtype and device it has.

        Raises:
            BatchError: There is none of this name, size or dtype.
        """

    @abc.abstractmethod
    def give_count(
        self, num_tokens: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns memory for the number of real tokens.

        Args:
            num_tokens: The number.
            like: A scalar of its dtype (int32) and device.

        Returns:
            The scalar (int32[]); the cell that holds it, and what to write into the cell (int64[1] each).
        """

    def constant(self, value: int, length: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that holds one value, of the dtype and on the device of another; not to be written to."""
        return torch.full((length,), value, dtype=like.dtype, device=like.device)

    def room(self, sizes: PaddedSizes, batch: ForwardBatch) -> PaddedRoom:
        """Returns room for a batch, new or kept from an earlier one of its sizes.

        Raises:
            BatchError: As in `give`.
        """
        return PaddedRoom(sizes, batch, self)


class FreshStorage(Storage):
    """Gives new memory for every padded tensor."""

    is_static = False

    def give(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def give_count(
        self, num_tokens: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cell, value = count_cell(like.device), torch.full((1,), num_tokens, device=like.device)
        return count_of(cell), cell, value


def count_cell(device: torch.device) -> torch.Tensor:
    """Returns memory of a count (int64[1]): written with tensors of int64 in one launch, read as int32."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def count_of(cell: torch.Tensor) -> torch.Tensor:
    """Returns the count in a cell (int32[], a view): its low half, which comes first on every device we know."""
    return cell.view(torch.int32)[0]


class PaddedRoom:
    """Memory of one padded batch.

    Args:
        sizes: Real and padded extents.
        batch: A batch of these sizes, without padding; only dtypes, devices and shapes count.
        storage: Gives the memory.

    Attributes:
        input_ids: As in `ForwardBatch`, padded; so are the following.
        positions: Likewise.
        write_slots: Likewise.
        req_pool_indices: Likewise.
        seq_lens: Likewise.
        num_real_tokens: As in `PaddingFields`.
        extend: ``extend_seq_lens``, ``extend_prefix_lens`` and ``extend_start_loc`` of `ExtendFields`;
            None where there are none.
        is_static: As in `Storage`.
        pad_lens_cpu: Lengths of padded requests (host int64[padded requests]).

    Raises:
        BatchError: As in `Storage.give`.
    """

    def __init__(self, sizes: PaddedSizes, batch: ForwardBatch, storage: Storage) -> None:
        self.is_static = storage.is_static
        self._sizes = sizes
        self._storage = storage
        # One launch writes all tensors of a dtype: first what is real, then the tails.
        self._heads: list[torch.Tensor] = []
        self._tails: list[torch.Tensor] = []
        self._fillings: list[torch.Tensor] = []
        self.input_ids = self._tokens("input_ids", batch.input_ids, 0)
        self.positions = self._tokens("positions", batch.positions, 0)
        self.write_slots: Mapping[str, PhysicalSlots] = {
            pool: PhysicalSlots(pool, self._tokens(f"write_slots.{pool}", slots.ids, SCRATCH_SLOT))
            for pool, slots in batch.write_slots.items()
        }
        self._pools = tuple(self.write_slots)
        self.req_pool_indices = self._requests("req_pool_indices", batch.req_pool_indices, SCRATCH_ROW)
        self.seq_lens = self._requests("seq_lens", batch.seq_lens, sizes.pad_len)
        self.num_real_tokens, cell, count = storage.give_count(sizes.num_real, batch.padding.num_real_tokens)
        self._tails.append(cell)
        self._fillings.append(count)
        self._wide, self._wide_fillings = [*self._heads, *self._tails], self._fillings
        self._heads, self._tails, self._fillings = [], [], []
        self.extend = None if batch.extend is None else self._add_extend(batch.extend)
        self._narrow, self._narrow_fillings = [*self._heads, *self._tails], self._fillings
        self.pad_lens_cpu = torch.full((sizes.num_pad_requests,), sizes.pad_len, dtype=torch.int64)

    def write(self, batch: ForwardBatch) -> None:
        """Writes a batch of these sizes, and every tail anew: nothing of an older batch is left.

        Raises:
            BatchError: A tensor has another dtype than the room.
        """
        slots = batch.write_slots
        sources = [batch.input_ids, batch.positions]
        sources += [slots[pool].ids for pool in self._pools]
        sources += [batch.req_pool_indices, batch.seq_lens]
        for target, source in zip(self._wide, sources, strict=False):
            if source.dtype is not target.dtype:
                raise BatchError(
                    f"A tensor of the batch is {source.dtype}, and its padded room {target.dtype}."
                )
        copy_each(self._wide, sources + self._wide_fillings)
        extend = batch.extend
        if extend is not None:
            narrow = [extend.extend_seq_lens, extend.extend_prefix_lens, extend.extend_start_loc]
            narrow += self._narrow_fillings
            if extend.start_loc_encoding is StartLocEncoding.KV_OFFSET and self._sizes.num_pad_requests:
                narrow.append(self._start_locs(batch.seq_lens_sum, extend.extend_start_loc))
            copy_each(self._narrow, narrow)

    def _add_extend(self, extend: ExtendFields) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self._sizes
        tensors = (
            self._requests("extend_seq_lens", extend.extend_seq_lens, sizes.pad_len),
            self._requests("extend_prefix_lens", extend.extend_prefix_lens, 0),
            self._requests("extend_start_loc", extend.extend_start_loc, 0),
        )
        if sizes.num_pad_requests:
            self._fillings.pop()
            # Tokens of the batch follow from its sizes; how long its contexts are does not.
            if extend.start_loc_encoding is StartLocEncoding.TOKEN_OFFSET:
                self._fillings.append(self._start_locs(extend.extend_num_tokens, extend.extend_start_loc))
        return tensors

    def _start_locs(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Returns where padded requests begin."""
        num, step = self._sizes.num_pad_requests, self._sizes.pad_len
        if step == 0:
            return torch.full((num,), start, dtype=like.dtype, device=like.device)
        return torch.arange(start, start + num * step, step, dtype=like.dtype, device=like.device)

    def _tokens(self, name: str, real: torch.Tensor, tail: int) -> torch.Tensor:
        return self._add(name, real, self._sizes.padded_tokens, tail)

    def _requests(self, name: str, real: torch.Tensor, tail: int) -> torch.Tensor:
        return self._add(name, real, self._sizes.padded_requests, tail)

    def _add(self, name: str, real: torch.Tensor, length: int, tail: int) -> torch.Tensor:
        padded = self._storage.give(name, (*real.shape[:-1], length), real)
        num_real = real.shape[-1]
        self._heads.append(padded[..., :num_real])
        if num_real < length:
            self._tails.append(padded[..., num_real:])
            self._fillings.append(self._storage.constant(tail, length - num_real, real))
        return padded
