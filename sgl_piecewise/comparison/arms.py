"""The arms of a comparison: one strategy each, behind one small interface.

A strategy is an entry of `STRATEGIES`; a new cell of the grid is a new entry. An arm must not
know of other arms, of timing, or of reports.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from sgl_piecewise.entry import (
    BIT_KEEPING_COMPILERS,
    capture,
    cell_name,
    compiled_forward,
    import_compiler,
    trace_for_all_sizes,
)
from sgl_piecewise.runtime.capture.captured import CapturedCallable, ProgressCallback
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.sizes import ShapeKey
from sgl_piecewise.runtime.mark import noted_marks
from sgl_piecewise.runtime.records import IMPORT, BuildRecord, PhaseClock

from .records import GraphMemory

if TYPE_CHECKING:
    from sgl_piecewise.compiler.forward import CompiledForward


@dataclass(frozen=True, kw_only=True)
class ArmSetup:
    """What every arm is made from.

    Attributes:
        model: The callable under comparison.
        example: Positional arguments at the largest capture size.
        capture_sizes: Ascending.
        device: Captures graphs.
        launch_segments: Whether closed segments run while capturing; None is capture's default.
    """

    model: Callable[..., torch.Tensor]
    example: tuple[Any, ...]
    capture_sizes: tuple[int, ...]
    device: GraphDevice
    launch_segments: bool | None


class Arm(abc.ABC):
    """One strategy, ready to be built and run.

    Attributes:
        keeps_bits: Whether its outputs must equal padded eager's bit for bit; else they are judged by a tolerance.
        piece_compiler: What compiles the pieces between breaks; None where there are no pieces, or no graphs.
    """

    keeps_bits = True
    piece_compiler: str | None = None

    @abc.abstractmethod
    def build(self, on_progress: ProgressCallback) -> BuildRecord | None:
        """Makes every capture size ready; None where there is nothing to build."""

    @abc.abstractmethod
    def run(self, *arguments: Any) -> torch.Tensor:
        """Returns the output's real rows for one input (fresh)."""

    @abc.abstractmethod
    def padded_size(self, num_tokens: int) -> int | None:
        """Rows that a run of ``num_tokens`` computes; None where no graph holds them."""

    @abc.abstractmethod
    def fallbacks(self) -> dict[str, int]:
        """Runs so far that did not come from a graph, by reason."""

    @abc.abstractmethod
    def memory(self) -> GraphMemory | None:
        """What the graphs hold; None where there are none."""

    @property
    @abc.abstractmethod
    def break_names(self) -> tuple[str, ...]:
        """The marked calls between the graph segments of one forward, in order."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees the graphs."""


class EagerArm(Arm):
    """The reference: the model as it is, on the real tokens alone."""

    def __init__(self, setup: ArmSetup) -> None:
        self._model = setup.model

    def build(self, on_progress: ProgressCallback) -> None:
        """Nothing to build."""

    def run(self, *arguments: Any) -> torch.Tensor:
        return self._model(*arguments)

    def padded_size(self, num_tokens: int) -> int:
        """Eager pads nothing."""
        return num_tokens

    def fallbacks(self) -> dict[str, int]:
        """Eager has nothing to fall back from."""
        return {}

    def memory(self) -> None:
        """Eager has no graphs."""

    @property
    def break_names(self) -> tuple[str, ...]:
        """Eager has no segments, so nothing between them."""
        return ()

    def close(self) -> None:
        """Nothing to free."""


class CapturedArm(Arm):
    """The model captured, as it is or compiled.

    Args:
        setup: As for every arm.
        strategy: How it is captured.
        compiler: What compiles its pieces, or None.
    """

    def __init__(
        self, setup: ArmSetup, strategy: Literal["breakable", "full"], compiler: str | None = None
    ) -> None:
        self._setup = setup
        self._strategy: Literal["breakable", "full"] = strategy
        self._compiler = compiler
        self.keeps_bits = compiler is None or compiler in BIT_KEEPING_COMPILERS
        self.piece_compiler = compiler if strategy == "breakable" else None
        self._built: CapturedCallable | None = None

    def build(self, on_progress: ProgressCallback) -> BuildRecord:
        self._built = capture(
            self._setup.model,
            self._setup.example,
            compile=self._compiler,
            on_recompile=None if self._compiler is None else "eager",
            strategy=self._strategy,
            outputs="copy",
            capture_sizes=self._setup.capture_sizes,
            device=self._setup.device,
            launch_segments=self._setup.launch_segments,
            on_progress=on_progress,
        )
        return self._record

    @property
    def _record(self) -> BuildRecord:
        record = self._captured.build
        assert record is not None, "capture() returns with its record"
        return record

    @property
    def _captured(self) -> CapturedCallable:
        assert self._built is not None, "an arm is built before it is used"
        return self._built

    def run(self, *arguments: Any) -> torch.Tensor:
        result: torch.Tensor = self._captured(*arguments)
        return result

    def padded_size(self, num_tokens: int) -> int | None:
        size = self._captured.padded_size(num_tokens)
        return size if ShapeKey(size=size) in self._captured.recordings else None

    def fallbacks(self) -> dict[str, int]:
        fallbacks = self._captured.fallbacks
        if self._compiler is None:
            return dict(fallbacks)
        compiled: Any = self._captured.fn
        return dict(fallbacks + compiled.fallbacks)

    def memory(self) -> GraphMemory:
        built = [size for size in self._record.sizes if size.error is None]
        driver_bytes = [size.driver_bytes for size in built if size.driver_bytes is not None]
        return GraphMemory(
            allocator_bytes=self._captured.pool.memory().reserved_bytes,
            largest_alone_bytes=built[0].reserved_bytes if built else 0,
            driver_bytes=sum(driver_bytes) if len(driver_bytes) == len(built) else None,
        )

    @property
    def break_names(self) -> tuple[str, ...]:
        recordings = list(self._captured.recordings.values())
        return tuple(recordings[0].break_names) if recordings else ()

    def close(self) -> None:
        if self._built is not None:
            self._built.reset()
            self._built = None


class CompiledArm(Arm):
    """The model compiled and not captured: runs on the real tokens alone, as eager does."""

    def __init__(self, setup: ArmSetup, compiler: str) -> None:
        self._setup = setup
        self._compiler = compiler
        self.keeps_bits = compiler in BIT_KEEPING_COMPILERS
        self._forward: CompiledForward | None = None
        self._break_names: tuple[str, ...] = ()

    def build(self, on_progress: ProgressCallback) -> BuildRecord:
        on_progress("compile", 0, 1)
        imports = PhaseClock()
        with imports.phase(IMPORT):
            import_compiler(self._compiler)
        clock = PhaseClock()
        setup = self._setup
        forward = compiled_forward(setup.model, self._compiler)
        trace_for_all_sizes(forward, setup.example, {}, setup.capture_sizes, None)
        forward.freeze("eager")
        with clock.phase("wait_for_device"):
            setup.device.synchronize()
        self._forward = forward
        record = BuildRecord(
            strategy=cell_name(self._compiler, "none"),
            device=setup.device.name,
            is_emulated=setup.device.is_emulated,
            segments_launched=False,
            total_s=clock.total_s(),
            phases_s=forward.phases_s | clock.phases_s,
            sizes=(),
            import_s=imports.phases_s[IMPORT],
        )
        with noted_marks() as names:
            forward(*setup.example)
        self._break_names = tuple(names)
        on_progress("compile", 1, 1)
        return record

    @property
    def _compiled(self) -> CompiledForward:
        assert self._forward is not None, "an arm is built before it is used"
        return self._forward

    def run(self, *arguments: Any) -> torch.Tensor:
        result: torch.Tensor = self._compiled(*arguments)
        return result

    def padded_size(self, num_tokens: int) -> int:
        """Nothing is padded."""
        return num_tokens

    def fallbacks(self) -> dict[str, int]:
        return dict(self._compiled.fallbacks)

    def memory(self) -> None:
        """There are no graphs."""

    @property
    def break_names(self) -> tuple[str, ...]:
        return self._break_names

    def close(self) -> None:
        self._forward = None


STRATEGIES: dict[str, Callable[[ArmSetup], Arm]] = {
    "eager": EagerArm,
    "full": lambda setup: CapturedArm(setup, "full"),
    "breakable": lambda setup: CapturedArm(setup, "breakable"),
    "fx": lambda setup: CompiledArm(setup, "fx"),
    "fx_full": lambda setup: CapturedArm(setup, "full", "fx"),
    "fx_piecewise": lambda setup: CapturedArm(setup, "breakable", "fx"),
    "tc": lambda setup: CompiledArm(setup, "inductor"),
    "tc_full": lambda setup: CapturedArm(setup, "full", "inductor"),
    "tc_piecewise": lambda setup: CapturedArm(setup, "breakable", "inductor"),
}
"""What can be compared, by name."""
