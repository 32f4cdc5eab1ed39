"""Takes out what a mark's ``fake`` left in the graph, where nothing uses it.

Tracing learned the result's shape from these nodes; running them would allocate a tensor per mark. No other
node goes, used or not: an in-place write has no users either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from sgl_piecewise.runtime.mark_operator import SHAPE_ONLY


def drop_shape_only(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
    """Erases unused nodes that only gave shapes.

    Args:
        gm: A traced forward; changed in place.
        example_inputs: Not used.

    Returns:
        The same module.
    """
    num_erased = 0
    for node in reversed(gm.graph.nodes):
        if node.meta.get(SHAPE_ONLY) and not node.users:
            gm.graph.erase_node(node)
            num_erased += 1
    if num_erased:
        gm.graph.lint()
        gm.recompile()
    return gm
