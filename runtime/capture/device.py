"""The interface of a graph device: what the capture engine needs of CUDA, or of its emulation.

A device makes pools; a pool owns memory, one capture stream and one lock; graphs are recorded on
a pool. Both implementations keep one rule: **recording executes nothing**. Between ``begin`` and
``end`` work is only written down; memory that it would have written is undefined until the graph
is replayed, and memory that existed before is as it was.

This module must not know of marks, sessions or segments.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CaptureError, ReplayError
from .pool_model import PoolModel


@dataclass(frozen=True, kw_only=True)
class PoolMemory:
    """What a pool holds, in bytes.

    Attributes:
        reserved_bytes: Taken from the device by the allocator for this pool.
        allocated_bytes: Of those, held by live tensors.
    """

    reserved_bytes: int
    allocated_bytes: int


class DeviceGraph(abc.ABC):
    """One graph: a stretch of device work between two breaks."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Starts recording on the pool's capture stream; needs an open ``capture_scope``.

        Streams that were forked and still open when the previous graph of the scope ended are
        forked again, so that code which goes on using them stays captured.
        """

    def record_copy(self, target: torch.Tensor, source: torch.Tensor) -> SettableCopy:
        """Records ``target.copy_(source)`` as work of the graph; replay sets the source, or both ends.

        Only where the pool ``edits_graphs``. The graph keeps addresses, and owns neither tensor.

        Args:
            target: Dense; must be there at every launch that does not set both ends. Boundary memory is, since the
                graph keeps its pool; the caller keeps other memory alive.
            source: Of the same shape and type, in the pool unless replay sets both ends; may die afterwards.

        Returns:
            What sets one end or both, from the end of the graph on.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no copies whose ends can be set; ask the pool's edits_graphs first"
        )

    @abc.abstractmethod
    def end(self) -> None:
        """Stops recording; the graph can be replayed. Nothing has been executed.

        Forked streams still open are joined first.

        Raises:
            UnjoinedStreamError: A forked stream could not be joined; names the stream.
            CaptureForbiddenError: The device invalidated the capture.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Drops a recording after a failure. Never raises; the stream and allocator are usable."""

    @abc.abstractmethod
    def replay(self) -> None:
        """Executes the recorded work on the current stream."""

    def launcher(self) -> Callable[[], None]:
        """Returns what does the same as ``replay``, at the least cost, once the graph is ready."""
        return self.replay

    @abc.abstractmethod
    def reset(self) -> None:
        """Frees the graph; it cannot be replayed any more. Idempotent."""

    @property
    @abc.abstractmethod
    def num_ops(self) -> int | None:
        """Recorded operations, or None where the device does not say."""

    def op_names(self) -> list[str]:
        """Returns the recorded operations by name, in order; empty where the device does not say."""
        return []


DEVICE_TO_DEVICE = 3
"""What the last argument of an `EndsSetter` is: CUDA's number for copies on the device."""

EndsSetter = Callable[[int, int, int, int], int]
"""``set_ends(target, source, num_bytes, DEVICE_TO_DEVICE) -> error``: where a copy writes and reads from now on.

Takes addresses, returns 0 or CUDA's error. It holds for all launches until it is called again; the caller sees to it
that there is memory then. On CUDA this is a function in C, for code that calls it at every replay.
"""


class SettableCopy(abc.ABC):
    """A copy inside a graph whose source, or both ends, can be set before a launch; who uses it does one of the two."""

    @abc.abstractmethod
    def setter(self) -> Callable[[torch.Tensor], None]:
        """Returns ``set_source(tensor)``, to be called before each launch; ask once the graph has ended.

        The tensor is dense, of the target's shape and type. The graph keeps it until the launch.
        """

    @abc.abstractmethod
    def ends_setter(self) -> EndsSetter | None:
        """Returns what sets both ends; ask once the graph has ended. None where they cannot be set."""


class GraphPool(abc.ABC):
    """Memory, one capture stream and one lock for recordings that are never replayed at once.

    Args:
        device: Whose memory it is.
        current_stream: See below.

    Attributes:
        device: The same.
        lock: Held through `exclusive` from copy-in to copy-out; who takes it otherwise asks `is_held` first.
        is_held: Tells whether this thread is capturing or replaying on the pool.
        current_stream: Returns a number for this thread's current stream of the device.
        last_stream: The number of the stream that last used the pool, or None.
    """

    def __init__(self, device: GraphDevice, current_stream: Callable[[], int]) -> None:
        self.device = device
        self.lock = threading.RLock()
        # Every replay asks both: functions in C, which have no Python frame.
        self.is_held: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]  # As Condition asks.
        self.current_stream = current_stream
        self.last_stream: int | None = None

    def exclusive(self, purpose: str) -> contextlib.AbstractContextManager[Any]:
        """Holds the pool for one capture or one replay, from copy-in to copy-out.

        What it returns is the lock itself: unlike a context manager in Python, an interrupt finds it
        either held by a block that will release it, or not held. Call ``order_after_last_use`` first
        in the block.

        Args:
            purpose: "capture" or "replay", for the error.

        Returns:
            A context manager.

        Raises:
            CaptureError: On entry, this thread holds the pool already (a replay inside an eager
                segment of the same pool, or capture inside capture): waiting would never end.
        """
        if self.is_held():
            raise CaptureError(
                f"{purpose} on a graph pool that this thread is already capturing or replaying on. "
                "Recordings of one pool share memory and cannot nest; give the inner one its own pool."
            )
        return self.lock

    def try_acquire(self) -> bool:
        """Holds the pool if no other thread does, and tells whether it does; `release` it then.

        A thread that holds it already may hold it once more, other than with `exclusive`.
        """
        return self.lock.acquire(blocking=False)

    def release(self) -> None:
        """Undoes `try_acquire`."""
        self.lock.release()

    @property
    def edits_graphs(self) -> bool:
        """Whether captured graphs may be changed: they can hold copies whose ends replay sets (``record_copy``).

        False where the device was made with ``edits_graphs=False``, or cannot do it.
        """
        return False

    def launcher(self, steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """Returns what calls the steps of a replay in order, with the pool's device current."""
        if len(steps) == 1:
            return steps[0]

        def launch() -> None:
            for step in steps:
                step()

        return launch

    def order_after_last_use(self) -> None:
        """Orders what the current stream does next after the last use of the pool, on whatever stream.

        Nothing is to be done where ``current_stream()`` is the ``last_stream``.
        """
        stream = self.current_stream()
        if stream != self.last_stream:
            if self.last_stream is not None:
                self._wait_for_stream(self.last_stream)
            self.last_stream = stream

    @abc.abstractmethod
    def _wait_for_stream(self, last_stream: int) -> None:
        """Makes this thread's current stream wait for another."""

    @abc.abstractmethod
    def capture_scope(self) -> contextlib.AbstractContextManager[None]:
        """Enters the capture stream and installs what watches captured code, for one capture.

        On entry the capture stream waits for the caller's stream, on exit the caller's waits for
        it. Breaks run inside the scope, between ``end`` of one graph and ``begin`` of the next,
        on the same stream; they are not watched.
        """

    def on_capture_stream(self) -> contextlib.AbstractContextManager[None]:
        """Enters the capture stream without capturing, for warm-up.

        Libraries keep workspaces per stream; a warm-up elsewhere would leave the first capture to
        allocate them in the graph pool (`pytorch#99196`).
        """
        return contextlib.nullcontext()

    @abc.abstractmethod
    def new_graph(self) -> DeviceGraph:
        """Returns an empty graph on this pool."""

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocates boundary memory in the pool, between graphs of an open ``capture_scope``.

        Args:
            num_bytes: Size in bytes, at least one.

        Returns:
            An owning tensor (uint8[num_bytes]). When its storage dies the memory goes back to the
            pool, for later segments and smaller sizes.

        Raises:
            torch.OutOfMemoryError: The pool cannot grow.
        """

    @abc.abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Tells whether the tensor's memory belongs to this pool (so the pool keeps it mapped)."""

    @abc.abstractmethod
    def memory(self) -> PoolMemory:
        """Measures what the pool holds now."""


class GraphDevice(abc.ABC):
    """A kind of device on which graphs can be captured.

    Attributes:
        torch_device: Where tensors live.
        is_emulated: True where capture is imitated; reports must say so.
    """

    torch_device: torch.device
    is_emulated: bool

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """A name for reports, for example ``NVIDIA H200`` or ``emulated``."""

    @abc.abstractmethod
    def new_pool(self) -> GraphPool:
        """Returns a new pool with its own memory and capture stream."""

    @abc.abstractmethod
    def new_pool_model(self) -> PoolModel:
        """Returns an empty model of such a pool: what it would reserve, without memory."""

    def explain_failure(self, error: BaseException) -> CaptureError | None:
        """Translates what the device raised inside a capture into an error for the reader.

        Returns:
            The error to raise from ``error``, or None where ``error`` says enough.
        """
        return None

    def refusal(self, error: int, what: str) -> ReplayError:
        """Makes the error for a call that the device did not take; it leaves nothing behind for the next call.

        Args:
            error: What the call returned, for example an `EndsSetter`.
            what: What it was to do, completing "refused to ...".
        """
        return ReplayError(f"The {self.name} device refused to {what} (error {error}).")

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits for all work submitted to the device."""

    def release_cached_memory(self) -> None:
        """Gives memory that nothing uses back to the device, after an allocation failed."""
        return

    @abc.abstractmethod
    def used_bytes(self) -> int | None:
        """Device memory in use as the driver sees it, or None where there is no such figure."""

    @abc.abstractmethod
    def allocator_reserved_bytes(self) -> int:
        """Bytes that PyTorch's allocator (all pools) has taken from the device."""
