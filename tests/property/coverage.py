"""What a set of random programs covered: a count for every fact that must not be missing."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

from sgl_piecewise.runtime.capture.device import GraphDevice

from .inference import Scope
from .kinds import SMALLEST, Kind
from .operators import OPERATORS, Operator
from .program import Block, Break, Call, Constant, Mark, Nest, Program, Step, leaves_of, nodes_of

FACTS = (
    # Values and breaks
    "view made before a break and used after it",
    "in-place write to a boundary buffer",
    "in-place write through a view of a boundary buffer",
    "in-place write after a break, seen through a value from before",
    "several consumers of a result",
    "integer result used as an index",
    # Results
    "result is an argument",
    "result is a view of an argument",
    "result is a module's buffer or a view of it",
    "result is a static tensor or a view of it",
    "result is outside memory or a view of it",
    "result is a double buffer that flips",
    "result is expanded or overlaps itself",
    "results share one fresh memory",
    "result is stored outside as well",
    "nested result",
    "tuple result",
    "list result",
    "dict result",
    "dataclass result",
    "None in a result",
    "scalar in a result",
    "integer result",
    "boolean result",
    "bfloat16 result",
    "complex result",
    "lazily conjugated or negated result",
    "lazily conjugated or negated argument",
    "empty result at some size",
    # What marked functions do
    "mark writes through an argument",
    "mark writes through an argument and returns None",
    "mark writes a module's buffer",
    "mark writes a static tensor",
    "mark writes outside memory",
    "mark reads live state",
    "mark reads a value on the host",
    "mark without arguments",
    "arguments in a list",
    "arguments by keyword",
    # Where marks stand
    "mark first",
    "mark last",
    "marks back to back",
    "mark called twice",
    "mark inside a mark",
    "break_graph",
    "no mark at all",
    # Segments
    "segment writes a module's buffer",
    "segment writes a static tensor",
    "segment writes an input",
    "segment writes rows of a static tensor or buffer by index",
    "segment writes an index that it then reads",
    "random numbers in a segment",
    "random numbers in a mark",
    # Capture
    "one size",
    "several sizes",
    "fixed shapes",
    "call between sizes",
    "call over the largest size",
    "size called again after another",
    "written input with padding",
    "dynamic dimension that is not the first",
    "input without a dynamic dimension",
    "caller's tensors not contiguous",
    "one tensor for two inputs",
    "capture_stub",
    "fake",
    "no stand-in",
    "segments launched",
    "segments not launched",
    "launching left to capture",
    "outputs copied",
    "outputs viewed",
    "one pool for all strategies",
    "boundary copies in graphs",
    "boundary copies between graphs",
    "inference mode",
    # What was compared
    "full compared",
    "full refused a host read",
    "breakable compared",
    "breakable refused an outside write",
    "debug compared",
    "capturing pass compared",
)

EMULATED_ONLY = ("capturing pass compared",)


class Coverage:
    """Counts programs by fact.

    Attributes:
        num_programs: Programs so far.
        num_calls: Compared calls so far, all strategies together.
        counts: Programs that a fact is true of.
    """

    def __init__(self) -> None:
        self.num_programs = 0
        self.num_calls = 0
        self.counts: collections.Counter[str] = collections.Counter()

    def add(self, facts: Iterable[str], num_calls: int) -> None:
        """Counts one program."""
        found = set(facts)
        unknown = found.difference(FACTS)
        assert not unknown, f"facts that the table does not know: {sorted(unknown)}"
        self.num_programs += 1
        self.num_calls += num_calls
        self.counts.update(found)

    def missing(self, device: GraphDevice) -> list[str]:
        """Lists what no program did, of what programs on this device can do."""
        impossible = () if device.is_emulated else EMULATED_ONLY
        return [fact for fact in FACTS if not self.counts[fact] and fact not in impossible]

    def table(self) -> str:
        """Returns the counts as text, one fact a line."""
        lines = [
            f"{self.num_programs} programs, {self.num_calls} compared calls; programs by what they cover:"
        ]
        lines += [f"{self.counts[fact] or 'MISSING':>8}  {fact}" for fact in FACTS]
        return "\n".join(lines)


def facts_of_options(program: Program) -> set[str]:
    """Lists what can be told from a program's options and calls."""
    sizes, calls = program.sizes, program.calls
    called = [call.size for call in calls]
    padded = [next((size for size in sizes if size >= real), None) for real in called]
    stand_ins = {mark.stand_in for mark in program.marks}
    truths = {
        "one size": len(sizes) == 1 and not program.is_fixed,
        "several sizes": len(sizes) > 1,
        "fixed shapes": program.is_fixed,
        "call between sizes": any(
            size not in (None, real) for size, real in zip(padded, called, strict=True)
        ),
        "call over the largest size": None in padded,
        "size called again after another": any(
            size in padded[:index] and padded[index - 1] != size for index, size in enumerate(padded)
        ),
        "dynamic dimension that is not the first": any(one.dynamic_dim == 1 for one in program.inputs),
        "input without a dynamic dimension": any(one.dynamic_dim is None for one in program.inputs),
        "caller's tensors not contiguous": any(call.is_strided for call in calls),
        "one tensor for two inputs": any(call.is_same_twice for call in calls),
        "capture_stub": "stub" in stand_ins,
        "fake": "fake" in stand_ins,
        "no stand-in": "none" in stand_ins,
        "segments launched": program.launch_segments is True,
        "segments not launched": program.launch_segments is False,
        "launching left to capture": program.launch_segments is None,
        "outputs copied": program.outputs == "copy",
        "outputs viewed": program.outputs == "view",
        "one pool for all strategies": program.shares_pool,
        "boundary copies in graphs": program.copies_in_graphs,
        "boundary copies between graphs": not program.copies_in_graphs,
        "inference mode": program.is_inference,
    }
    return {fact for fact, is_true in truths.items() if is_true} | _facts_of_places(program.main)


def _facts_of_places(main: Block) -> set[str]:
    """Says where in the captured function the marks stand."""
    steps = main.steps
    is_mark = [isinstance(step, Call) for step in steps]
    marks = [step.mark for step in steps if isinstance(step, Call)]
    truths = {
        "no mark at all": not marks,
        "mark first": bool(marks) and is_mark[0],
        "mark last": bool(marks) and is_mark[-1],
        "marks back to back": any(one and other for one, other in itertools.pairwise(is_mark)),
        "mark called twice": len(marks) > len(set(marks)),
        "break_graph": any(isinstance(step, Break) for step in steps),
    }
    return {fact for fact, is_true in truths.items() if is_true}


def _facts_of_result(mark: Mark) -> set[str]:
    """Says what the structure of a marked function's result is."""
    facts: set[str] = set()
    for node in nodes_of(mark.block.result):
        if isinstance(node, Nest):
            facts.add("dataclass result" if node.container == "data" else f"{node.container} result")
            if any(isinstance(child, Nest) for child in node.children):
                facts.add("nested result")
        elif isinstance(node, Constant):
            facts.add("None in a result" if node.value is None else "scalar in a result")
    return facts


_TARGETS = {
    "input": "segment writes an input",
    "buffer": "segment writes a module's buffer",
    "static": "segment writes a static tensor",
}
_MARK_TARGETS = {
    "buffer": "mark writes a module's buffer",
    "static": "mark writes a static tensor",
    "outside": "mark writes outside memory",
}
_ALIASES = {
    "buffer": "result is a module's buffer or a view of it",
    "static": "result is a static tensor or a view of it",
    "outside": "result is outside memory or a view of it",
}
_DTYPES = {
    "i64": "integer result",
    "bool": "boolean result",
    "bf16": "bfloat16 result",
    "c64": "complex result",
}


class FactFinder:
    """An observer (see ``inference``) that notes the facts of one program.

    Attributes:
        facts: Those found so far.
    """

    def __init__(self) -> None:
        self.facts: set[str] = set()
        self._segment = 0
        self._born: dict[int, int] = {}
        self._views: set[int] = set()
        self._results: dict[int, int] = {}
        self._boundary_roots: set[str] = set()
        self._late_writes: set[str] = set()
        self._index_writes: set[str] = set()
        self._mark_writes: set[str] = set()

    def on_break(self, scope: Scope) -> None:
        if scope.is_captured:
            self._segment += 1

    def on_step(self, scope: Scope, step: Step, op: Operator, kinds: tuple[Kind, ...]) -> None:
        if op.effect == "random":
            where = "segment" if scope.is_captured else "mark"
            self.facts.add(f"random numbers in a {where}")
        if op.is_live:
            self.facts.add("mark reads live state")
        if op.reads_host:
            self.facts.add("mark reads a value on the host")
        if not scope.is_captured:
            if op.effect == "write":
                self._note_mark_write(kinds[0])
            return
        self._note_reads(scope, step.operands, op)
        for target in step.targets:
            self._born[target] = self._segment
            if op.effect == "view":
                self._views.add(target)
        if op.effect == "write":
            self._note_segment_write(step, kinds[0])

    def _note_reads(self, scope: Scope, operands: tuple[int, ...], op: Operator | None) -> None:
        is_write = op is not None and op.effect == "write"
        for position, value in enumerate(operands):
            kind, born = scope.values[value], self._born.get(value, 0)
            if value in self._views and born < self._segment:
                self.facts.add("view made before a break and used after it")
            if kind.roots & self._late_writes and born < self._segment and not (is_write and position == 0):
                self.facts.add("in-place write after a break, seen through a value from before")
            if kind.dtype == "i64" and kind.roots & self._index_writes:
                self.facts.add("segment writes an index that it then reads")
            if value in self._results:
                self._results[value] += 1
                if self._results[value] > 1:
                    self.facts.add("several consumers of a result")
                is_index = op is not None and op.name in _INDEXED and position == _INDEXED[op.name]
                if kind.dtype == "i64" and is_index:
                    self.facts.add("integer result used as an index")

    def _note_segment_write(self, step: Step, target: Kind) -> None:
        if target.roots & self._boundary_roots:
            is_result = step.operands[0] in self._results
            through = "to" if is_result else "through a view of"
            self.facts.add(f"in-place write {through} a boundary buffer")
        if self._born.get(step.operands[0], 0) < self._segment or target.roots & self._boundary_roots:
            self._late_writes |= target.roots
        if target.dtype == "i64":
            self._index_writes |= target.roots
        is_persistent = any(root.startswith(("buffer", "static")) for root in target.roots)
        if is_persistent and step.op in {"index_copy_", "index_put_", "index_add_"}:
            self.facts.add("segment writes rows of a static tensor or buffer by index")
        for root in target.roots:
            fact = _TARGETS.get(root.partition(":")[0])
            if fact is not None:
                self.facts.add(fact)

    def _note_mark_write(self, target: Kind) -> None:
        for root in target.roots:
            fact = _MARK_TARGETS.get(root.partition(":")[0])
            if fact is not None:
                self.facts.add(fact)
        self._mark_writes |= target.roots

    def on_call(self, scope: Scope, mark: Mark, call: Call) -> None:
        if not scope.is_captured:
            self.facts.add("mark inside a mark")
            return
        self._note_reads(scope, call.operands, None)
        self._segment += 1
        self._mark_writes = set()
        self.facts |= _facts_of_result(mark)
        if not call.operands:
            self.facts.add("mark without arguments")
        elif call.packing != "positional":
            self.facts.add("arguments in a list" if call.packing == "list" else "arguments by keyword")

    def on_return(
        self, scope: Scope, mark: Mark, call: Call, params: tuple[Kind, ...], results: list[Kind]
    ) -> None:
        if not scope.is_captured:
            return
        if any(kind.is_conj for kind in params):
            self.facts.add("lazily conjugated or negated argument")
        param_roots = frozenset().union(*(kind.roots for kind in params))
        if param_roots & self._mark_writes:
            self.facts.add("mark writes through an argument")
            self._late_writes |= param_roots & self._mark_writes
            if mark.block.result == Constant(None):
                self.facts.add("mark writes through an argument and returns None")
        if mark.keeps is not None:
            self.facts.add("result is stored outside as well")
        memories: set[frozenset[str]] = set()
        for value, target, kind in zip(leaves_of(mark.block.result), call.targets, results, strict=True):
            self._born[target] = self._segment
            self._results[target] = 0
            self._note_result(kind)
            if value < len(params):
                self.facts.add("result is an argument")
            elif kind.roots & param_roots:
                self.facts.add("result is a view of an argument")
                self._views.add(target)
            elif not any(root.partition(":")[0] in _ALIASES for root in kind.roots):
                self._boundary_roots |= kind.roots
                if kind.roots in memories:
                    self.facts.add("results share one fresh memory")
                memories.add(kind.roots)

    def _note_result(self, kind: Kind) -> None:
        if kind.is_conj:
            self.facts.add("lazily conjugated or negated result")
        if kind.overlaps:
            self.facts.add("result is expanded or overlaps itself")
        if kind.dtype in _DTYPES:
            self.facts.add(_DTYPES[kind.dtype])
        if any(dim.at(SMALLEST) == 0 for dim in kind.shape):
            self.facts.add("empty result at some size")
        for root in kind.roots:
            fact = _ALIASES.get(root.partition(":")[0])
            if fact is not None:
                self.facts.add(fact)
            if root.startswith("outside:flip"):
                self.facts.add("result is a double buffer that flips")


_INDEXED = {"index_select": 1, "index": 1, "gather": 1, "embedding": 0, "index_copy_": 1, "index_put_": 1}
assert set(_INDEXED) <= set(OPERATORS)
