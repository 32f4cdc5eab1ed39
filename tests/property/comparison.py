"""Captures a random program in every way and compares each call, bit for bit, with padded eager."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_piecewise import capture
from sgl_piecewise.runtime import tree
from sgl_piecewise.runtime.capture.captured import SIZE_OVER_LARGEST, CapturedCallable
from sgl_piecewise.runtime.capture.cuda_device import CudaDevice
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.capture.emulated import EmulatedDevice
from sgl_piecewise.runtime.errors import CaptureError, CaptureForbiddenError, OutsideWriteError
from sgl_piecewise.runtime.mark import active_capture

from .coverage import Coverage, FactFinder, facts_of_options
from .inference import examine
from .kinds import DTYPES, SIZE
from .program import Break, Call, Invocation, Program
from .world import World

Arguments = list[torch.Tensor]


@dataclass
class Arm:
    """One way of capturing the program.

    Attributes:
        name: Strategy.
        world: Its module and state.
        captured: What is called.
        remembered: Copied outputs with what they must be, to be compared again at the end.
    """

    name: str
    world: World
    captured: CapturedCallable
    remembered: list[tuple[str, Any, Any]] = field(default_factory=list)


def check_program(program: Program, device: GraphDevice, coverage: Coverage) -> None:
    """Runs one program eager and captured, and raises where they differ; notes what it covered."""
    try:
        with torch.inference_mode() if program.is_inference else torch.no_grad():
            _Comparison(program, device, coverage).run()
    except Exception as error:
        error.add_note(program.source())
        raise


class _Comparison:
    def __init__(self, program: Program, device: GraphDevice, coverage: Coverage) -> None:
        self._program = program
        kind = EmulatedDevice if device.is_emulated else CudaDevice
        device = kind(edits_graphs=program.copies_in_graphs)
        self._device = device
        self._torch_device = device.torch_device
        self._coverage = coverage
        self._finder = FactFinder()
        self._machine = examine(program, self._finder)
        self._facts = self._finder.facts | facts_of_options(program)
        self._eager = self._new_world()
        self._shared_pool = device.new_pool() if program.shares_pool else None

    def run(self) -> None:
        arms = [arm for arm in (self._full(), self._breakable(), self._debug()) if arm is not None]
        for call in self._program.calls:
            self._compare_call(call, arms)
        for arm in arms:
            for what, expected, found in arm.remembered:
                _require_same(f"{arm.name}, {what}, read again at the end", expected, found)
            self._check_fallbacks(arm)
            arm.captured.check_static_addresses()
        self._coverage.add(self._facts, len(arms) * len(self._program.calls))

    def _new_world(self) -> World:
        with torch.inference_mode(False), torch.no_grad():
            return World(self._program, self._torch_device)

    # Capture

    def _full(self) -> Arm | None:
        if self._machine.reads_host:
            self._require_refusal("full", CaptureForbiddenError)
            self._facts.add("full refused a host read")
            return None
        # Full capture bakes what Python reads, so such programs have nothing to compare with.
        return None if self._machine.is_live else self._capture("full")

    def _breakable(self) -> Arm | None:
        if self._machine.raises:
            self._require_refusal("breakable", OutsideWriteError)
            self._facts.add("breakable refused an outside write")
            return None
        arm = self._capture("breakable")
        names = [
            "break_graph" if isinstance(step, Break) else f"mark_{step.mark}"
            for step in self._program.main.steps
            if isinstance(step, Break | Call)
        ]
        for recording in arm.captured.recordings.values():
            assert list(recording.break_names) == names
        return arm

    def _debug(self) -> Arm:
        return self._capture("debug")

    def _require_refusal(self, strategy: str, kind: type[CaptureError]) -> None:
        try:
            self._capture(strategy)
        except kind:
            assert active_capture() is None, "a capture that failed is still active"
        else:
            raise AssertionError(f"{strategy} did not raise {kind.__name__}")

    def _capture(self, strategy: str) -> Arm:
        program, world = self._program, self._new_world()
        largest = program.sizes[-1]
        world.begin_call(0)
        example = self._arguments(Invocation(size=largest, seed=99))
        captured = capture(
            world,
            tuple(example),
            strategy="breakable" if strategy == "debug" else strategy,
            debug=strategy == "debug",
            outputs=program.outputs,
            capture_sizes=None if program.is_fixed else program.sizes,
            dynamic_dims=None if program.is_fixed else self._dynamic_dims(),
            pad_values=self._pad_values(),
            static_tensors=world.state.static_tensors(),
            device=self._device,
            pool=self._shared_pool,
            launch_segments=None if strategy == "debug" else program.launch_segments,
        )
        self._check_capturing_pass(strategy, world, captured, example)
        world.reset()
        self._facts.add(f"{strategy} compared")
        return Arm(name=strategy, world=world, captured=captured)

    def _check_capturing_pass(
        self, strategy: str, world: World, captured: CapturedCallable, example: Arguments
    ) -> None:
        """Warm-up and a launched capture are real executions: state and outputs are as after eager runs."""
        program, build = self._program, captured.build
        assert build is not None
        marks = [program.marks[step.mark] for step in program.main.steps if isinstance(step, Call)]
        stands_in = any(mark.stand_in == "stub" or not build.segments_launched for mark in marks)
        if (strategy == "breakable" and stands_in) or not self._device.is_emulated:
            return  # On CUDA a graph's random numbers may come from elsewhere in the seed's sequence.
        eager, outputs = self._new_world(), None
        eager.begin_call(0)
        # Capture works on a prefix of one flat buffer per input.
        buffers = [argument.reshape(-1).clone() for argument in example]
        for size in reversed(program.sizes):
            for _ in range(1 + build.segments_launched):
                outputs = eager(*self._prefixes(buffers, size))
        (*_, last) = captured.recordings.values()
        if len(program.sizes) == 1 and not program.is_fixed and program.sizes[0] > 1:
            # One more forward told which output dimensions follow the size.
            eager(*self._prefixes(buffers, program.sizes[0] - 1))
        elif build.segments_launched:
            _require_same(f"{strategy}, outputs of the capturing pass", outputs, last.outputs)
        _require_same(f"{strategy}, state after capture", eager.persistent(), world.persistent())
        self._facts.add("capturing pass compared")

    def _prefixes(self, buffers: Arguments, size: int) -> Arguments:
        shapes = [torch.Size(dim.at(size) for dim in one.kind.shape) for one in self._program.inputs]
        return [buffer[: shape.numel()].view(shape) for buffer, shape in zip(buffers, shapes, strict=True)]

    def _pad_values(self) -> dict[str, int | float | bool]:
        return {
            f"v{index}": one.pad
            for index, one in enumerate(self._program.inputs)
            if one.dynamic_dim is not None and not self._program.is_fixed
        }

    def _dynamic_dims(self) -> dict[str, int] | None:
        """Names the dynamic dimensions, unless capture finds just these by itself."""
        largest, inputs = self._program.sizes[-1], self._program.inputs
        if all(
            one.dynamic_dim == (0 if one.kind.shape[0].at(largest) == largest else None) for one in inputs
        ):
            return None
        return {
            f"v{index}": one.dynamic_dim for index, one in enumerate(inputs) if one.dynamic_dim is not None
        }

    # Calls

    def _arguments(self, call: Invocation) -> Arguments:
        """Makes the caller's tensors; the same ones every time it is asked."""
        generator = torch.Generator().manual_seed(1000 + call.seed)
        arguments = []
        with torch.inference_mode(False), torch.no_grad():
            for one in self._program.inputs:
                shape = [dim.at(call.size) for dim in one.kind.shape]
                if one.kind.dtype == "i64":
                    assert one.kind.bound is not None
                    value = torch.randint(0, one.kind.bound.constant, shape, generator=generator)
                else:
                    value = torch.randn(shape, generator=generator)
                    value = value > 0 if one.kind.dtype == "bool" else value
                spacing = (*shape, 2) if call.is_strided else shape
                argument = torch.empty(spacing, dtype=DTYPES[one.kind.dtype], device=self._torch_device)
                argument = argument[..., 1] if call.is_strided else argument
                arguments.append(argument.copy_(value))
        if call.is_same_twice:
            arguments[1] = arguments[0]
        return arguments

    def _padded(self, arguments: Arguments, size: int) -> Arguments:
        padded = []
        with torch.inference_mode(False), torch.no_grad():
            for one, argument in zip(self._program.inputs, arguments, strict=True):
                shape = [dim.at(size) for dim in one.kind.shape]
                value = torch.full(shape, one.pad, dtype=argument.dtype, device=argument.device)
                self._real_rows(one.dynamic_dim, value, argument).copy_(argument)
                padded.append(value)
        return padded

    def _real_rows(self, dim: int | None, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return value if dim is None else value.narrow(dim, 0, like.shape[dim])

    def _run_eager(self, call: Invocation) -> tuple[Any, Arguments]:
        """Returns what padded eager gives, cut to real rows, and its arguments afterwards."""
        program, arguments = self._program, self._arguments(call)
        size = next((size for size in program.sizes if size >= call.size), None)
        self._eager.begin_call(call.seed)
        if size is None:
            return _copied(self._eager(*arguments), None), arguments
        padded = self._padded(arguments, size)
        outputs = _copied(self._eager(*padded), (call.size, self._output_dims()))
        if self._machine.writes_inputs and size != call.size:
            self._facts.add("written input with padding")
        cut = [
            self._real_rows(one.dynamic_dim, value, argument)
            for one, value, argument in zip(program.inputs, padded, arguments, strict=True)
        ]
        return outputs, cut

    def _output_dims(self) -> list[int | None]:
        return [kind.shape.index(SIZE) if SIZE in kind.shape else None for kind in self._machine.output_kinds]

    def _compare_call(self, call: Invocation, arms: list[Arm]) -> None:
        expected, expected_arguments = self._run_eager(call)
        ran = []
        for arm in arms:
            arguments = self._arguments(call)
            arm.world.begin_call(call.seed)
            ran.append((arm, arm.captured(*arguments), arguments))
        _churn(self._torch_device)
        for arm, outputs, arguments in ran:
            what = f"call {call.seed} at size {call.size}"
            _require_same(f"{arm.name}, {what}, outputs", expected, outputs)
            _require_same(f"{arm.name}, {what}, arguments", expected_arguments, arguments)
            _require_same(f"{arm.name}, {what}, state", self._eager.persistent(), arm.world.persistent())
            if self._program.outputs == "copy":
                arm.remembered.append((what, expected, outputs))

    def _check_fallbacks(self, arm: Arm) -> None:
        largest = self._program.sizes[-1]
        over = sum(call.size > largest for call in self._program.calls)
        assert arm.captured.fallbacks == ({SIZE_OVER_LARGEST: over} if over else {}), arm.captured.fallbacks


def _copied(outputs: Any, cut: tuple[int, list[int | None]] | None) -> Any:
    leaves, spec = tree.flatten(outputs)
    size, dims = cut if cut is not None else (0, [])
    tensors = iter(dims)
    copies = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            copies.append(leaf)
            continue
        dim = next(tensors, None)
        copies.append((leaf if dim is None else leaf.narrow(dim, 0, size)).clone())
    return tree.unflatten(spec, copies)


def _churn(device: torch.device) -> None:
    """Takes and gives back memory of many sizes, so that what was freed early holds something else."""
    for num_elements in (1, 4, 16, 64, 256, 1024):
        garbage = [torch.full((num_elements,), 123.0, device=device) for _ in range(4)]
        del garbage
    gc.collect(1)


def _require_same(what: str, expected: Any, found: Any) -> None:
    expected_leaves, expected_spec = tree.flatten(expected)
    found_leaves, found_spec = tree.flatten(found)
    assert expected_spec == found_spec, f"{what}: {tree.difference(expected_spec, found_spec, 'value')}"
    for path, one, other in zip(
        tree.paths(expected_spec, "value"), expected_leaves, found_leaves, strict=True
    ):
        is_same = _same_bits(one, other) if isinstance(one, torch.Tensor) else one == other
        assert is_same, f"{what} differ at {path}:\nexpected {one!r}\n   found {other!r}"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8)
