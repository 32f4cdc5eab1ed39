"""Runs a random program as an ordinary function on tensors, with the state that it reads and writes."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sgl_piecewise import break_graph, eager_on_graph
from sgl_piecewise.runtime import tree

from .kinds import LARGEST
from .operators import OPERATORS
from .program import Block, Call, Constant, Leaf, Mark, Pair, Program, Step, Tree

_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "dict": lambda children: {f"k{index}": child for index, child in enumerate(children)},
    "data": lambda children: Pair(*children),
}


@functools.cache
def compiled(text: str, num_operands: int) -> Callable[..., Any]:
    """Compiles a step's text, with operands named ``v0``, ``v1``, ...."""
    params = ", ".join(["self", "state", *(f"v{index}" for index in range(num_operands))])
    scope: dict[str, Any] = {"torch": torch, "F": F}
    if "] = " in text:
        target, source = text.split(" = ")
        base, index = target.removesuffix("]").split("[")
        text = f"{base}.__setitem__({index}, {source})"
    function: Callable[..., Any] = eval(f"lambda {params}: {text}", scope)
    return function


@dataclass(frozen=True, kw_only=True)
class Live:
    """State that is swapped between calls."""

    scale: float
    shift: torch.Tensor


class State:
    """What lives outside the captured module.

    Attributes:
        cache: Registered with ``static_tensors``, as ``slots`` is.
        outside: Registered nowhere.
        live: Swapped before every call.
        kept: Results that marked functions stored.
    """

    def __init__(self, device: torch.device) -> None:
        self.cache = torch.empty(LARGEST, 4, device=device)
        self.slots = torch.empty(LARGEST, dtype=torch.long, device=device)
        self.outside = torch.empty(LARGEST, 4, device=device)
        self.live: Live | None = None
        self.kept: dict[str, torch.Tensor] = {}
        self._buffers = [torch.empty(LARGEST, 4, device=device) for _ in range(2)]
        self._turn = 0

    def flip(self) -> torch.Tensor:
        """Returns the other one of two buffers."""
        self._turn = 1 - self._turn
        return self._buffers[self._turn]

    def static_tensors(self) -> dict[str, torch.Tensor]:
        return {"cache": self.cache, "slots": self.slots}

    def named(self) -> dict[str, torch.Tensor]:
        """Returns all tensors of the state, kept results last."""
        held = {"outside": self.outside, "flip_0": self._buffers[0], "flip_1": self._buffers[1]}
        return self.static_tensors() | held | self.kept

    def forget(self) -> None:
        self._turn = 0
        self.kept.clear()


class World(torch.nn.Module):
    """A program with its own module and state; calling it runs the program.

    Args:
        program: What to run.
        device: Where.
    """

    weight: torch.Tensor
    gain: torch.Tensor
    table: torch.Tensor
    counts: torch.Tensor

    def __init__(self, program: Program, device: torch.device) -> None:
        super().__init__()
        self.program = program
        self.state = State(device)
        self.register_buffer("weight", torch.empty(4, 4, device=device))
        self.register_buffer("gain", torch.empty(4, device=device))
        self.register_buffer("table", torch.empty(LARGEST, 4, device=device))
        self.register_buffer("counts", torch.empty(LARGEST, dtype=torch.long, device=device))
        self._marks = [self._marked(index, mark) for index, mark in enumerate(program.marks)]
        self.reset()
        signature = ", ".join(f"v{index}" for index in range(len(program.inputs)))
        self.forward = types.MethodType(  # type: ignore[method-assign]
            eval(f"lambda self, {signature}: self.run_main([{signature}])"), self
        )

    def reset(self) -> None:
        """Gives every tensor its first contents, in place."""
        generator = torch.Generator().manual_seed(0)
        self.state.forget()
        for tensor in self.persistent().values():
            if tensor.dtype is torch.long:
                tensor.copy_(torch.randint(0, LARGEST, tensor.shape, generator=generator))
            else:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.5)

    def persistent(self) -> dict[str, torch.Tensor]:
        """Returns what outlives a call, by name."""
        return dict(self.named_buffers()) | self.state.named()

    def begin_call(self, seed: int) -> None:
        """Swaps the live state and seeds random numbers."""
        torch.manual_seed(seed)
        device = self.weight.device
        self.state.live = Live(scale=0.5 + seed % 3, shift=torch.full((4,), float(seed % 5), device=device))

    def run_main(self, arguments: list[torch.Tensor]) -> Any:
        return self._run(self.program.main, arguments)

    def _run(self, block: Block, arguments: list[torch.Tensor], *, is_stand_in: bool = False) -> Any:
        """Runs a block; a value is dropped after its last use, as locals of a function that returned are."""
        values = dict(enumerate(arguments))
        arguments.clear()
        for step, dead in zip(block.steps, block.dead_after, strict=True):
            if isinstance(step, Step):
                run = self._stand_in_step if is_stand_in else self._step
                values.update(run(step, [values[value] for value in step.operands]))
            elif isinstance(step, Call):
                values.update(self._call(step, [values[value] for value in step.operands], is_stand_in))
            else:
                break_graph()
            for value in dead:
                values.pop(value, None)
        return _build(block.result, values)

    # Steps

    def _step(self, step: Step, operands: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        text = step.text([f"v{index}" for index in range(len(operands))])
        result = compiled(text, len(operands))(self, self.state, *operands)
        if not step.targets:
            return {}
        results = (result,) if len(step.targets) == 1 else result
        return dict(zip(step.targets, results, strict=True))

    def _stand_in_step(self, step: Step, operands: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gives results of the right form: aliases stay aliases, fresh ones hold zeros, nothing is written.

        Operands may hold undefined memory, so indices are replaced before they are used.
        """
        effect = OPERATORS[step.op].effect
        if effect == "write":
            return {}
        if effect in {"view", "held"}:
            return self._step(step, operands)
        safe = [
            operand if operand.is_floating_point() or operand.is_complex() else torch.zeros_like(operand)
            for operand in operands
        ]
        results = self._step(step, safe)
        for result in results.values():
            result.zero_()
        return results

    # Marked functions

    def _call(self, call: Call, operands: list[torch.Tensor], is_stand_in: bool) -> dict[int, torch.Tensor]:
        if is_stand_in:
            result = self._body(call.mark, operands, is_stand_in=True)
        elif call.packing == "list":
            result = self._marks[call.mark](operands)
        elif call.packing == "keyword":
            result = self._marks[call.mark](
                **{f"v{index}": operand for index, operand in enumerate(operands)}
            )
        else:
            result = self._marks[call.mark](*operands)
        operands.clear()
        tensors = [leaf for leaf in tree.flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        return dict(zip(call.targets, tensors, strict=True))

    def _marked(self, index: int, mark: Mark) -> Callable[..., Any]:
        def body(*args: Any, **kwargs: Any) -> Any:
            return self._body(index, _unpacked(args, kwargs), is_stand_in=False)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return self._body(index, _unpacked(args, kwargs), is_stand_in=True)

        body.__qualname__ = f"mark_{index}"
        if mark.stand_in == "stub":
            return eager_on_graph(capture_stub=stand_in)(body)  # type: ignore[no-any-return]
        if mark.stand_in == "fake":
            return eager_on_graph(fake=stand_in)(body)  # type: ignore[no-any-return]
        return eager_on_graph(body)

    def _body(self, index: int, operands: list[torch.Tensor], *, is_stand_in: bool) -> Any:
        mark = self.program.marks[index]
        result = self._run(mark.block, operands, is_stand_in=is_stand_in)
        if mark.keeps is not None:
            tensors = [leaf for leaf in tree.flatten(result)[0] if isinstance(leaf, torch.Tensor)]
            self.state.kept[f"mark_{index}"] = tensors[mark.keeps]
        return result


def _unpacked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    if len(args) == 1 and isinstance(args[0], list):
        return list(args[0])
    return [*args, *kwargs.values()]


def _build(node: Tree, values: dict[int, torch.Tensor]) -> Any:
    if isinstance(node, Leaf):
        return values[node.value]
    if isinstance(node, Constant):
        return node.value
    return _CONTAINERS[node.container]([_build(child, values) for child in node.children])
