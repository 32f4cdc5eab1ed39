"""Follows kinds through a program: what is legal, and what capture has to say to it.

The generator asks before every step; the same rules, run once more over the finished program, tell the
comparison what to expect. What the contract leaves open is illegal here, so that every program has one answer:

- A marked function returned outside memory, so captured code holds a copy, and a marked function then writes
  to the original: whoever reads the copy afterwards would be stale.
- A marked function is handed such a copy and writes into it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Protocol

from .kinds import IllegalError, Kind
from .operators import OPERATORS, Literal, Operator
from .program import Block, Call, Input, Mark, Program, Step, leaves_of


class Observer(Protocol):
    """Is told what the program does; see ``coverage``."""

    def on_break(self, scope: Scope) -> None: ...

    def on_step(self, scope: Scope, step: Step, op: Operator, kinds: tuple[Kind, ...]) -> None: ...

    def on_call(self, scope: Scope, mark: Mark, call: Call) -> None: ...

    def on_return(
        self, scope: Scope, mark: Mark, call: Call, params: tuple[Kind, ...], results: list[Kind]
    ) -> None: ...


@dataclass
class Machine:
    """What all scopes of one program share.

    Attributes:
        marks: The marked functions that there are.
        may_raise: Whether captured code may write into a copy of outside memory.
        raises: Whether it does.
        is_live: Whether a body uses Python state, so that full capture bakes it.
        reads_host: Whether a body does what a graph cannot hold.
        writes_inputs: Whether an input is written.
        clock: Counts effects.
        num_roots: Counts memories.
        kept: Memories that a body also stored outside.
        outside_written: When a body last wrote to outside memory.
        index_written: Memories of indices that were written, so their elements may repeat.
        output_kinds: Of the program's tensors, once it ended.
        observer: Is told of everything; None while generating.
    """

    marks: list[Mark] = field(default_factory=list)
    may_raise: bool = False
    raises: bool = False
    is_live: bool = False
    reads_host: bool = False
    writes_inputs: bool = False
    clock: int = 0
    num_roots: int = 0
    kept: frozenset[str] = frozenset()
    outside_written: dict[str, int] = field(default_factory=dict)
    index_written: frozenset[str] = frozenset()
    output_kinds: tuple[Kind, ...] = ()
    observer: Observer | None = None

    def snapshot(self) -> Machine:
        return dataclasses.replace(self, outside_written=dict(self.outside_written))

    def restore(self, earlier: Machine) -> None:
        self.__dict__.update(earlier.snapshot().__dict__)

    def is_outside(self, kind: Kind) -> bool:
        return any(root.startswith("outside") or root in self.kept for root in kind.roots)

    def is_stale(self, kind: Kind) -> bool:
        return kind.copied_at is not None and any(
            self.outside_written.get(root, -1) > kind.copied_at for root in kind.roots
        )


class Scope:
    """The values of one running function.

    Attributes:
        machine: Shared state.
        values: Kinds by number.
        is_captured: False inside a marked function.
    """

    def __init__(self, machine: Machine, params: tuple[Kind, ...], *, is_captured: bool) -> None:
        self.machine = machine
        self.values: dict[int, Kind] = dict(enumerate(params))
        self.is_captured = is_captured
        self.roots_before = machine.num_roots

    def usable(self) -> list[int]:
        """Returns the values that may be read now."""
        return [value for value, kind in self.values.items() if not self.machine.is_stale(kind)]

    def read(self, value: int) -> Kind:
        """Returns a value's kind as of now.

        Raises:
            IllegalError: It is a stale copy.
        """
        kind = self.values[value]
        if self.machine.is_stale(kind):
            raise IllegalError("a copy of memory that was written since")
        if kind.is_unique and kind.roots & self.machine.index_written:
            return dataclasses.replace(kind, is_unique=False)
        return kind

    def infer(
        self, op: Operator, operands: tuple[int, ...], literals: tuple[Literal, ...]
    ) -> tuple[Kind, ...]:
        """Returns the kinds of a step's results; changes nothing.

        Raises:
            IllegalError: The step may not stand here.
        """
        if op.is_body_only and self.is_captured:
            raise IllegalError("only inside a marked function")
        kinds = tuple(self.read(value) for value in operands)
        if not all(test(kind) for test, kind in zip(op.tests, kinds, strict=True)):
            raise IllegalError("operands do not fit")
        if op.effect == "write":
            self._check_write(operands, kinds)
        return op.infer(kinds, literals)

    def _check_write(self, operands: tuple[int, ...], kinds: tuple[Kind, ...]) -> None:
        target = kinds[0]
        for value, kind in zip(operands[1:], kinds[1:], strict=True):
            if value != operands[0] and kind.roots & target.roots:
                raise IllegalError("source and target may overlap")
        if target.copied_at is not None:
            if not self.is_captured or not target.is_exact or not target.is_never_empty:
                raise IllegalError("a write into a copy that may go unnoticed")
            if not self.machine.may_raise:
                raise IllegalError("this program does not raise")

    def apply(self, step: Step) -> None:
        """Takes a step's effects; raises as ``infer`` does."""
        machine, op = self.machine, OPERATORS[step.op]
        results = self.infer(op, step.operands, step.literals)
        kinds = tuple(self.read(value) for value in step.operands)
        machine.clock += 1
        machine.is_live |= op.is_live
        machine.reads_host |= op.reads_host
        if op.effect == "write":
            self._note_write(kinds[0])
        for target, kind in zip(step.targets, results, strict=True):
            self.values[target] = kind if kind.roots else self._in_new_memory(kind)
        if machine.observer is not None:
            machine.observer.on_step(self, step, op, kinds)

    def _in_new_memory(self, kind: Kind) -> Kind:
        self.machine.num_roots += 1
        return dataclasses.replace(kind, roots=frozenset({f"fresh:{self.machine.num_roots}"}))

    def _note_write(self, target: Kind) -> None:
        machine = self.machine
        machine.writes_inputs |= any(root.startswith("input") for root in target.roots)
        if target.dtype == "i64":
            machine.index_written |= target.roots
        if target.copied_at is not None:
            machine.raises = True
        elif not self.is_captured and machine.is_outside(target):
            machine.outside_written.update(dict.fromkeys(target.roots, machine.clock))

    def call(self, call: Call) -> None:
        """Takes the effects of a marked call.

        Raises:
            IllegalError: The body may not run on these operands; the machine has to be restored.
        """
        machine, mark = self.machine, self.machine.marks[call.mark]
        params = tuple(self.read(value) for value in call.operands)
        if machine.observer is not None:
            machine.observer.on_call(self, mark, call)
        body = Scope(machine, params, is_captured=False)
        body.run(mark.block)
        results = [body.read(value) for value in leaves_of(mark.block.result)]
        machine.clock += 1
        if mark.keeps is not None:
            kept = results[mark.keeps].roots
            if not all(root.startswith("fresh:") and int(root[6:]) > body.roots_before for root in kept):
                raise IllegalError("only memory that the body made is kept")
            machine.is_live = True
            machine.kept |= kept
        for target, kind in zip(call.targets, results, strict=True):
            is_copy = self.is_captured and machine.is_outside(kind)
            copied_at = machine.clock if is_copy and kind.copied_at is None else kind.copied_at
            self.values[target] = dataclasses.replace(kind, copied_at=copied_at)
        if machine.observer is not None:
            machine.observer.on_return(self, mark, call, params, results)

    def run(self, block: Block) -> None:
        """Takes the effects of a whole block; raises as ``call`` does."""
        for step in block.steps:
            if isinstance(step, Step):
                self.apply(step)
            elif isinstance(step, Call):
                self.call(step)
            elif self.machine.observer is not None:
                self.machine.observer.on_break(self)


def input_kinds(inputs: tuple[Input, ...]) -> tuple[Kind, ...]:
    """Returns the kinds of the captured function's parameters, each in memory of its own."""
    return tuple(
        dataclasses.replace(parameter.kind, roots=frozenset({f"input:{index}"}))
        for index, parameter in enumerate(inputs)
    )


def examine(program: Program, observer: Observer | None = None) -> Machine:
    """Follows a finished program; what it does is in the machine afterwards."""
    machine = Machine(marks=list(program.marks), may_raise=True, observer=observer)
    scope = Scope(machine, input_kinds(program.inputs), is_captured=True)
    scope.run(program.main)
    machine.output_kinds = tuple(scope.read(value) for value in leaves_of(program.main.result))
    return machine
