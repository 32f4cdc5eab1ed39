"""Graphs for a model that was only compiled: the facts of its flat inputs, and the forward that captures itself.

Used by the backend. What is captured when is the business of `runtime.capture.on_call`, which does not know
that its forward was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sgl_piecewise.runtime import torch_private_compiling, torch_private_graph_inputs, torch_private_sizes
from sgl_piecewise.runtime.capture.call_policy import CallPolicy
from sgl_piecewise.runtime.capture.flat_inputs import InputFacts
from sgl_piecewise.runtime.capture.on_call import OnCallCapture
from sgl_piecewise.runtime.mark_handles import has_handle

from .layer_runner import LayerRunner, watching_layers
from .padding import padding_of, reach_of_padding
from .written_inputs import writes_of

# Why a whole forward has no graph: keys of ``CallStats.without_graph``.
SEVERAL_DEVICES = "tensors_on_several_devices"
HOST_WORK = "computes_on_the_host"
HOST_INPUT = "host_tensor_input"
UNKNOWN_INPUT = "input_is_no_tensor_or_number"
RESHAPED_INPUT = "changes_the_shape_of_an_input"


class DropIn:
    """What is found out before the pieces are compiled, to be used afterwards.

    Args:
        split: The split forward.
        policy: What to capture.

    Raises:
        ConfigError: ``dynamic_dims`` says what a named input cannot have.

    Attributes:
        mode: How to capture, or None where nothing is.
    """

    def __init__(self, split: GraphModule, policy: CallPolicy) -> None:
        self._policy = policy
        devices = _devices(split)
        self.mode = policy.mode_on(devices)
        if self.mode is not None:
            self._facts = input_facts(split, devices)
            self._reached = reach_of_padding(split, self._facts, policy)
            self._held = [*split.parameters(), *split.buffers()]

    def wrap(
        self, forward: Callable[..., Any], split: GraphModule, runner: LayerRunner | None = None
    ) -> Callable[..., Any]:
        """Returns the forward as Dynamo is to call it.

        Args:
            forward: The compiled one.
            split: The graph of it, when all pieces are compiled: compilers add to what is known of sizes.
            runner: Of its shared layers, if there are any.

        Raises:
            ConfigError: ``dynamic_dims`` or ``pad_values`` say what a named input cannot have.
        """
        if self.mode is None:
            return forward
        captured = OnCallCapture(
            forward,
            self._facts,
            mode=self.mode,
            policy=self._policy,
            padding=padding_of(split, self._facts, self._policy, self._reached),
            name=f"compile {torch_private_compiling.compile_name()}",
            held=self._held,
            is_borrowed=has_handle,
        )
        if runner is None:
            return captured.entry()
        return watching_layers(captured.entry(), runner, captured.forget_recordings)


def input_facts(split: GraphModule, devices: Sequence[torch.device]) -> InputFacts:
    """Sorts the inputs of a split forward.

    Args:
        split: Pieces and marked calls, before the pieces are compiled.
        devices: Of all its tensors but handles.
    """
    accelerators = [device for device in devices if device.type != "cpu"]
    device = accelerators[0] if accelerators else torch.device("cpu")
    inputs = [node for node in split.graph.nodes if node.op == "placeholder"]
    refusal = SEVERAL_DEVICES if len(accelerators) > 1 else None
    if device.type != "cpu" and any(
        _is_host_tensor(node) for node in split.graph.nodes if node not in inputs
    ):
        refusal = HOST_WORK
    static, copied, keyed, varying, known = [], [], [], [], set()
    for index, node in enumerate(inputs):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            if torch_private_graph_inputs.is_handle_input(node):
                static.append(index)
            elif device.type != "cpu" and value.device.type == "cpu" and not value.dim():
                keyed.append(index)
            elif torch_private_graph_inputs.is_static_input(node):
                static.append(index)
            elif value.device.type != device.type:
                refusal = HOST_INPUT
            else:
                copied.append(index)
        elif isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool):
            keyed.append(index)
            known |= torch_private_sizes.free_symbols(value)
        else:
            refusal = UNKNOWN_INPUT
    for index in copied:
        symbols = torch_private_sizes.free_symbols(inputs[index].meta["example_value"])
        if symbols - known:
            varying.append(index)
    writes = writes_of(split)
    if writes.reshaped:
        refusal = RESHAPED_INPUT
    return InputFacts(
        device=device,
        static=tuple(static),
        copied=tuple(copied),
        keyed=tuple(keyed),
        are_integers=all(_is_integer(inputs[index].meta["example_value"]) for index in keyed),
        varying=tuple(varying),
        written=frozenset(writes.written).difference(keyed),
        refusal=refusal,
    )


def _is_integer(value: Any) -> bool:
    return type(value) in (int, torch.SymInt)


def _devices(split: GraphModule) -> list[torch.device]:
    """Lists the devices of a forward's tensors, handles left out."""
    found: dict[torch.device, None] = {}
    for node in _nodes(split):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and not torch_private_graph_inputs.is_handle_input(node):
            found[value.device] = None
    return list(found)


def _nodes(split: GraphModule) -> list[Node]:
    pieces = [module for module in split.children() if isinstance(module, GraphModule)]
    return [node for module in (split, *pieces) for node in module.graph.nodes]


def _is_host_tensor(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() > 0
