"""Which input buffers a forward writes to, found while it warms up.

PyTorch counts its own in-place operators in a version; a write through ``.data``, NumPy or a kernel of another library
raises none. So values are compared as well, of buffers that are not large. This module must not know what the buffers
are for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

# A copy of a larger buffer (a KV cache that is an argument) may not fit beside it.
_MAX_COMPARED_BYTES = 64 << 20


class InputWrites:
    """Buffers that were written to.

    Args:
        buffers: By a number of their own; flat.

    Attributes:
        written: Numbers of those that were.
    """

    def __init__(self, buffers: Mapping[int, torch.Tensor]) -> None:
        self.written: set[int] = set()
        self._buffers = buffers
        self._changed: list[tuple[int, torch.Tensor]] = []

    @contextlib.contextmanager
    def noted(self, num_bytes: Sequence[int]) -> Iterator[None]:
        """Notes which buffers the block writes to, without a wait for the device: `settle` finds out.

        Args:
            num_bytes: How much of each buffer the block uses, from its beginning.
        """
        before = [
            (index, buffer, buffer._version, _bytes_of(buffer, used).clone() if _is_compared(used) else None)
            for (index, buffer), used in zip(self._buffers.items(), num_bytes, strict=True)
        ]
        yield
        for index, buffer, version, held in before:
            if buffer._version != version:
                self.written.add(index)
            elif held is not None:
                self._changed.append((index, (_bytes_of(buffer, held.nbytes) != held).any()))

    def settle(self) -> None:
        """Waits for the comparisons of `noted`."""
        self.written.update(index for index, is_changed in self._changed if is_changed)
        self._changed.clear()


def _is_compared(num_bytes: int) -> bool:
    return 0 < num_bytes <= _MAX_COMPARED_BYTES


def _bytes_of(buffer: torch.Tensor, num_bytes: int) -> torch.Tensor:
    return buffer.view(torch.uint8)[:num_bytes]
