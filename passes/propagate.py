"""Gives every node of a graph its example value again, after a pass changed what values look like."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Interpreter, Node

from sgl_piecewise.runtime import torch_private_compiling


def propagate(gm: GraphModule) -> None:
    """Runs a graph on the example values of its inputs and notes what each node gives.

    Args:
        gm: A traced forward; the ``meta`` of its nodes changes.

    Raises:
        RuntimeError: An operator does not accept what the pass made; nodes before it have changed.
        ValueError: The same, as some operators say it.
    """
    inputs = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
    examples = torch_private_compiling.example_inputs(inputs)
    with torch_private_compiling.on_fake_tensors_of(examples) as fakes:
        _Propagator(gm).run(*fakes)


class _Propagator(Interpreter):
    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = result
        return result
