"""The public face: one mark, one capture engine, and a comparison that says which strategy wins."""

from sgl_piecewise.runtime.mark import break_graph, eager_on_graph

__all__ = ["break_graph", "eager_on_graph"]
