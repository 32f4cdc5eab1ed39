"""Static input buffers of a runner: every tensor of a batch at an address that graphs may read.

Given to `pad_batch` as its storage, so that a batch is padded and copied in at once and no tail of
an earlier, larger batch is left. Sizes come from the batch's own fields, the same that an eager
forward has.
"""

from __future__ import annotations

import torch

from ..errors import BatchError, nearest
from .forward_batch import ForwardBatch
from .padded_room import PaddedRoom, PaddedSizes, Storage, count_cell, count_of

_TOKEN_DTYPES = {"input_ids": torch.int64, "positions": torch.int64}
_REQUEST_DTYPES = {
    "req_pool_indices": torch.int64,
    "seq_lens": torch.int64,
    "extend_seq_lens": torch.int32,
    "extend_prefix_lens": torch.int32,
    "extend_start_loc": torch.int32,
}

_MAX_ROOMS = 512
"""Rooms that are kept. Decoding needs one for each number of requests; extends have any number of tokens."""


class StaticBatchBuffers(Storage):
    """Buffers for the largest batch of a runner; a smaller one lies at their beginning.

    Positions have one axis. Writing while a replay on another stream still reads is the caller's to prevent.

    Args:
        max_batch_size: Requests of the largest capture size.
        max_num_tokens: Its tokens.
        pools: Names of the KV sub-pools; each has write slots of its own.
        device: Where the buffers live.
    """

    is_static = True

    def __init__(
        self, *, max_batch_size: int, max_num_tokens: int, pools: tuple[str, ...], device: torch.device
    ) -> None:
        tokens = _TOKEN_DTYPES | {f"write_slots.{pool}": torch.int64 for pool in pools}
        self._buffers = {
            name: torch.zeros(max_num_tokens, dtype=dtype, device=device) for name, dtype in tokens.items()
        }
        for name, dtype in _REQUEST_DTYPES.items():
            self._buffers[name] = torch.zeros(max_batch_size, dtype=dtype, device=device)
        self._count_cell = count_cell(device)
        self._count = count_of(self._count_cell)
        self._counts = torch.arange(max_num_tokens + 1, dtype=torch.int64, device=device)
        self._longest = max(max_batch_size, max_num_tokens)
        self._constants: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._beginnings: dict[tuple[str, int], torch.Tensor] = {}
        self._rooms: dict[PaddedSizes, PaddedRoom] = {}

    def give(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Returns the beginning of a buffer, always the same tensor for one size; see `Storage`.

        Raises:
            BatchError: There is no such buffer, or it is smaller or of another dtype.
        """
        buffer = self._buffers.get(name)
        if buffer is None:
            raise BatchError(
                f"{name}: there is no static buffer of that name; {nearest(name, self._buffers)}"
            )
        if buffer.dtype != like.dtype or len(shape) != buffer.ndim:
            raise BatchError(
                f"{name}: the static buffer is {buffer.dtype} of {buffer.ndim} dimensions, the batch's tensor "
                f"{like.dtype} of {len(shape)}."
            )
        if shape[0] > buffer.shape[0]:
            raise BatchError(f"{name}: {shape[0]} rows, and the static buffer has {buffer.shape[0]}.")
        key = (name, shape[0])
        if key not in self._beginnings:
            self._beginnings[key] = buffer[: shape[0]]
        return self._beginnings[key]

    def give_count(
        self, num_tokens: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        value = self._counts[num_tokens : num_tokens + 1]
        if not value.numel():  # Counted over ranks with more tokens than this one's buffers hold.
            value = torch.full_like(self._count_cell, num_tokens)
        return self._count, self._count_cell, value

    def constant(self, value: int, length: int, like: torch.Tensor) -> torch.Tensor:
        key = (value, like.dtype)
        if key not in self._constants:
            self._constants[key] = super().constant(value, self._longest, like)
        return self._constants[key][:length]

    def room(self, sizes: PaddedSizes, batch: ForwardBatch) -> PaddedRoom:
        room = self._rooms.get(sizes)
        if room is None or len(room.write_slots) != len(batch.write_slots):
            room = super().room(sizes, batch)
            if len(self._rooms) >= _MAX_ROOMS:
                self._rooms.clear()
            self._rooms[sizes] = room
        return room

    def static_tensors(self) -> dict[str, torch.Tensor]:
        """Returns every buffer by name, for who must know that it never moves."""
        return {**self._buffers, "num_real_tokens": self._count}
