"""Hypothesis strategies that draw programs; every program drawn is legal (see ``inference``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from . import operators
from .inference import Machine, Scope, input_kinds
from .kinds import LARGEST, SIZE, IllegalError, Kind, const
from .operators import Operator
from .program import (
    AnyStep,
    Block,
    Break,
    Call,
    Constant,
    Input,
    Invocation,
    Leaf,
    Mark,
    Nest,
    Packing,
    Program,
    Step,
    Tree,
    leaves_of,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]

_INPUTS = (
    Input(kind=Kind(shape=(SIZE, const(4)))),
    Input(kind=Kind(shape=(SIZE,), dtype="i64", bound=const(LARGEST))),
    Input(kind=Kind(shape=(SIZE,), dtype="bool")),
    Input(kind=Kind(shape=(const(4), SIZE))),
    Input(kind=Kind(shape=(const(4),))),
)
_PADS: dict[str, tuple[Any, ...]] = {"f32": (0, 1.5, -2), "i64": (0, 3), "bool": (False, True)}
_CONSTANTS = (None, 3, 0.5, True, "tag")
_CONTAINERS = ("tuple", "list", "dict", "data")
_LONG_CONTAINERS = ("tuple", "list", "dict")
PACKINGS: tuple[Packing, ...] = ("positional", "keyword", "list")
_MAX_TRIES = 3
_NUM_NEAR = 4
_CAPTURED = (
    *("arithmetic", "view", "write", "index", "matrix", "view", "index_write", "cast", "write", "random"),
    *("buffer", "static", "overlap", "complex", "complex_view", "break", "cache"),
)
_BODY = (
    *("arithmetic", "view", "write", "outside", "index", "view", "static", "buffer", "cast", "write", "call"),
    *("live", "random", "overlap", "complex", "complex_view", "index_write", "matrix", "outside", "cache"),
    "half",
)


class BlockBuilder:
    """Draws the steps of one function.

    Args:
        draw: Hypothesis' draw.
        scope: The function's values, parameters defined.
    """

    def __init__(self, draw: Draw, scope: Scope) -> None:
        self._draw = draw
        self._scope = scope
        self._num_params = self._next = len(scope.values)
        self.steps: list[AnyStep] = []

    def draw_steps(self, counts: tuple[int, ...]) -> None:
        """Draws a number of steps; one that cannot stand where it was drawn is left out."""
        categories = _CAPTURED if self._scope.is_captured else _BODY
        for _ in range(self._draw(st.sampled_from(counts))):
            category = self._draw(st.sampled_from(categories))
            if category == "break":
                self.steps.append(Break())
            elif category == "cache":
                self._draw_cache_write()
            elif category == "call":
                self.draw_call()
            else:
                self._draw_step(operators.GROUPS[category])

    def _targets(self, count: int) -> tuple[int, ...]:
        self._next += count
        return tuple(range(self._next - count, self._next))

    def _draw_step(
        self, table: tuple[Operator, ...], focus: tuple[int, ...] = (), *, position: int = 0
    ) -> None:
        """Draws a step with one of some operators; with ``focus``, one operand is among these values."""
        scope, draw = self._scope, self._draw
        kinds = {value: scope.read(value) for value in reversed(scope.usable())}
        near = dict(list(kinds.items())[:_NUM_NEAR])
        pool = near if not focus and draw(st.booleans()) else kinds
        fitting: list[tuple[Operator, list[list[int]]]] = []
        for op in table:
            if op.is_body_only and scope.is_captured:
                continue
            candidates = [[value for value, kind in pool.items() if test(kind)] for test in op.tests]
            if focus:
                candidates[position] = [value for value in candidates[position] if value in focus]
            if all(candidates):
                fitting.append((op, candidates))
        for _ in range(_MAX_TRIES if fitting else 0):
            op, candidates = draw(st.sampled_from(fitting))
            operands = tuple(draw(st.sampled_from(values)) for values in candidates)
            literals = tuple(draw(st.sampled_from(choices)) for choices in op.choices)
            targets = self._append(op, operands, literals)
            if targets is None:
                continue
            following = operators.ROWS_OF if op.effect == "held" else operators.CONJ
            if (op.effect == "held" or op.name in {"complex", "conj"}) and draw(st.booleans()):
                self._draw_step(following, targets)
            return

    def _append(
        self, op: Operator, operands: tuple[int, ...], literals: tuple[int | float, ...] = ()
    ) -> tuple[int, ...] | None:
        """Appends a step and returns its targets, or None if it is illegal."""
        try:
            results = self._scope.infer(op, operands, literals)
        except IllegalError:
            return None
        targets = self._targets(len(results))
        step = Step(op=op.name, operands=operands, targets=targets, literals=literals)
        self._scope.apply(step)
        self.steps.append(step)
        return targets

    def _draw_cache_write(self) -> None:
        """Draws what a KV cache does: rows go where an index says, in order or not."""
        scope, draw = self._scope, self._draw
        wide = [value for value in reversed(scope.usable()) if _is_row_of_table(scope.read(value))]
        if not wide:
            return
        rows = draw(st.sampled_from(wide))
        if draw(st.booleans()):
            index = self._append(operators.OPERATORS["arange"], (rows,))
        else:
            column = self._append(operators.OPERATORS["select_last"], (rows,))
            index = column and self._append(operators.OPERATORS["sort_rows"], column)
        cache = self._append(draw(st.sampled_from(operators.CACHES)), ())
        if index and cache:
            self._append(draw(st.sampled_from(operators.ROW_WRITES)), (*cache, index[-1], rows))

    # Marked calls

    def draw_call(self) -> None:
        """Draws a marked call; often followed by a write to one of its results."""
        marks, before = self._scope.machine.marks, self._next
        is_captured = self._scope.is_captured
        if is_captured and (not marks or self._draw(st.sampled_from((True, False, True)))):
            self._call_new_mark()
        elif marks:
            self._call_again(self._draw(st.integers(0, len(marks) - 1)))
        results = tuple(range(before, self._next))
        if is_captured and results and self._draw(st.booleans()):
            self._use_results(results)

    def _use_results(self, results: tuple[int, ...]) -> None:
        """Draws what is most likely to go wrong: writes, views and indices of a call's results."""
        scope = self._scope
        copies = tuple(value for value in results if scope.values[value].copied_at is not None)
        indices = tuple(value for value in results if scope.values[value].dtype == "i64")
        if copies and scope.machine.may_raise:
            self._draw_step(operators.GROUPS["write"], copies)
        if indices and self._draw(st.booleans()):
            self._draw_step(operators.TAKES, indices, position=1)
        elif self._draw(st.booleans()):
            before = self._next
            self._draw_step(operators.GROUPS["view"], results)
            results = tuple(range(before, self._next)) or results
        self._draw_step(operators.GROUPS["write"], results)

    def _call_new_mark(self) -> None:
        draw, scope = self._draw, self._scope
        machine = scope.machine
        values = list(reversed(scope.usable()))
        count = draw(st.sampled_from((1, 2, 3, 1, 2, 0)))
        operands = tuple(draw(st.sampled_from(values)) for _ in range(count))
        params = tuple(scope.read(value) for value in operands)
        before = machine.snapshot()
        builder = BlockBuilder(draw, Scope(machine, params, is_captured=False))
        builder.draw_steps((2, 3, 4, 5, 1, 6))
        block = builder.finish()
        mark = Mark(
            params=tuple((kind.shape, kind.dtype) for kind in params),
            block=block,
            stand_in=draw(st.sampled_from(("none", "stub", "none", "fake"))),
            keeps=self._draw_keeps(leaves_of(block.result)),
        )
        machine.restore(before)
        packing = draw(st.sampled_from(PACKINGS))
        if mark.keeps is None or not self._try_call_new(mark, operands, packing):
            self._try_call_new(dataclasses.replace(mark, keeps=None), operands, packing)

    def _draw_keeps(self, leaves: list[int]) -> int | None:
        if not leaves or self._draw(st.sampled_from((True, True, False))):
            return None
        return self._draw(st.integers(0, len(leaves) - 1))

    def _try_call_new(self, mark: Mark, operands: tuple[int, ...], packing: Packing) -> bool:
        machine = self._scope.machine
        before = machine.snapshot()
        machine.marks = [*before.marks, mark]
        if self._try_call(len(before.marks), operands, packing):
            return True
        machine.restore(before)
        return False

    def _call_again(self, index: int) -> None:
        scope = self._scope
        kinds = {value: scope.read(value) for value in reversed(scope.usable())}
        candidates = [
            [value for value, kind in kinds.items() if (kind.shape, kind.dtype) == wanted]
            for wanted in scope.machine.marks[index].params
        ]
        if all(candidates):
            operands = tuple(self._draw(st.sampled_from(values)) for values in candidates)
            self._try_call(index, operands, self._draw(st.sampled_from(PACKINGS)))

    def _try_call(self, index: int, operands: tuple[int, ...], packing: Packing) -> bool:
        """Appends a call, unless it is illegal: then nothing has changed."""
        scope = self._scope
        result = scope.machine.marks[index].block.result
        targets = tuple(range(self._next, self._next + len(leaves_of(result))))
        call = Call(mark=index, operands=operands, targets=targets, packing=packing)
        before, values = scope.machine.snapshot(), dict(scope.values)
        try:
            scope.call(call)
        except IllegalError:
            scope.machine.restore(before)
            scope.values = values
            return False
        self._next += len(targets)
        self.steps.append(call)
        return True

    def finish(self) -> Block:
        """Draws the result."""
        scope = self._scope
        values = list(reversed(scope.usable()))
        if scope.is_captured:
            values = [value for value in values if scope.values[value].can_be_output]
        num_leaves = self._draw(st.sampled_from((2, 3, 4, 5, 1) if scope.is_captured else (1, 2, 3, 1, 0, 2)))
        tree = _draw_tree(self._draw, values, num_leaves)
        return Block(num_params=self._num_params, steps=tuple(self.steps), result=tree)


def _is_row_of_table(kind: Kind) -> bool:
    return kind.dtype == "f32" and kind.shape == (SIZE, const(4))


def _draw_tree(draw: Draw, values: list[int], num_leaves: int) -> Tree:
    pool = values[:_NUM_NEAR] if draw(st.booleans()) else values
    leaves: list[Tree] = [Leaf(draw(st.sampled_from(pool))) for _ in range(num_leaves if values else 0)]
    if not leaves:
        return Constant(draw(st.sampled_from((None, None, *_CONSTANTS))))
    if len(leaves) == 1 and draw(st.booleans()):
        return leaves[0]
    if draw(st.booleans()):
        leaves.append(Constant(draw(st.sampled_from(_CONSTANTS))))
    if len(leaves) > 1 and draw(st.booleans()):
        inner = Nest(draw(st.sampled_from(_CONTAINERS)), tuple(leaves[-2:]))
        leaves[-2:] = [inner]
    container = draw(st.sampled_from(_CONTAINERS if len(leaves) <= 2 else _LONG_CONTAINERS))
    return Nest(container, tuple(leaves))


def _draw_inputs(draw: Draw) -> tuple[Input, ...]:
    more = draw(st.lists(st.sampled_from(_INPUTS), max_size=3))
    chosen = [_INPUTS[0], *more]
    return tuple(
        dataclasses.replace(one, pad=draw(st.sampled_from(_PADS[one.kind.dtype])))
        if one.dynamic_dim is not None
        else one
        for one in chosen
    )


def _draw_calls(draw: Draw, largest: int, is_fixed: bool, can_be_same: bool) -> tuple[Invocation, ...]:
    sizes = [largest] if is_fixed else [*range(1, largest + 1), *range(1, largest + 2)]
    return tuple(
        Invocation(
            size=draw(st.sampled_from(sizes)),
            seed=seed,
            is_strided=draw(st.booleans()),
            is_same_twice=can_be_same and draw(st.booleans()),
        )
        for seed in range(draw(st.integers(3, 6)))
    )


@st.composite
def programs(draw: Draw) -> Program:
    """Draws a program, its sizes, its calls and the options of its capture."""
    inputs = _draw_inputs(draw)
    machine = Machine(may_raise=draw(st.sampled_from((False,) * 6 + (True,))))
    builder = BlockBuilder(draw, Scope(machine, input_kinds(inputs), is_captured=True))
    for _ in range(draw(st.sampled_from((2, 3, 1, 4, 2, 0)))):
        builder.draw_steps((2, 3, 4, 1, 0))
        builder.draw_call()
    builder.draw_steps((2, 4, 3, 1, 0))
    main = builder.finish()
    sizes = tuple(sorted(draw(st.lists(st.integers(1, LARGEST - 1), min_size=1, max_size=4, unique=True))))
    is_fixed = len(sizes) == 1 and draw(st.booleans())
    can_be_same = len(inputs) > 1 and inputs[1].kind == inputs[0].kind and not machine.writes_inputs
    launch: tuple[bool | None, ...] = (None, True)
    if all(mark.stand_in != "none" for mark in machine.marks):
        launch = (None, False, True)
    outputs = draw(st.sampled_from(("copy", "view")))
    return Program(
        inputs=inputs,
        marks=tuple(machine.marks),
        main=main,
        sizes=sizes,
        is_fixed=is_fixed,
        calls=_draw_calls(draw, sizes[-1], is_fixed, can_be_same),
        outputs=outputs,
        launch_segments=draw(st.sampled_from(launch)),
        shares_pool=outputs == "copy" and draw(st.booleans()),
        copies_in_graphs=draw(st.booleans()),
        is_inference=draw(st.sampled_from((False, False, True))),
    )
