"""The decode runner: requests with equally many tokens each, in graphs of so many requests.

One family of graphs for each mode: DECODE (one token a request), TARGET_VERIFY, DRAFT_EXTEND_V2 and
DLLM_EXTEND (several). An idle rank replays the smallest DECODE graph, so that it meets the others' collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..batch.dummy import dummy_uniform_batch
from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import ForwardMode
from ..batch.padding import IdleShape, pad_batch
from ..batch.real_tokens import TokenLayout
from ..batch.static_buffers import StaticBatchBuffers
from ..capture.captured import ProgressCallback
from ..capture.sizes import padded_size
from ..errors import ConfigError
from ..graph_backends.base import GraphBackend, GraphKey
from .base import GraphRunner, ModelRunnerOutput, RunnerParts
from .compiling import HiddenStates
from .execution import Reason, Refusal
from .logits import logits_of_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeFamily:
    """Graphs of one mode.

    Attributes:
        mode: DECODE, TARGET_VERIFY, DRAFT_EXTEND_V2 or DLLM_EXTEND.
        num_tokens_per_req: Rows of every request.
        sizes: Ascending numbers of requests.
        backend: Where its graphs are.
        hidden_states: The model's forward, compiled or not.
    """

    mode: ForwardMode
    num_tokens_per_req: int
    sizes: tuple[int, ...]
    backend: GraphBackend
    hidden_states: HiddenStates

    @functools.cached_property
    def keys(self) -> dict[int, GraphKey]:
        """Shapes by their number of requests."""
        return {
            size: GraphKey(mode=self.mode, num_requests=size, num_tokens=size * self.num_tokens_per_req)
            for size in self.sizes
        }


class DecodeRunner(GraphRunner):
    """Runs modes of equally many tokens per request.

    Args:
        parts: What every runner works with.
        families: One per mode.
        serves_idle: Whether an idle batch replays a DECODE graph.

    Raises:
        ConfigError: No family, two for one mode, or a mode that graphs cannot serve.
    """

    name = "decode"

    def __init__(self, parts: RunnerParts, families: Sequence[DecodeFamily], *, serves_idle: bool) -> None:
        super().__init__(parts)
        self._families = {family.mode: family for family in families}
        if not families or len(self._families) != len(families):
            raise ConfigError(
                f"The decode runner needs families, one per mode; got {[f.mode.value for f in families]}."
            )
        for mode in self._families:
            if not mode.is_cuda_graph(include_draft_extend_v2=True) or mode.is_idle():
                raise ConfigError(f"The decode runner cannot serve {mode.value}.")
        self._serves_idle = serves_idle
        self.buffers = StaticBatchBuffers(
            max_batch_size=max(family.sizes[-1] for family in families),
            max_num_tokens=max(family.sizes[-1] * family.num_tokens_per_req for family in families),
            pools=parts.batch_runner.kv_translator.pools,
            device=parts.batch_runner.device,
        )

    @property
    def backends(self) -> tuple[GraphBackend, ...]:
        return tuple(family.backend for family in self._families.values())

    def build(self, on_progress: ProgressCallback | None = None) -> None:
        shapes = [(family, size) for family in self._families.values() for size in reversed(family.sizes)]
        shapes.sort(key=lambda shape: -shape[0].keys[shape[1]].num_tokens)
        for index, (family, size) in enumerate(shapes):
            if on_progress is not None:
                on_progress("decode graphs", index, len(shapes))
            dummy = dummy_uniform_batch(
                family.mode,
                self.parts.batch_runner,
                batch_size=size,
                num_tokens_per_req=family.num_tokens_per_req,
            )
            batch = pad_batch(dummy, batch_size=size, storage=self.buffers)
            self._build_one(family.backend, family.keys[size], batch, self._forward_over(family, batch))
        if on_progress is not None:
            on_progress("decode graphs", len(shapes), len(shapes))

    def can_run(self, batch: ForwardBatch) -> Refusal | None:
        mode = batch.forward_mode
        if not mode.is_cuda_graph(include_draft_extend_v2=True):
            return self._refuse(Reason.MODE, mode.value)
        family = self._family(batch)
        if family is None or (mode.is_idle() and not self._serves_idle):
            return self._refuse(Reason.SWITCHED_OFF, f"the plan has no graphs for {mode.value}")
        if not mode.is_idle() and batch.num_tokens_per_req != family.num_tokens_per_req:
            return self._refuse(
                Reason.ROWS_PER_REQUEST,
                f"{batch.num_tokens_per_req} tokens per request, graphs have {family.num_tokens_per_req}",
            )
        if self.parts.token_layout is TokenLayout.RANK_LOCAL:
            return self._refuse(Reason.RANK_LOCAL)
        if batch.batch_size == 0 and not mode.is_idle():
            return self._refuse(Reason.NO_TOKENS)
        size = padded_size(batch.batch_size, family.sizes)
        if size is None:
            return self._refuse(
                Reason.SIZE_OVER_LARGEST,
                f"{batch.batch_size} requests, the largest size is {family.sizes[-1]}",
            )
        if not mode.is_idle() and not self.parts.policy.allows(batch.batch_size, size):
            return self._refuse(Reason.PADDING_TOO_LARGE, f"{batch.batch_size} requests to {size}")
        if not family.backend.is_built(family.keys[size]):
            return self._refuse(Reason.NO_GRAPH, f"size {size}: {family.backend.why_not(family.keys[size])}")
        return None

    def run(self, batch: ForwardBatch) -> ModelRunnerOutput:
        family, key, padded = self._place(batch)
        hidden_TE, logits_TV = self._run_one(family.backend, key, padded)
        return ModelRunnerOutput(
            execution=self._execution(padded, family.backend.name),
            logits=logits_of_rows(padded, hidden_TE, logits_TV),
        )

    def load(self, batch: ForwardBatch) -> Callable[[], Any]:
        family, key, padded = self._place(batch)
        return self._loaded(family.backend, key, padded)

    def _place(self, batch: ForwardBatch) -> tuple[DecodeFamily, GraphKey, ForwardBatch]:
        """Pads a batch into the buffers of its graph."""
        family = self._family(batch)
        size = None if family is None else padded_size(batch.batch_size, family.sizes)
        if family is None or size is None:
            raise ConfigError(f"The decode runner was given what it cannot run: {self.can_run(batch)}.")
        idle_as = None
        if batch.forward_mode.is_idle():
            idle_as = IdleShape(forward_mode=family.mode, num_tokens_per_req=family.num_tokens_per_req)
        padded = pad_batch(batch, batch_size=size, idle_as=idle_as, storage=self.buffers)
        return family, family.keys[size], padded

    def _family(self, batch: ForwardBatch) -> DecodeFamily | None:
        mode = ForwardMode.DECODE if batch.forward_mode.is_idle() else batch.forward_mode
        return self._families.get(mode)

    def _forward_over(self, family: DecodeFamily, batch: ForwardBatch) -> Callable[[], Any]:
        model = self.parts.model

        def forward() -> Any:
            hidden_TE = family.hidden_states(batch.input_ids, batch.positions)
            return hidden_TE, model.compute_logits(hidden_TE)

        return forward
