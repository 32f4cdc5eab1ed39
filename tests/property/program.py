"""Random programs as data: blocks of steps and marked calls, with nested results, printable as Python."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .kinds import Kind, Shape
from .operators import OPERATORS

Container = Literal["tuple", "list", "dict", "data"]
StandIn = Literal["none", "stub", "fake"]
Packing = Literal["positional", "keyword", "list"]


@dataclass
class Pair:
    """A dataclass for results."""

    left: Any
    right: Any = None


@dataclass(frozen=True)
class Leaf:
    """A tensor in a result."""

    value: int


@dataclass(frozen=True)
class Constant:
    """None, a number or a string in a result."""

    value: bool | int | float | str | None


@dataclass(frozen=True)
class Nest:
    """A container in a result."""

    container: Container
    children: tuple[Tree, ...]


Tree = Leaf | Constant | Nest


def leaves_of(tree: Tree) -> list[int]:
    """Returns the values in a result, in the order of flattening."""
    if isinstance(tree, Leaf):
        return [tree.value]
    if isinstance(tree, Nest):
        return [value for child in tree.children for value in leaves_of(child)]
    return []


def nodes_of(tree: Tree) -> Iterator[Tree]:
    """Yields every node of a result."""
    yield tree
    if isinstance(tree, Nest):
        for child in tree.children:
            yield from nodes_of(child)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operator: ``targets = operator(operands)``."""

    op: str
    operands: tuple[int, ...]
    targets: tuple[int, ...] = ()
    literals: tuple[int | float, ...] = ()

    def text(self, names: list[str]) -> str:
        return OPERATORS[self.op].text.format(
            *names, **dict(zip("ab", map(repr, self.literals), strict=False))
        )


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a marked function; ``targets`` are the tensors of its result."""

    mark: int
    operands: tuple[int, ...]
    targets: tuple[int, ...] = ()
    packing: Packing = "positional"


@dataclass(frozen=True, kw_only=True)
class Break:
    """``break_graph()``."""


AnyStep = Step | Call | Break


def uses_of(step: AnyStep) -> tuple[int, ...]:
    return () if isinstance(step, Break) else step.operands


@dataclass(frozen=True, kw_only=True)
class Block:
    """The body of a function; values are numbered, parameters first."""

    num_params: int
    steps: tuple[AnyStep, ...]
    result: Tree

    @functools.cached_property
    def dead_after(self) -> tuple[tuple[int, ...], ...]:
        """Per step the values that nothing needs any more: ``del`` frees graph memory, as locals that end do."""
        alive = set(leaves_of(self.result))
        dead: list[tuple[int, ...]] = []
        for step in reversed(self.steps):
            targets = () if isinstance(step, Break) else step.targets
            last = {value for value in (*uses_of(step), *targets) if value not in alive}
            dead.append(tuple(sorted(last)))
            alive |= last
        return tuple(reversed(dead))


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A marked function.

    Attributes:
        params: Shape and element type of each parameter.
        block: Its body.
        stand_in: What it offers capture instead of the body.
        keeps: Index of a result tensor that the body also stores outside, or None.
    """

    params: tuple[tuple[Shape, str], ...]
    block: Block
    stand_in: StandIn = "none"
    keeps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Input:
    """A parameter of the program.

    Attributes:
        kind: Its kind; the extent that is the size is dynamic.
        pad: What padded rows hold.
    """

    kind: Kind
    pad: int | float | bool = 0

    @property
    def dynamic_dim(self) -> int | None:
        moving = [dim for dim, extent in enumerate(self.kind.shape) if not extent.is_constant]
        return moving[0] if moving else None


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One call of the captured program.

    Attributes:
        size: Real size.
        seed: For inputs, live state and random operators.
        is_strided: The caller's tensors are not contiguous.
        is_same_twice: The first two inputs are one tensor.
    """

    size: int
    seed: int
    is_strided: bool = False
    is_same_twice: bool = False


@dataclass(frozen=True, kw_only=True)
class Program:
    """All that one example needs.

    Attributes:
        inputs: Parameters of ``main``.
        marks: Marked functions; a later one may call an earlier one.
        main: The captured function.
        sizes: Ascending capture sizes.
        is_fixed: Captured without sizes, at the largest.
        calls: What it is called with, in order.
        outputs: ``copy`` or ``view``.
        launch_segments: For ``capture``.
        shares_pool: All strategies capture into one pool.
        copies_in_graphs: On the emulated device, boundary copies are part of the graphs.
        is_inference: Under ``inference_mode``, else ``no_grad``.
    """

    inputs: tuple[Input, ...]
    marks: tuple[Mark, ...]
    main: Block
    sizes: tuple[int, ...]
    is_fixed: bool = False
    calls: tuple[Invocation, ...] = ()
    outputs: Literal["copy", "view"] = "copy"
    launch_segments: bool | None = None
    shares_pool: bool = False
    copies_in_graphs: bool = False
    is_inference: bool = False

    def source(self) -> str:
        """Returns the program as Python."""
        lines: list[str] = []
        for index, mark in enumerate(self.marks):
            stand_in = {"none": "", "stub": "(capture_stub=...)", "fake": "(fake=...)"}[mark.stand_in]
            lines += [f"@eager_on_graph{stand_in}", *_function(f"mark_{index}", mark.block, mark.keeps, self)]
        lines += _function("main", self.main, None, self)
        for index, parameter in enumerate(self.inputs):
            extents = ", ".join(
                f"{dim.per_size or ''}{'S' if dim.per_size else dim.constant}" for dim in parameter.kind.shape
            )
            lines.append(f"# v{index}: {parameter.kind.dtype}[{extents}] padded with {parameter.pad!r}")
        options = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name not in {"inputs", "marks", "main", "calls"}
        )
        lines.append(f"# {options}")
        return "\n".join([*lines, *(f"# {call}" for call in self.calls)])

    def __repr__(self) -> str:
        return f"<program\n{self.source()}\n>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis prints examples through this; the source is in the failure already."""
        printer.text("<program above>")


def _function(name: str, block: Block, keeps: int | None, program: Program) -> list[str]:
    params = ", ".join(f"v{index}" for index in range(block.num_params))
    lines = [f"def {name}({params}):"]
    for step, dead in zip(block.steps, block.dead_after, strict=True):
        lines.append("    " + _statement(step, program))
        if dead:
            lines.append("    del " + ", ".join(f"v{value}" for value in dead))
    if keeps is not None:
        lines.append(f"    state.kept[{name!r}] = v{leaves_of(block.result)[keeps]}")
    return [*lines, f"    return {_expression(block.result)}", ""]


def _statement(step: AnyStep, program: Program) -> str:
    if isinstance(step, Break):
        return "break_graph()"
    names = [f"v{value}" for value in step.operands]
    targets = ", ".join(f"v{value}" for value in step.targets)
    if isinstance(step, Step):
        text = step.text(names)
        return f"{targets} = {text}" if targets else text
    if step.packing == "list":
        arguments = f"[{', '.join(names)}]"
    elif step.packing == "keyword":
        arguments = ", ".join(f"v{index}={name}" for index, name in enumerate(names))
    else:
        arguments = ", ".join(names)
    call = f"mark_{step.mark}({arguments})"
    if not targets:
        return call
    is_plain = isinstance(program.marks[step.mark].block.result, Leaf)
    return f"{targets} = {call}" if is_plain else f"{targets}, = leaves({call})"


def _expression(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        return f"v{tree.value}"
    if isinstance(tree, Constant):
        return repr(tree.value)
    children = [_expression(child) for child in tree.children]
    if tree.container == "list":
        return f"[{', '.join(children)}]"
    if tree.container == "dict":
        return "{" + ", ".join(f"'k{index}': {child}" for index, child in enumerate(children)) + "}"
    if tree.container == "data":
        return f"Pair({', '.join(children)})"
    return f"({', '.join(children)},)"
