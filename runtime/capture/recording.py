"""A recording: the replayable result of one capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import torch_private, tree
from ..errors import CaptureError, ReplayError
from ..mark import active_capture
from .boundary import BreakOutputs
from .device import GraphPool
from .segments import EagerSegment, GraphSegment, Segment
from .sizes import ShapeKey
from .statics import StaticTensors


class Recording:
    """Segments of one captured forward at one shape, and what they give.

    Attributes:
        key: The shape that was captured.
        strategy: The capture strategy: ``full``, ``breakable`` or ``debug``.
        pool: The pool whose memory the graphs use; held, so that it outlives them.
        segments: Graph and eager segments in the order of replay.
        outputs: The forward's result: tensors in the pool are non-owning aliases, overwritten by
            the next replay of any recording on this pool. They are valid because ``segments`` pin
            the pool; a reader who drops the recording must have copied them first.
        launch: What `run` does once it ran a first time, at the least cost; None before, and once it was reset.
    """

    def __init__(
        self,
        *,
        key: ShapeKey,
        strategy: str,
        pool: GraphPool,
        segments: tuple[Segment, ...],
        outputs: Any,
        statics: StaticTensors,
    ) -> None:
        self.key = key
        self.strategy = strategy
        self.pool = pool
        self.segments = segments
        self.outputs = _without_ownership(outputs, pool)
        self._statics = statics
        self._steps = self._bind()
        self._device_type = pool.device.torch_device.type
        self.launch: Callable[[], None] | None = None

    def _bind(self) -> tuple[Callable[[], None], ...]:
        bound = (segment.bind() for segment in self.segments)
        return tuple(step for step in bound if step is not None)

    @property
    def num_graph_segments(self) -> int:
        """Graphs, empty ones included."""
        return sum(isinstance(segment, GraphSegment) for segment in self.segments)

    @property
    def num_breaks(self) -> int:
        """Marked calls."""
        return len(self.break_names)

    @property
    def break_names(self) -> tuple[str, ...]:
        """Names of the marked functions in call order; equal for every compiler of one forward."""
        return tuple(segment.mark.name for segment in self.segments if isinstance(segment, EagerSegment))

    @property
    def argument_storages(self) -> frozenset[int]:
        """Addresses of the storages of all tensors that marked functions are given."""
        breaks = (segment for segment in self.segments if isinstance(segment, EagerSegment))
        return frozenset().union(*(segment.arguments.storages for segment in breaks))

    @property
    def break_outputs(self) -> tuple[BreakOutputs, ...]:
        """Results of the breaks, in call order."""
        return tuple(segment.outputs for segment in self.segments if isinstance(segment, EagerSegment))

    def replay(self) -> None:
        """Executes the segments in order; inputs are read from, and results left, where captured.

        Raises:
            MovedAddressError: On the first replay, a static tensor is not where it was.
            BreakMismatchError: A marked function returned something of another form.
            CaptureError: Called while this thread captures, or inside a replay on the same pool.
            ReplayError: The recording was reset.
        """
        self.refuse_inside_capture()
        with self.pool.exclusive("replay"):
            self.pool.order_after_last_use()
            self.run()

    def run(self) -> None:
        """Replays without taking the pool.

        The caller called ``refuse_inside_capture`` and holds ``pool.exclusive``.
        """
        if self.launch is not None:
            self.launch()
            return
        self.check_static_addresses()
        self._launcher()()
        # The first run taught the graphs whether they draw random numbers; others launch faster.
        self._steps = self._bind()
        self.launch = self._launcher()

    def first_launch(self) -> Callable[[], None] | None:
        """Returns `run` of a recording that has no ``launch`` yet; None of one that was reset."""
        return self.run if self.segments else None

    def _launcher(self) -> Callable[[], None]:
        """Returns what calls the steps; refers to the graphs, and not to this object."""
        launch, device_type = self.pool.launcher(self._steps), self._device_type
        if self.num_breaks == 0:
            return launch  # Graphs know no modes.

        def launch_in_modes() -> None:
            # Bodies run as they did at capture, whatever the caller's modes are now: without autograd, and
            # under the autocast that each brings with it.
            if torch.is_grad_enabled() or torch.is_autocast_enabled(device_type):
                with torch.no_grad(), torch.autocast(device_type, enabled=False):
                    launch()
            else:
                launch()

        return launch_in_modes

    def refuse_inside_capture(self) -> None:
        """Call before taking the pool for a replay.

        Raises:
            CaptureError: This thread is capturing.
        """
        if active_capture() is not None:
            raise CaptureError(
                f"Recording {self.key} was replayed inside a capture. A graph cannot launch graphs while it is "
                "being recorded; put the call into a function marked @eager_on_graph."
            )

    def check_static_addresses(self) -> None:
        """Checks that every static tensor is where the graphs read it.

        Raises:
            MovedAddressError: One moved; names it.
        """
        self._statics.check()

    def reset(self) -> None:
        """Frees the graphs. The pool's memory goes back once no recording uses it. Idempotent."""
        self._steps = (self._raise_reset,)
        self.launch = None
        self._statics = StaticTensors()
        for segment in self.segments:
            if isinstance(segment, GraphSegment):
                segment.graph.reset()
        self.segments = ()
        self.outputs = None

    def _raise_reset(self) -> None:
        raise ReplayError(f"Recording {self.key} was reset; capture it again before replaying.")

    def describe(self) -> str:
        """Returns the recording as text: one line per segment, then the outputs."""
        lines = [
            (
                f"recording {self.key} strategy={self.strategy} device={self.pool.device.name} "
                f"graphs={self.num_graph_segments} breaks={self.num_breaks}"
            )
        ]
        for index, segment in enumerate(self.segments):
            if isinstance(segment, GraphSegment):
                ops = segment.graph.op_names()
                count = segment.graph.num_ops
                detail = "" if count is None else f" {count} ops" + (f": {', '.join(ops)}" if ops else "")
                lines.append(f"  {index} graph{detail}")
            else:
                lines.append(f"  {index} break {segment.mark.name} -> {_describe_outputs(segment.outputs)}")
        leaves, spec = tree.flatten(self.outputs)
        names = tree.paths(spec, "output")
        for name, leaf in zip(names, leaves, strict=True):
            lines.append(f"  {name}: {_describe_value(leaf)}")
        return "\n".join(lines)


def _without_ownership(outputs: Any, pool: GraphPool) -> Any:
    leaves, spec = tree.flatten(outputs)
    return tree.unflatten(
        spec,
        [
            # Kept mapped by the recording's graphs, which pin the pool.
            torch_private.alias_without_owning(leaf)
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and pool.owns(leaf)
            else leaf
            for leaf in leaves
        ],
    )


def _describe_outputs(outputs: BreakOutputs) -> str:
    parts = []
    for leaf in outputs.leaves:
        if leaf.address is None:
            parts.append(f"{leaf.path}={leaf.value!r} (baked)")
        else:
            kind = "alias" if leaf.target is None else "boundary"
            parts.append(f"{_dtype_name(leaf.dtype)}{list(leaf.shape or ())} ({kind})")
    return ", ".join(parts)


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_dtype_name(value.dtype)}{list(value.shape)}"
    return repr(value)


def _dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
