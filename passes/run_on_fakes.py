"""What a graph does when it runs: its operators one by one, on fake tensors, under the node they come from.

Checks and estimates look at operators as PyTorch's dispatcher gets them, because what a node calls may be made
of several. Values are dropped after their last use, as the graph's own code does, so memory can be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_piecewise.runtime import torch_private, torch_private_compiling

Observer = Callable[[Node, Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called after each operator with the node, the operator, its arguments and its result."""


def run_on_fakes(
    gm: GraphModule,
    inputs: Sequence[Any],
    observe: Observer,
    *,
    after_node: Callable[[Node], None] | None = None,
    shown_whole: Collection[str] = (),
) -> Any:
    """Runs a graph on fake inputs.

    Args:
        gm: A piece, or any graph.
        inputs: Fake tensors and numbers of one trace, or real ones outside of any trace.
        observe: Sees every operator.
        after_node: Called when a node has run and values that nobody needs any more are gone.
        shown_whole: Names of composite operators that are shown as they are, as in ``aten::linear``.

    Returns:
        The graph's outputs.
    """
    with torch_private_compiling.on_fake_tensors_of(inputs) as fakes, _Watch(observe, shown_whole) as watch:
        return _NodeByNode(gm, watch, after_node).run(*fakes)


class _Watch(TorchDispatchMode):
    """Shows every operator to an observer, those inside composite ones instead of these."""

    def __init__(self, observe: Observer, shown_whole: Collection[str]) -> None:
        super().__init__()
        self.node: Node | None = None
        self._observe = observe
        self._shown_whole = shown_whole

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch_private.is_overload(func) and func.namespace == "prim":
            return func(*args, **kwargs)  # A fake tensor asked for its device or layout.
        if (
            not torch_private.is_higher_order(func)
            and torch_private.is_composite(func)
            and func._schema.name not in self._shown_whole
        ):
            with torch_private.reentered(self):
                return torch_private.call_composite(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.node is not None:
            self._observe(self.node, func, args, kwargs, result)
        return result


class _NodeByNode(Interpreter):
    def __init__(self, gm: GraphModule, watch: _Watch, after_node: Callable[[Node], None] | None) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self._watch = watch
        self._after_node = after_node

    def run_node(self, n: Node) -> Any:
        self._watch.node = n
        result = super().run_node(n)
        self._watch.node = None
        if self._after_node is not None:
            self._after_node(n)
        return result
