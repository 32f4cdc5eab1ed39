"""CUDA graph segments: one ``torch.cuda.CUDAGraph`` each, and copies inside them."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from .. import torch_private
from . import cuda_runtime
from .device import DeviceGraph, EndsSetter, SettableCopy

if TYPE_CHECKING:
    from .cuda_device import CudaPool

# PyTorch keeps one capture state per random generator. So captures of different threads must not overlap, nor
# may PyTorch replay a graph (it looks at the generators) while another thread captures.
generators_in_use = threading.RLock()

_logger = logging.getLogger(__name__)
_EMPTY_GRAPH_WARNING = "The CUDA Graph is empty"


class CudaGraph(DeviceGraph):
    """One ``torch.cuda.CUDAGraph``.

    Args:
        pool: Where it gets its memory; counts the graphs that use it.

    Attributes:
        held_sources: Sources of copies for the next launch, which lets go of them.
    """

    def __init__(self, pool: CudaPool) -> None:
        self._pool = pool
        # Nodes can be set as long as the graph that they were captured in is kept, which costs host memory; and only a
        # graph that is kept can be changed before it is made launchable.
        self._graph = torch.cuda.CUDAGraph(keep_graph=pool.edits_graphs)
        self._is_empty = False
        self._is_recording = False
        self._uses_pool = False
        self._draws_random: bool | None = None
        self._executable = 0
        self.held_sources: list[torch.Tensor] = []
        for generator in pool.generators:
            self._graph.register_generator_state(generator)
        self._launch = torch_private.graph_launcher(self._graph)

    def begin(self) -> None:
        self._graph.capture_begin(torch_private.pool_token(self._pool.handle), self._pool.error_mode)
        self._is_recording = True
        self._pool.tracker.begin_graph()

    def record_copy(self, target: torch.Tensor, source: torch.Tensor) -> SettableCopy:
        target.copy_(source)
        assert self._pool.runtime is not None, "the pool said that it edits graphs"
        node = self._pool.runtime.last_copy_node(self._pool.stream.cuda_stream)
        return CudaCopy(self, target, source, node)

    def end(self) -> None:
        self._pool.tracker.end_graph()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with _driver_out_of_memory():
                self._graph.capture_end()
                self._is_recording = False
                self._pool.num_graphs += 1
                self._uses_pool = True
                if self._pool.edits_graphs:
                    self._pool.replace_memsets(self._graph.raw_cuda_graph())
                    self._graph.instantiate()
                self._executable = self._graph.raw_cuda_graph_exec()
        self._is_empty = any(_EMPTY_GRAPH_WARNING in str(entry.message) for entry in caught)
        for entry in caught:
            if _EMPTY_GRAPH_WARNING not in str(entry.message):
                warnings.warn_explicit(entry.message, entry.category, entry.filename, entry.lineno)

    def abort(self) -> None:
        self._pool.tracker.stop()
        if self._is_recording:
            self._is_recording = False
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._graph.capture_end()
            except RuntimeError as error:
                _logger.debug("ended an invalid capture: %s", error)
                self._pool.recover()
        self.reset()

    def replay(self) -> None:
        with generators_in_use:
            if self._draws_random is None:
                before = self._pool.random_offsets()
                self._launch()
                self._draws_random = self._pool.random_offsets() != before
            else:
                self._launch()
        self.held_sources.clear()

    def launcher(self) -> Callable[[], None]:
        runtime = self._pool.runtime
        if runtime is None or self._draws_random is not False:
            return self.replay
        launch, executable, held = runtime.launch, self._executable, self.held_sources
        current_stream, index = torch_private.raw_stream_getter(), self._pool.device.torch_device.index
        check = runtime.check

        def launch_directly() -> None:
            error = launch(executable, current_stream(index))
            if held:
                held.clear()
            if error:
                check(error, "launch a graph segment")

        return launch_directly

    def executable(self) -> int:
        """Returns the address of the executable graph; it exists once the graph has ended."""
        return self._executable

    def reset(self) -> None:
        self._graph.reset()
        self.held_sources.clear()
        if self._uses_pool:
            self._uses_pool = False
            self._pool.num_graphs -= 1
            self._pool.release_if_unused()

    @property
    def num_ops(self) -> int | None:
        return 0 if self._is_empty else None


class CudaCopy(SettableCopy):
    """A memcpy node of a graph.

    Args:
        graph: The graph that holds it.
        target: Where it writes; not owned, see `DeviceGraph.record_copy`.
        source: What it was captured with; kept only where there is no node.
        node: Its address, or None if the copy was captured as something else.
    """

    def __init__(
        self, graph: CudaGraph, target: torch.Tensor, source: torch.Tensor, node: int | None
    ) -> None:
        self._graph = graph
        self._node = node
        # A copy that is no memcpy node keeps its captured source for good, and replay writes there.
        self._target = torch_private.alias_without_owning(target)
        self._fixed_source = source if node is None else None
        self._set_source: Callable[[torch.Tensor], None] | None = None

    def setter(self) -> Callable[[torch.Tensor], None]:
        if self._node is None:
            return self._write_fixed_source
        if self._set_source is None:
            runtime = cuda_runtime.load()
            assert runtime is not None, "a node was found with it"
            # One for all who ask: it remembers what the node was set to, and a second would set it unseen.
            self._set_source = cuda_runtime.copy_setter(
                runtime, self._graph.executable(), self._node, self._target, self._graph.held_sources
            )
        return self._set_source

    def ends_setter(self) -> EndsSetter | None:
        runtime = cuda_runtime.load()
        if self._node is None or runtime is None:
            return None
        return functools.partial(runtime.set_copy, self._graph.executable(), self._node)

    def _write_fixed_source(self, source: torch.Tensor) -> None:
        assert self._fixed_source is not None, "kept where there is no node"
        self._fixed_source.copy_(source)


@contextlib.contextmanager
def _driver_out_of_memory() -> Iterator[None]:
    """Raises the allocator's error for the driver's own failed allocations, a plain CUDA error."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(f"{str(error).splitlines()[0]} (making a graph launchable)") from error
