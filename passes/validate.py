"""Finds what no graph can hold in a split forward: host reads, data-dependent shapes, copies from host memory.

A forward that is never captured may do all of that, so nothing is refused here. The findings stand in the
module's ``meta``; the compiled forward raises them when a capture calls it, before anything is recorded.
Marked calls are not looked into: they run outside graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sgl_piecewise.runtime import torch_private, torch_private_compiling, torch_private_graph_inputs, tree
from sgl_piecewise.runtime.capture.emulated.rules import CaptureRefusal, refusal_of
from sgl_piecewise.runtime.capture.user_code import UserLine, traced_user_line
from sgl_piecewise.runtime.errors import CaptureForbiddenError
from sgl_piecewise.runtime.mark_operator import is_marked_call

from .run_on_fakes import run_on_fakes
from .split_at_marks import pieces_of

FINDINGS = "sgl_piecewise_findings"
"""Key of the findings in the ``meta`` of a validated module."""

_HOST = "it hands values to the host, which would have to wait for work that is only written down"
_TO_HOST = (
    "it copies from the device to the host, which would have to wait for work that is only written down"
)
_FROM_HOST = (
    "it copies from pageable host memory to the device, which CUDA refuses during capture, and a replay would not "
    "see other values"
)
_SEED = "CUDA refuses to read or set a generator's state during capture: the seed belongs to the replay"
_ARRAY = "it brings host memory into the graph, which a replay would not see change"
_NUMBER = "it differed from call to call or dynamic=True made it a variable, and the graph would read it on the host"
_NOT_A_NUMBER = (
    "Pass it as a tensor on the device, or let it be a constant: compile without dynamic=True and call with one "
    "value, or set torch._dynamo.config.specialize_float = True."
)
_BEFORE = "Do it before the capture, or in a function marked @eager_on_graph."

# What never reaches the dispatcher, or not on every device.
_METHODS: dict[Any, str] = dict.fromkeys(("cpu", "numpy", "tolist", "pin_memory"), _HOST)
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((torch.manual_seed, torch.seed, torch.initial_seed), _SEED),
    **dict.fromkeys((torch.get_rng_state, torch.set_rng_state), _SEED),
    **dict.fromkeys((torch.from_numpy, torch.frombuffer, torch.asarray, torch.from_dlpack), _ARRAY),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a graph cannot hold.

    Attributes:
        what: The operator or call.
        why: The reason.
        remedy: What to do instead.
        line: Where it stands in the user's source.
        piece: The piece it is in, or None where it stands between pieces.
        is_host_data: Whether it brings numbers of the source to the device, which a compiler may bake into its code.
    """

    what: str
    why: str
    remedy: str
    line: UserLine
    piece: str | None
    is_host_data: bool = False

    def __str__(self) -> str:
        return f"{self.line}: {self.what} cannot be captured: {self.why}. {self.remedy}"


def validate(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Notes what of a split forward no graph can hold.

    Args:
        gm: A split module; only its ``meta`` changes.
        example_inputs: Not used: every node carries its own example.

    Returns:
        The same module, with a tuple of `Finding` in ``gm.meta[FINDINGS]``.
    """
    found: dict[tuple[str, str, str], Finding] = {}
    pieces = pieces_of(gm)
    checked: set[str] = set()
    for node in gm.graph.nodes:
        if node.op == "call_module":
            name = str(node.target)
            if name in pieces and name not in checked:
                checked.add(name)
                numbers = [torch_private_graph_inputs.number_of_caller(used) for used in _inputs_of(node)]
                _check(pieces[name], _examples(node), name, found, numbers)
        elif node.op in ("call_function", "call_method") and not _is_plumbing(node):
            _check(_alone(gm, node), _examples(node), None, found)
    gm.meta[FINDINGS] = tuple(found.values())
    return gm


def refuse_findings(findings: Sequence[Finding]) -> None:
    """Raises for what a capture must not meet.

    Raises:
        CaptureForbiddenError: There are findings; the message names all of them.
    """
    if not findings:
        return
    lines = "\n".join(f"  {one}" for one in findings)
    count = "1 thing" if len(findings) == 1 else f"{len(findings)} things"
    raise CaptureForbiddenError(
        f"The compiled forward has {count} that a graph cannot hold; nothing was captured.\n{lines}\nWithout capture "
        "it runs as it is."
    )


def _examples(node: Node) -> list[Any]:
    """Returns what the node's inputs were in the trace, to be used outside of it: its sizes as numbers if it can be."""
    values = [used.meta.get("example_value") for used in _inputs_of(node)]
    at_hints = torch_private_compiling.examples_at_hints(values)
    return torch_private_compiling.example_inputs(values) if at_hints is None else at_hints


def _inputs_of(node: Node) -> list[Any]:
    if node.op == "call_module":
        return [used for used in node.args if isinstance(used, Node)]
    return node.all_input_nodes


def _is_plumbing(node: Node) -> bool:
    """Results taken apart, and arithmetic of sizes: nothing that reaches the device."""
    if is_marked_call(node.target):
        return True
    if node.target is operator.getitem and not isinstance(
        node.args[0].meta.get("example_value"),  # type: ignore[union-attr]
        torch.Tensor,
    ):
        return True
    return all(
        not isinstance(used.meta.get("example_value"), torch.Tensor) for used in node.all_input_nodes
    ) and bool(node.all_input_nodes)


def _alone(gm: GraphModule, node: Node) -> GraphModule:
    """Returns a graph of one node."""
    graph = torch.fx.Graph()
    inputs = {used: graph.placeholder(f"input_{index}") for index, used in enumerate(node.all_input_nodes)}
    graph.node_copy(node, lambda used: inputs[used])
    graph.output(())
    return GraphModule(gm, graph)


def _check(
    piece: GraphModule,
    examples: list[Any],
    name: str | None,
    found: dict[tuple[str, str, str], Finding],
    numbers: Sequence[str | None] = (),
) -> None:
    def note(node: Node, refusal: CaptureRefusal, is_host_data: bool = False) -> None:
        line = traced_user_line(node.stack_trace)
        found.setdefault(
            (line.place, refusal.what, refusal.why),
            Finding(
                what=refusal.what,
                why=refusal.why,
                remedy=refusal.remedy,
                line=line,
                piece=name,
                is_host_data=is_host_data,
            ),
        )

    on_device = any(isinstance(one, torch.Tensor) and one.device.type != "cpu" for one in examples)

    def observe(node: Node, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not torch_private.is_overload(func):
            return
        if func._schema.name == "aten::_local_scalar_dense":
            for example, number in zip(examples, numbers, strict=False):
                if number is not None and args[0] is example:
                    what = f"The number {number!r}"
                    note(node, CaptureRefusal(what=what, why=_NUMBER, remedy=_NOT_A_NUMBER))
                    return
        refusal = _crossing(func, args, kwargs, result) if on_device else None
        is_lift = func._schema.name == "aten::lift_fresh"
        if refusal is None and not (on_device and is_lift):
            refusal = refusal_of(func, args, kwargs)
        if refusal is not None:
            note(node, refusal, is_lift or refusal.why == _FROM_HOST)

    for node in piece.graph.nodes:
        for refusal in _calls_refused(node):
            note(node, refusal)
    run_on_fakes(piece, examples, observe)


def _calls_refused(node: Node) -> Iterator[CaptureRefusal]:
    """Yields what is known by the call itself."""
    if node.op == "call_method":
        why = _METHODS.get(str(node.target))
        if why is not None:
            yield CaptureRefusal(what=f"Tensor.{node.target}()", why=why, remedy=_BEFORE)
        target = node.kwargs.get("device", node.args[1] if len(node.args) > 1 else None)
        if node.target == "to" and isinstance(target, str) and target.partition(":")[0] == "cpu":
            yield CaptureRefusal(
                what='Tensor.to("cpu")', why=_HOST, remedy=f"{_BEFORE} A torch.device is accepted."
            )
    elif node.op == "call_function":
        why = _FUNCTIONS.get(node.target)
        if why is not None:
            name = getattr(node.target, "__name__", str(node.target))
            yield CaptureRefusal(what=f"torch.{name}()", why=why, remedy=_BEFORE)


def _crossing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> CaptureRefusal | None:
    """Copies between host and device; a host scalar as an operand is baked and harmless."""
    sources = [one for one in tree.flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    results = [one for one in tree.flatten(result)[0] if isinstance(one, torch.Tensor)]
    name = func._schema.name
    if name == "aten::copy_":
        results, sources = sources[:1], sources[1:]
    is_copy = name in ("aten::copy_", "aten::_to_copy")
    is_waited_for = not kwargs.get("non_blocking", False)
    for source in sources:
        if (source.dim() == 0 and not is_copy) or source.numel() == 0:
            continue
        for target in results:
            if source.device.type == target.device.type:
                continue
            if target.device.type == "cpu" and is_copy:
                return CaptureRefusal(what=str(func), why=_TO_HOST, remedy=_BEFORE)
            if source.device.type == "cpu" and (is_waited_for or not is_copy):
                return CaptureRefusal(what=str(func), why=_FROM_HOST, remedy=_BEFORE)
    return None
