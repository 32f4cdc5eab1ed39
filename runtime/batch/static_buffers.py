"""Static input buffers of a runner: every tensor of a batch at an address that graphs may read.

Given to `pad_batch` as its storage, so that a batch is padded and copied in at once and no tail of
an earlier, larger batch is left. Sizes come from the batch's own fields, the same that an eager
forward has.
"""

from __future__ import annotations

import torch

from ..errors import BatchError, nearest

_TOKEN_DTYPES = {"input_ids": torch.int64, "positions": torch.int64}
_REQUEST_DTYPES = {
    "req_pool_indices": torch.int64,
    "seq_lens": torch.int64,
    "extend_seq_lens": torch.int32,
    "extend_prefix_lens": torch.int32,
    "extend_start_loc": torch.int32,
}


class StaticBatchBuffers:
    """Buffers for the largest batch of a runner; a smaller one lies at their beginning.

    Positions have one axis. Writing while a replay on another stream still reads is the caller's to prevent.

    Args:
        max_batch_size: Requests of the largest capture size.
        max_num_tokens: Its tokens.
        pools: Names of the KV sub-pools; each has write slots of its own.
        device: Where the buffers live.
    """

    def __init__(
        self, *, max_batch_size: int, max_num_tokens: int, pools: tuple[str, ...], device: torch.device
    ) -> None:
        tokens = _TOKEN_DTYPES | {f"write_slots.{pool}": torch.int64 for pool in pools}
        self._buffers = {
            name: torch.zeros(max_num_tokens, dtype=dtype, device=device) for name, dtype in tokens.items()
        }
        for name, dtype in _REQUEST_DTYPES.items():
            self._buffers[name] = torch.zeros(max_batch_size, dtype=dtype, device=device)
        self._buffers["num_real_tokens"] = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Returns the beginning of a buffer; see `Storage`.

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
        if not shape:
            return buffer
        if shape[0] > buffer.shape[0]:
            raise BatchError(f"{name}: {shape[0]} rows, and the static buffer has {buffer.shape[0]}.")
        return buffer[: shape[0]]

    def static_tensors(self) -> dict[str, torch.Tensor]:
        """Returns every buffer by name, for who must know that it never moves."""
        return dict(self._buffers)
