"""The interface of graph backends: build one shape, ask for it, run it.

A backend decides how a forward is captured and how attention is planned for that. What the forward
computes, and for which batch, is the runner's matter; a backend must not know its runner.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..attention.backend import AttentionBackend
from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import ForwardMode
from ..capture.device import GraphPool
from ..capture.statics import StaticTensorMap
from ..records import BuildRecord

Forward = Callable[[], Any]
"""A forward over tensors at fixed addresses; what it returns is handed out at every replay."""


@dataclass(frozen=True, kw_only=True)
class GraphKey:
    """One shape that a runner captures.

    Attributes:
        mode: The mode whose forwards it serves; others may be padded into it.
        num_requests: Padded requests; None where a graph serves any number.
        num_tokens: Padded tokens.
    """

    mode: ForwardMode
    num_requests: int | None
    num_tokens: int

    def __str__(self) -> str:
        requests = "any requests" if self.num_requests is None else f"{self.num_requests} requests"
        return f"{self.mode.value} {requests} {self.num_tokens} tokens"


@dataclass(kw_only=True)
class BuildLog:
    """What a backend built.

    Attributes:
        records: By shape, of those that have a graph.
        failures: By shape, why it has none.
    """

    records: dict[GraphKey, BuildRecord] = field(default_factory=dict)
    failures: dict[GraphKey, str] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Wall seconds of all builds."""
        return sum(record.total_s for record in self.records.values())


class GraphBackend(abc.ABC):
    """Captures forwards of fixed shapes, and runs them.

    Args:
        pool: The graph pool, shared by all backends of a model runner.
        static_tensors: What graphs read in place, by name; callables return the tensor in use.
        is_debug: Make the whole forward one break.

    Attributes:
        name: Its name in plans and reports.
        log: What was built.
    """

    name: ClassVar[str]

    def __init__(
        self,
        pool: GraphPool,
        static_tensors: StaticTensorMap,
        *,
        is_debug: bool = False,
    ) -> None:
        self.pool = pool
        self.log = BuildLog()
        self._static_tensors = dict(static_tensors)
        self._is_debug = is_debug

    @abc.abstractmethod
    def plan_for_capture(self, attention: AttentionBackend, batch: ForwardBatch) -> None:
        """Plans attention for a forward that is about to be built."""

    @abc.abstractmethod
    def plan_for_run(self, attention: AttentionBackend, batch: ForwardBatch) -> None:
        """Plans attention for a batch that is padded to a built shape."""

    @abc.abstractmethod
    def build(self, key: GraphKey, forward: Forward) -> None:
        """Makes one shape ready; a failure is logged, with its reason, and the shape has no graph."""

    @abc.abstractmethod
    def is_built(self, key: GraphKey) -> bool:
        """Whether the shape can be run."""

    def why_not(self, key: GraphKey) -> str:
        """Returns why a shape is not built, for a reader."""
        return self.log.failures.get(key, "it was not captured, or was freed")

    @abc.abstractmethod
    def run(self, key: GraphKey) -> Any:
        """Runs a built shape.

        Returns:
            What the forward returned; graph-owned where there is a graph: overwritten by the next
            replay on the pool.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Frees what was built; shapes are not built any more. Idempotent."""
