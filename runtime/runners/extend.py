"""The extend runner: new tokens of prompts and decoding requests, in graphs of so many tokens.

Between breaks a graph depends on the number of tokens alone, so it serves any number of requests.
Captured whole it has a fixed number of request slots as well; unused ones are requests of length
zero. EXTEND and MIXED share graphs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..batch.dummy import dummy_extend_batch
from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import ForwardMode
from ..batch.padding import pad_batch
from ..batch.real_tokens import TokenLayout
from ..batch.static_buffers import StaticBatchBuffers
from ..capture.captured import ProgressCallback
from ..capture.sizes import padded_size
from ..errors import ConfigError
from ..graph_backends.base import GraphBackend, GraphKey
from .base import GraphRunner, ModelRunnerOutput, RunnerParts, forward_logits
from .compiling import HiddenStates
from .execution import Reason, Refusal

GRAPH_MODE = ForwardMode.EXTEND
"""The mode of its graphs; a MIXED batch is an extend to everything below."""

EXTEND_MODES = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED})


class ExtendRunner(GraphRunner):
    """Runs ragged modes.

    Args:
        parts: What every runner works with.
        modes: Those that it serves, of EXTEND and MIXED.
        sizes: Ascending numbers of tokens.
        backend: Where its graphs are.
        hidden_states: The model's forward, compiled or not.
        request_slots: Requests in every graph; None where graphs serve any number.
        max_requests: Requests of the largest batch.

    Raises:
        ConfigError: A mode is not ragged, or the slots are too few for the largest size.
    """

    name = "extend"

    def __init__(
        self,
        parts: RunnerParts,
        *,
        modes: frozenset[ForwardMode],
        sizes: tuple[int, ...],
        backend: GraphBackend,
        hidden_states: HiddenStates,
        request_slots: int | None,
        max_requests: int,
    ) -> None:
        super().__init__(parts)
        strange = modes - EXTEND_MODES
        if strange or not modes:
            raise ConfigError(
                f"The extend runner serves EXTEND and MIXED, not {sorted(mode.value for mode in strange)}."
            )
        least = -(-sizes[-1] // parts.max_context)
        if request_slots is not None and request_slots < least:
            raise ConfigError(
                f"request_slots is {request_slots}, and {sizes[-1]} tokens need at least {least} requests of "
                f"{parts.max_context} tokens."
            )
        self._modes = modes
        self._sizes = sizes
        self._backend = backend
        self._hidden_states = hidden_states
        self._slots = request_slots
        self.buffers = StaticBatchBuffers(
            max_batch_size=max(max_requests, request_slots or 0, least),
            max_num_tokens=sizes[-1],
            pools=parts.batch_runner.kv_translator.pools,
            device=parts.batch_runner.device,
        )

    @property
    def backends(self) -> tuple[GraphBackend, ...]:
        return (self._backend,)

    def build(self, on_progress: ProgressCallback | None = None) -> None:
        for index, size in enumerate(reversed(self._sizes)):
            if on_progress is not None:
                on_progress("extend graphs", index, len(self._sizes))
            dummy = dummy_extend_batch(
                GRAPH_MODE, self.parts.batch_runner, num_tokens=size, max_context=self.parts.max_context
            )
            batch = self._pad(dummy, size)
            self._build_one(self._backend, self._key(size), batch, functools.partial(self._hidden, batch))
        if on_progress is not None:
            on_progress("extend graphs", len(self._sizes), len(self._sizes))

    def can_run(self, batch: ForwardBatch) -> Refusal | None:
        mode = batch.forward_mode
        if mode not in EXTEND_MODES:
            return self._refuse(Reason.MODE, mode.value)
        if mode not in self._modes:
            return self._refuse(Reason.SWITCHED_OFF, f"the plan has no graphs for {mode.value}")
        if self.parts.reads_requests:
            return self._refuse(Reason.REQUEST_READS)
        if self.parts.token_layout is TokenLayout.RANK_LOCAL:
            return self._refuse(Reason.RANK_LOCAL)
        if batch.num_tokens == 0:
            return self._refuse(Reason.NO_TOKENS)
        size = padded_size(batch.num_tokens, self._sizes)
        if size is None:
            return self._refuse(
                Reason.SIZE_OVER_LARGEST, f"{batch.num_tokens} tokens, the largest size is {self._sizes[-1]}"
            )
        if self._slots is not None and batch.batch_size > self._slots:
            return self._refuse(Reason.TOO_MANY_REQUESTS, f"{batch.batch_size} requests, {self._slots} slots")
        if not self.parts.policy.allows(batch.num_tokens, size):
            return self._refuse(Reason.PADDING_TOO_LARGE, f"{batch.num_tokens} tokens to {size}")
        if not self._backend.is_built(self._key(size)):
            return self._refuse(Reason.NO_GRAPH, f"size {size}: {self._backend.why_not(self._key(size))}")
        return None

    def run(self, batch: ForwardBatch) -> ModelRunnerOutput:
        size = self._size(batch)
        padded = self._pad(batch, size)
        hidden_TE = self._run_one(self._backend, self._key(size), padded)
        return ModelRunnerOutput(
            execution=self._execution(padded, self._backend.name),
            logits=forward_logits(self.parts, padded, hidden_TE),
        )

    def load(self, batch: ForwardBatch) -> Callable[[], Any]:
        size = self._size(batch)
        return self._loaded(self._backend, self._key(size), self._pad(batch, size))

    def _size(self, batch: ForwardBatch) -> int:
        size = padded_size(batch.num_tokens, self._sizes)
        if size is None:
            raise ConfigError(f"The extend runner was given what it cannot run: {self.can_run(batch)}.")
        return size

    def _key(self, size: int) -> GraphKey:
        return GraphKey(mode=GRAPH_MODE, num_requests=self._slots, num_tokens=size)

    def _pad(self, batch: ForwardBatch, size: int) -> ForwardBatch:
        padded = pad_batch(batch, batch_size=self._slots, num_tokens=size, storage=self.buffers)
        if padded.forward_mode is GRAPH_MODE:
            return padded
        return dataclasses.replace(padded, forward_mode=GRAPH_MODE)

    def _hidden(self, batch: ForwardBatch) -> torch.Tensor:
        return self._hidden_states(batch.input_ids, batch.positions)
