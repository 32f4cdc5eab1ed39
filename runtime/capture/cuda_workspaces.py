"""Capture streams, and workspaces of cuBLAS that graphs may go on writing to.

PyTorch makes one workspace for each cuBLAS handle and stream, in ordinary memory, and a graph writes where that was
at its capture. But PyTorch also forgets all workspaces of a process at once: its own CUDA graphs do at every
recording (``mode="reduce-overhead"``; `torch/_inductor/cudagraph_trees.py`, 2.11 to 2.13). What was a workspace then
holds somebody's tensor, or nothing, while older graphs still write there: wrong values, or a launch failure.

So a capture stream is nobody else's, and its workspaces are made, before anything else on it needs them, in a
memory pool that only this stream allocates from. A forgotten workspace goes back to that pool and no further. This
module must not know what is captured.
"""

from __future__ import annotations

import collections

import torch

from .. import torch_private
from ..config import has_cublas_workspace_config
from . import cuda_runtime

# By device. Appending and popping are whole, so a finalizer may give back while another stream is taken.
_IDLE: collections.defaultdict[int, collections.deque[CaptureStream]] = collections.defaultdict(
    collections.deque
)

# Of streams that callers gave, by device and handle. PyTorch has few streams, so few pools are held.
_GIVEN: dict[tuple[int, int], CaptureStream] = {}


class CaptureStream:
    """A stream to capture on, with the memory of its libraries.

    Args:
        stream: The stream. On one that others use too, a workspace may exist already, which is not protected.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._index: int = stream.device.index
        self._pool_id = torch.cuda.graph_pool_handle()
        torch_private.hold_pool(self._index, self._pool_id)
        self._operands: tuple[torch.Tensor, ...] = ()

    def make_workspaces(self) -> None:
        """Makes what cuBLAS needs in this thread, where it is missing; call on the stream, before a capture."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cuda", enabled=False):
            torch_private.begin_allocating_to_pool(self._index, self._pool_id)
            try:
                if not self._operands:
                    self._operands = tuple(torch.zeros(8, 8, device=self.stream.device) for _ in range(3))
                torch.cuda.current_blas_handle()
                if not torch.are_deterministic_algorithms_enabled() or has_cublas_workspace_config():
                    result, a, b = self._operands
                    # With a bias it goes to cuBLASLt, which may have a workspace of its own.
                    torch.addmm(a[0], a, b, out=result)
            finally:
                torch_private.end_allocating_to_pool(self._index, self._pool_id)

    def give_back(self) -> None:
        """Lets another pool use the stream; nothing that was captured on it may be replayed any more."""
        _IDLE[self._index].append(self)


def given_stream(stream: torch.cuda.Stream) -> CaptureStream:
    """Returns what captures on a caller's stream use, the same each time: its memory pool is held for good."""
    key = (stream.device.index, stream.cuda_stream)
    if key not in _GIVEN:
        _GIVEN[key] = CaptureStream(stream)
    return _GIVEN[key]


def take_stream(device: torch.device) -> CaptureStream:
    """Returns a capture stream that nobody uses; give it back when no graph of it is left.

    Args:
        device: A CUDA device with an index.
    """
    try:
        return _IDLE[device.index].pop()
    except IndexError:
        pass
    runtime = cuda_runtime.load()
    with torch.cuda.device(device):
        if runtime is None:
            return CaptureStream(torch.cuda.Stream())
        # Streams of PyTorch's own are 32 in all, given out in turn: another library may have had this one.
        return CaptureStream(torch.cuda.ExternalStream(runtime.new_stream(), device=device))
