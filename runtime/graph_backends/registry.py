"""Graph backends by name."""

from __future__ import annotations

from ..capture.device import GraphPool
from ..capture.statics import StaticTensorMap
from ..errors import ConfigError, nearest
from .base import GraphBackend
from .captured import BreakableGraphBackend, FullGraphBackend
from .none import NoGraphBackend

GRAPH_BACKENDS: dict[str, type[GraphBackend]] = {
    backend.name: backend for backend in (NoGraphBackend, FullGraphBackend, BreakableGraphBackend)
}
"""Name to class."""


def make_graph_backend(
    name: str,
    pool: GraphPool,
    static_tensors: StaticTensorMap,
    *,
    is_debug: bool = False,
) -> GraphBackend:
    """Returns a new graph backend; arguments as in `GraphBackend`.

    Raises:
        ConfigError: None has this name.
    """
    if name not in GRAPH_BACKENDS:
        raise ConfigError(f"No graph backend is named {name!r}. {nearest(name, GRAPH_BACKENDS)}")
    return GRAPH_BACKENDS[name](pool, static_tensors, is_debug=is_debug)
