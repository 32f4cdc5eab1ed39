"""The public face: one mark, one capture engine, and a comparison that says which strategy wins."""

from sgl_piecewise.comparison import compare
from sgl_piecewise.compiler.layer_sharing import compile_layers_once
from sgl_piecewise.entry import capture
from sgl_piecewise.runtime.capture.breakable import BreakableCUDAGraph, BreakableCUDAGraphCapture
from sgl_piecewise.runtime.capture.on_call import capture_stats
from sgl_piecewise.runtime.mark import break_graph, eager_on_graph

__all__ = [
    "BreakableCUDAGraph",
    "BreakableCUDAGraphCapture",
    "break_graph",
    "capture",
    "capture_stats",
    "compare",
    "compile_layers_once",
    "eager_on_graph",
]
