"""``capture``: from a function and example arguments to a callable that replays graphs.

The callable copies its inputs into static buffers, replays the recording of the smallest capture
size that holds them, and cuts the outputs back. What no graph can serve runs eager, with a
reason that is counted. This module must not know of models or of compilers: it takes a callable.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from .. import tree
from ..errors import CaptureError, ConfigError, nearest
from ..mark import MarkedFunction, eager_on_graph, use_capture
from ..records import BuildRecord, PhaseClock, SizeBuild
from .device import GraphDevice, GraphPool
from .devices import graph_device_for
from .recording import Recording
from .session import CaptureMode, CaptureSession, refuse_nested_capture
from .sizes import ShapeKey, padded_size, validate_capture_sizes
from .static_inputs import StaticInputs, share_bytes
from .static_outputs import OutputCut
from .statics import StaticTensor, StaticTensors

_logger = logging.getLogger(__name__)

OutputMode = Literal["copy", "view"]
ProgressCallback = Callable[[str, int, int], None]

CAPTURE_STRATEGIES: tuple[CaptureMode, ...] = ("full", "breakable")
OUTPUT_MODES: tuple[OutputMode, ...] = ("copy", "view")

SIZE_OVER_LARGEST = "size_over_largest"
SIZE_ZERO = "size_zero"
NO_GRAPH = "no_graph_for_size"
UNCUTTABLE_OUTPUT = "output_cannot_be_cut"
ALIASED_INPUTS = "written_inputs_share_memory"
AUTOGRAD_INPUTS = "inputs_require_grad"


class _MarkObserver:
    """Stands in for a capture during warm-up, to see which marks a forward meets."""

    def __init__(self) -> None:
        self.marks: list[MarkedFunction] = []

    def call_marked(self, mark: MarkedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.marks.append(mark)
        with use_capture(None):
            return mark.fn(*args, **kwargs)


class CapturedCallable:
    """What ``capture`` returns; called like the function it was made from.

    Attributes:
        pool: The graph pool of all sizes.
        recordings: One per captured size.
        build: What it took.
        fallbacks: Calls that ran eager, by reason.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: StaticInputs,
        *,
        strategy: str,
        mode: CaptureMode,
        copy_outputs: bool,
        sizes: tuple[int, ...] | None,
        pool: GraphPool,
        statics: StaticTensors,
    ) -> None:
        self._fn = fn
        self._inputs = inputs
        self._strategy = strategy
        self._mode: CaptureMode = mode
        self._copy_outputs = copy_outputs
        self._sizes = sizes
        self._statics = statics
        self._cut = OutputCut()
        self.pool = pool
        self.recordings: dict[ShapeKey, Recording] = {}
        self._by_size: dict[int | None, Recording] = {}  # the same, without hashing a key per call
        self.fallbacks: collections.Counter[str] = collections.Counter()
        self.build: BuildRecord | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function: by replay where a graph fits, else eager.

        Returns:
            As the function does. Tensors are fresh copies, or with ``outputs="view"`` graph-owned:
            overwritten by the next replay on this pool.

        Raises:
            InputMismatchError: Arguments do not fit the captured ones.
        """
        real, values = self._inputs.real_size(args, kwargs)
        padded = self.padded_size(real) if real is not None else None
        recording, reason = self._find(real, padded, values)
        if recording is None:
            return self._run_eager(reason, args, kwargs)
        recording.refuse_inside_capture()
        with self.pool.exclusive("replay"):
            self._inputs.copy_in(values, real, padded)
            recording.run()
            if self._inputs.written:
                self._inputs.copy_back(values, real, padded, self._ours_to_keep(recording, values))
            return self._cut.apply(recording.outputs, real, padded, copy=self._copy_outputs)

    def _ours_to_keep(self, recording: Recording, values: Sequence[Any]) -> frozenset[int]:
        """Tells which written inputs lie where this replay left its outputs.

        That is an earlier output of ``outputs="view"`` that came back as an input. It was valid until
        this replay; writing it back now would destroy the new outputs.
        """
        inputs = [index for index in self._inputs.written if self.pool.owns(values[index])]
        if not inputs:
            return frozenset()
        outputs = [leaf for leaf in tree.flatten(recording.outputs)[0] if isinstance(leaf, torch.Tensor)]
        return frozenset(
            index for index in inputs if any(share_bytes(values[index], output) for output in outputs)
        )

    def padded_size(self, num_real: int) -> int | None:
        """Returns the capture size that serves ``num_real``, or None if none is large enough."""
        return padded_size(num_real, self._sizes) if self._sizes else None

    def _find(
        self, real: int | None, padded: int | None, values: Sequence[Any]
    ) -> tuple[Recording | None, str]:
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in values
        ):
            return None, AUTOGRAD_INPUTS
        if self._sizes is not None:
            if real == 0:
                return None, SIZE_ZERO
            if padded is None:
                return None, SIZE_OVER_LARGEST
            if real != padded and not self._cut.can_cut:
                return None, UNCUTTABLE_OUTPUT
        if self._inputs.written and self._inputs.share_memory(values):
            return None, ALIASED_INPUTS
        return self._by_size.get(padded), NO_GRAPH

    def _run_eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if reason not in self.fallbacks:
            _logger.warning("%s: ran without a graph, reason %s (counted in .fallbacks)", self, reason)
        self.fallbacks[reason] += 1
        # Copied as a replay's outputs are: the function may return state that a later call overwrites.
        return self._cut.apply(self._fn(*args, **kwargs), None, None, copy=self._copy_outputs)

    def check_static_addresses(self) -> None:
        """Checks that parameters and registered tensors are where the graphs read them.

        Raises:
            MovedAddressError: One moved; names it.
        """
        for recording in self.recordings.values():
            recording.check_static_addresses()

    def describe(self) -> str:
        """Returns every recording as text, largest first."""
        return "\n".join(recording.describe() for recording in self.recordings.values())

    def reset(self) -> None:
        """Frees graphs and pool memory; later calls run eager with a reason. Idempotent."""
        for recording in self.recordings.values():
            recording.reset()
        self.recordings.clear()
        self._by_size.clear()

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", type(self._fn).__qualname__)
        return f"<captured {name} strategy={self._strategy} sizes={list(self._sizes or ())}>"

    def build_all(
        self, *, launch_segments: bool | None, num_warm_ups: int, on_progress: ProgressCallback | None
    ) -> None:
        """Warms up and captures every size, largest first; called once, by ``capture``."""
        clock = PhaseClock()
        device = self.pool.device
        sizes: list[int | None] = [None] if self._sizes is None else list(reversed(self._sizes))
        report = on_progress or (lambda phase, done, total: None)
        built: list[SizeBuild] = []
        launched = bool(launch_segments)
        try:
            for index, size in enumerate(sizes):
                report("capture", index, len(sizes))
                entry, launched = self._build_size(size, clock, launch_segments, num_warm_ups)
                built.append(entry)
            if self._sizes is not None:
                with clock.phase("learn_output_shapes"):
                    self._learn_from_one_more_size()
            with clock.phase("wait_for_device"):
                device.synchronize()
        except BaseException:
            self.reset()
            raise
        report("capture", len(sizes), len(sizes))
        self.build = BuildRecord(
            strategy=self._strategy,
            device=device.name,
            is_emulated=device.is_emulated,
            segments_launched=launched,
            total_s=clock.total_s(),
            phases_s=dict(clock.phases_s),
            sizes=tuple(built),
        )

    def _build_size(
        self, size: int | None, clock: PhaseClock, launch_segments: bool | None, num_warm_ups: int
    ) -> tuple[SizeBuild, bool]:
        device, key = self.pool.device, ShapeKey(size=size)
        warm_up_before = clock.phases_s.get("warm_up", 0.0)
        capture_before = clock.phases_s.get("capture", 0.0)
        used, reserved = device.used_bytes(), device.allocator_reserved_bytes()
        recording: Recording | None = None
        error: str | None = None
        launched = bool(launch_segments)
        try:
            with clock.phase("warm_up"):
                marks = self._warm_up(size, num_warm_ups)
            launched = _needs_launching(marks) if launch_segments is None else launch_segments
            used, reserved = device.used_bytes(), device.allocator_reserved_bytes()
            with clock.phase("capture"):
                recording = self._capture(key, launched)
            self.recordings[key] = self._by_size[size] = recording
        except torch.OutOfMemoryError as out_of_memory:
            error = self._report_out_of_memory(key, out_of_memory)
        used_now, reserved_now = device.used_bytes(), device.allocator_reserved_bytes()
        driver = None if used is None or used_now is None else (used_now - used) - (reserved_now - reserved)
        entry = SizeBuild(
            size=size,
            warm_up_s=clock.phases_s.get("warm_up", 0.0) - warm_up_before,
            capture_s=clock.phases_s.get("capture", 0.0) - capture_before,
            num_graph_segments=0 if recording is None else recording.num_graph_segments,
            num_breaks=0 if recording is None else recording.num_breaks,
            reserved_bytes=self.pool.memory().reserved_bytes,
            driver_bytes=driver,
            error=error,
        )
        return entry, launched

    def _report_out_of_memory(self, key: ShapeKey, error: torch.OutOfMemoryError) -> str:
        reason = f"out of memory: {str(error).splitlines()[0]}"
        _logger.warning("%s: no graph for %s, it will run eager (%s)", self, key, reason)
        self.pool.device.release_cached_memory()
        return reason

    def _warm_up(self, size: int | None, num_warm_ups: int) -> list[MarkedFunction]:
        """Runs the forward on the capture stream; returns the marks it met.

        Nothing waits for the device here: captured work runs later on the same stream, and meanwhile
        the device works while the host captures (`sglang#34286` needs a wait for its several streams).
        """
        observer = _MarkObserver()
        args, kwargs = self._inputs.views(size)
        with self.pool.exclusive("capture"), self.pool.on_capture_stream():
            for _ in range(num_warm_ups):
                before = self._inputs.versions()
                with use_capture(observer):
                    outputs = self._fn(*args, **kwargs)
                self._inputs.note_written(before)
                _refuse_grad(outputs)
                if size is not None:
                    self._cut.learn(size, outputs)
                del outputs
        return observer.marks

    def _capture(self, key: ShapeKey, launch_segments: bool) -> Recording:
        args, kwargs = self._inputs.views(key.size)
        session = CaptureSession(
            self.pool,
            mode=self._mode,
            strategy=self._strategy,
            key=key,
            launch_segments=launch_segments,
            statics=self._statics,
        )
        with session:
            outputs = self._fn(*args, **kwargs)
            session.set_outputs(outputs)
            del outputs
        assert session.recording is not None
        return session.recording

    def _learn_from_one_more_size(self) -> None:
        """A single size cannot tell which output dimension follows it; a forward at another can."""
        assert self._sizes is not None
        largest = self._sizes[-1]
        if self._cut.num_sizes < 2 and largest > 1:
            args, kwargs = self._inputs.views(largest - 1)
            with self.pool.exclusive("capture"), self.pool.on_capture_stream():
                self._cut.learn(largest - 1, self._fn(*args, **kwargs))
        self._cut.dims()


def capture(
    fn: Callable[..., Any],
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    strategy: str = "breakable",
    outputs: str = "copy",
    capture_sizes: Sequence[int] | None = None,
    dynamic_dims: Mapping[str, int] | None = None,
    pad_values: Mapping[str, int | float | bool] | None = None,
    static_tensors: Mapping[str, StaticTensor] | None = None,
    device: GraphDevice | torch.device | str | None = None,
    pool: GraphPool | None = None,
    launch_segments: bool | None = None,
    num_warm_ups: int = 1,
    debug: bool = False,
    on_progress: ProgressCallback | None = None,
) -> CapturedCallable:
    """Captures a function or module at one fixed shape, or at a ladder of sizes.

    Args:
        fn: Any callable; run without autograd.
        example_args: Positional arguments, at the largest capture size. Tensors are copied.
        example_kwargs: Keyword arguments likewise.
        strategy: ``breakable`` (a break at every mark) or ``full`` (one graph, marks included).
        outputs: ``copy`` returns fresh tensors; ``view`` returns graph-owned ones, valid until
            the next replay on the same pool.
        capture_sizes: Ascending padded sizes; None captures the example's shapes only.
        dynamic_dims: Argument path to the dimension that follows the size, for example
            ``{"input_ids": 0}``. Default: dimension 0 of every device tensor that has the largest
            size there.
        pad_values: Argument path to what padded rows hold; 0 unless named.
        static_tensors: Tensors outside the module that the graphs read in place (KV buffers,
            workspaces), or callables that return the one in use; checked like parameters.
        device: Graph device, or a PyTorch device; the example tensors' device if None.
        pool: Pool to share with other recordings that are never replayed at once.
        launch_segments: Whether closed segments run while capturing. None launches unless every
            mark that the warm-up met has a ``capture_stub`` or ``fake``.
        num_warm_ups: Forwards per size before its capture, at least one.
        debug: Run the whole forward as one eager segment through the same buffers and replay path.
        on_progress: Called with (phase, done, total).

    Returns:
        A callable with ``fn``'s signature.

    Raises:
        ConfigError: An option that cannot be accepted.
        CaptureError: The function cannot be captured; nothing is left half-captured.

    Source: the shape of ``torch.cuda.make_graphed_callables``; differs: sizes, breaks, inputs
    written in place are written back.
    """
    refuse_nested_capture()
    if strategy not in CAPTURE_STRATEGIES:
        raise ConfigError(f"Unknown strategy {strategy!r}. {nearest(strategy, CAPTURE_STRATEGIES)}")
    if outputs not in OUTPUT_MODES:
        raise ConfigError(f"Unknown outputs mode {outputs!r}. {nearest(outputs, OUTPUT_MODES)}")
    if num_warm_ups < 1:
        raise ConfigError(f"num_warm_ups is {num_warm_ups}; at least one forward must run before a capture.")
    sizes = None if capture_sizes is None else validate_capture_sizes(capture_sizes)
    kwargs = dict(example_kwargs or {})
    module = _module_of(fn)
    graph_device = _device_for(device, pool, (example_args, kwargs), module)
    _refuse_autograd(example_args, kwargs, module)
    inputs = StaticInputs(
        fn,
        tuple(example_args),
        kwargs,
        device=graph_device.torch_device,
        sizes=sizes,
        dynamic_dims=dynamic_dims,
        pad_values=pad_values,
    )
    target = eager_on_graph(fn) if debug else fn
    captured = CapturedCallable(
        target,
        inputs,
        strategy="debug" if debug else strategy,
        mode="breakable" if debug or strategy == "breakable" else "full",
        copy_outputs=outputs == "copy",
        sizes=sizes,
        pool=graph_device.new_pool() if pool is None else pool,
        statics=StaticTensors(static_tensors, module),
    )
    captured.build_all(launch_segments=launch_segments, num_warm_ups=num_warm_ups, on_progress=on_progress)
    return captured


def _needs_launching(marks: list[MarkedFunction]) -> bool:
    return any(mark.capture_stub is None and mark.fake is None for mark in marks)


def _module_of(fn: Callable[..., Any]) -> torch.nn.Module | None:
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def _device_for(
    device: GraphDevice | torch.device | str | None,
    pool: GraphPool | None,
    arguments: Any,
    module: torch.nn.Module | None,
) -> GraphDevice:
    if isinstance(device, GraphDevice):
        found = device
    elif device is not None:
        found = graph_device_for(device)
    elif pool is not None:
        return pool.device
    else:
        tensors = [leaf for leaf in tree.flatten(arguments)[0] if isinstance(leaf, torch.Tensor)]
        tensors += list(module.parameters()) if module is not None else []
        devices = {tensor.device for tensor in tensors}
        accelerators = {one for one in devices if one.type != "cpu"}
        if len(accelerators) > 1:
            raise ConfigError(
                f"Arguments and parameters lie on {sorted(map(str, accelerators))}; a capture has one device. "
                "Say which with device=."
            )
        found = graph_device_for(next(iter(accelerators), torch.device("cpu")))
    if pool is not None and pool.device.torch_device != found.torch_device:
        raise ConfigError(
            f"The pool is on {pool.device.torch_device}, but the capture is on {found.torch_device}."
        )
    return found


def _refuse_autograd(args: Any, kwargs: Any, module: torch.nn.Module | None) -> None:
    if not torch.is_grad_enabled():
        return
    tensors = [leaf for leaf in tree.flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    tensors += list(module.parameters()) if module is not None else []
    if any(tensor.requires_grad for tensor in tensors):
        _raise_autograd("arguments or parameters require grad")


def _refuse_grad(outputs: Any) -> None:
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree.flatten(outputs)[0]):
        if torch.is_grad_enabled():
            _raise_autograd("an output requires grad")


def _raise_autograd(why: str) -> None:
    raise CaptureError(
        f"Autograd is recording while capturing ({why}). Graphs hold no autograd history; capture under "
        "`with torch.inference_mode():` or `torch.no_grad()`."
    )
