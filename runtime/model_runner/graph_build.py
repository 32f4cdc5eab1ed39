"""What graphs took to build, kept as an input to capacity planning."""

from __future__ import annotations

from dataclasses import dataclass

from ..graph_backends.base import GraphBackend, GraphKey
from ..kv.capacity import CapacityCheck


@dataclass(frozen=True, kw_only=True)
class GraphBuild:
    """Time and memory of all graphs of a model runner.

    Attributes:
        total_s: Wall seconds.
        num_graphs: Shapes that have a graph.
        pool_bytes: What the graph pool holds.
        driver_bytes: What the driver took beside the allocator; None where the device does not say.
        failures: Shapes without a graph, and why.
        capacity: The estimate beside what was measured.
    """

    total_s: float
    num_graphs: int
    pool_bytes: int
    driver_bytes: int | None
    failures: dict[str, str]
    capacity: CapacityCheck


def count_graphs(backends: tuple[GraphBackend, ...]) -> int:
    """Returns how many shapes have a graph."""
    return sum(len(backend.log.records) for backend in backends)


def collect_failures(backends: tuple[GraphBackend, ...]) -> dict[str, str]:
    """Returns why shapes have no graph, by shape."""
    failures: dict[GraphKey, str] = {}
    for backend in backends:
        failures |= backend.log.failures
    return {str(key): reason for key, reason in failures.items()}
