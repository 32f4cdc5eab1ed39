"""No graph: the forward runs as it is, over the same padded buffers. The reference for the others."""

from __future__ import annotations

from typing import Any

from ..attention.backend import AttentionBackend
from ..batch.forward_batch import ForwardBatch
from ..capture.device import GraphPool
from ..capture.statics import StaticTensorMap
from .base import Forward, GraphBackend, GraphKey


class NoGraphBackend(GraphBackend):
    """Padded eager: what graphs at equal padded size are compared with, bit for bit."""

    name = "none"

    def __init__(
        self,
        pool: GraphPool,
        static_tensors: StaticTensorMap,
        *,
        is_debug: bool = False,
    ) -> None:
        super().__init__(pool, static_tensors, is_debug=is_debug)
        self._forwards: dict[GraphKey, Forward] = {}

    def plan_for_capture(self, attention: AttentionBackend, batch: ForwardBatch) -> None:
        attention.plan(batch)

    def plan_for_run(self, attention: AttentionBackend, batch: ForwardBatch) -> None:
        attention.plan(batch)

    def build(self, key: GraphKey, forward: Forward) -> None:
        self._forwards[key] = forward

    def is_built(self, key: GraphKey) -> bool:
        return key in self._forwards

    def run(self, key: GraphKey) -> Any:
        return self._forwards[key]()

    def reset(self) -> None:
        self._forwards.clear()
