"""Graphs from the one capture engine: a whole forward, or segments between breaks.

Both are `capture` with another capture strategy. They differ in how attention is planned: inside a graph
its launches follow from sizes, and plan buffers are rewritten in place before each replay; as a
break it is planned like an eager forward.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from ..attention.backend import AttentionBackend
from ..batch.forward_batch import ForwardBatch
from ..capture.captured import CapturedCallable
from ..capture.device import GraphPool
from ..capture.entry import capture
from ..capture.statics import StaticTensorMap
from .base import Forward, GraphBackend, GraphKey

_logger = logging.getLogger(__name__)


class CapturedGraphBackend(GraphBackend):
    """Keeps one captured callable per shape; abstract."""

    name: ClassVar[str]

    def __init__(
        self,
        pool: GraphPool,
        static_tensors: StaticTensorMap,
        *,
        is_debug: bool = False,
    ) -> None:
        super().__init__(pool, static_tensors, is_debug=is_debug)
        self.graphs: dict[GraphKey, CapturedCallable] = {}

    def build(self, key: GraphKey, forward: Forward) -> None:
        try:
            captured = capture(
                forward,
                strategy=self.name,
                outputs="view",
                pool=self.pool,
                static_tensors=self._static_tensors,
                debug=self._is_debug,
            )
        except RuntimeError as error:  # What capture, the device and user code raise when it cannot be.
            self._note_failure(key, f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return
        assert captured.build is not None
        error_text = captured.build.sizes[0].error
        if error_text is not None:
            self._note_failure(key, error_text)
            return
        self.graphs[key] = captured
        self.log.records[key] = captured.build

    def _note_failure(self, key: GraphKey, reason: str) -> None:
        _logger.warning("no %s graph for %s, such batches run eager: %s", self.name, key, reason)
        self.log.failures[key] = reason

    def is_built(self, key: GraphKey) -> bool:
        return key in self.graphs

    def run(self, key: GraphKey) -> Any:
        return self.graphs[key]()

    def reset(self) -> None:
        for captured in self.graphs.values():
            captured.reset()
        self.graphs.clear()


class FullGraphBackend(CapturedGraphBackend):
    """One graph for the whole forward, attention included."""

    name = "full"

    def plan_for_capture(self, attention: AttentionBackend, batch: ForwardBatch) -> None:
        attention.plan_for_capture(batch)

    def plan_for_run(self, attention: AttentionBackend, batch: ForwardBatch) -> None:
        attention.plan_for_replay(batch)


class BreakableGraphBackend(CapturedGraphBackend):
    """Graph segments between marked calls; attention is one of those."""

    name = "breakable"

    def plan_for_capture(self, attention: AttentionBackend, batch: ForwardBatch) -> None:
        attention.plan(batch)

    def plan_for_run(self, attention: AttentionBackend, batch: ForwardBatch) -> None:
        attention.plan(batch)
