"""The interface of runners, and what those with graphs share.

A runner says whether it can take a batch, with a reason where it cannot, and runs it. It owns the
static buffers of its batches; graphs are its backend's. All runners answer alike, so whoever
dispatches knows none of them. This module must not know how a forward is captured.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..attention.backend import AttentionBackend
from ..batch.forward_batch import BatchRunner, ForwardBatch
from ..batch.real_tokens import RealTokens, TokenLayout
from ..capture.captured import ProgressCallback
from ..context import ForwardContext, use_forward_context
from ..graph_backends.base import GraphBackend, GraphKey
from .execution import Execution, Reason, Refusal, execution_of
from .logits import ForwardLogits, logits_of_ragged, logits_of_rows
from .padding_policy import PaddingPolicy
from .served_model import ServedModel


@dataclass(frozen=True, kw_only=True, eq=False)
class RunnerParts:
    """What every runner works with.

    Attributes:
        model: The model.
        batch_runner: Who batches are made for.
        max_context: Tokens of the longest request.
        attention_for: The attention backend of a batch, by its mode.
        policy: The bound on padding.
        token_multiple: Every forward's tokens are a multiple of this (the tensor-parallel size).
        token_layout: How rows are divided among ranks.
        reads_requests: Whether the model reads hidden states by request (pooling).
    """

    model: ServedModel
    batch_runner: BatchRunner
    max_context: int
    attention_for: Callable[[ForwardBatch], AttentionBackend]
    policy: PaddingPolicy
    token_multiple: int = 1
    token_layout: TokenLayout = TokenLayout.SHARDED
    reads_requests: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelRunnerOutput:
    """What a runner gives for one batch.

    Attributes:
        execution: Who ran it, and its sizes.
        logits: Of real rows; None where nothing was computed or layers are left. May be
            graph-owned: overwritten by the next replay.
        unfinished: State between the layers of a split prefill; None elsewhere.
    """

    execution: Execution
    logits: ForwardLogits | None
    unfinished: Any = None

    def after(self, refusals: Sequence[Refusal]) -> ModelRunnerOutput:
        """Returns the same, with the runners that were asked before."""
        return dataclasses.replace(
            self, execution=dataclasses.replace(self.execution, refusals=tuple(refusals))
        )


class Runner(abc.ABC):
    """Runs batches of some modes.

    Attributes:
        name: Its name in plans and reports.
    """

    name: ClassVar[str]

    def __init__(self, parts: RunnerParts) -> None:
        self.parts = parts

    @abc.abstractmethod
    def can_run(self, batch: ForwardBatch) -> Refusal | None:
        """Returns why it cannot take a batch, or None where it can."""

    @abc.abstractmethod
    def run(self, batch: ForwardBatch) -> ModelRunnerOutput:
        """Runs a batch, without padding, that `can_run` takes."""

    def _refuse(self, reason: Reason, detail: str = "") -> Refusal:
        return Refusal(runner=self.name, reason=reason, detail=detail)

    def _execution(self, batch: ForwardBatch, strategy: str) -> Execution:
        real = batch.real
        return execution_of(
            real.forward_mode,
            self.name,
            strategy,
            real.batch_size,
            real.num_tokens,
            batch.batch_size,
            batch.num_tokens,
        )


class GraphRunner(Runner):
    """A runner whose forwards have fixed shapes."""

    @abc.abstractmethod
    def build(self, on_progress: ProgressCallback | None = None) -> None:
        """Builds every shape, largest first; called once, when all that graphs read is in place."""

    @property
    @abc.abstractmethod
    def backends(self) -> tuple[GraphBackend, ...]:
        """Where its graphs are."""

    @abc.abstractmethod
    def load(self, batch: ForwardBatch) -> Callable[[], Any]:
        """Pads and plans a batch that `can_run` takes, without running it.

        Returns:
            What runs its shape, as often as it is called and until another batch is loaded: a replay alone,
            for who measures it.
        """

    def _build_one(
        self, backend: GraphBackend, key: GraphKey, batch: ForwardBatch, forward: Callable[[], Any]
    ) -> None:
        """Builds one shape on a padded stand-in batch."""
        attention = self.parts.attention_for(batch)
        backend.plan_for_capture(attention, batch)
        with use_forward_context(context_of(batch, attention)):
            backend.build(key, forward)

    def _loaded(self, backend: GraphBackend, key: GraphKey, batch: ForwardBatch) -> Callable[[], Any]:
        """Plans a padded batch; returns what runs its shape."""
        attention = self.parts.attention_for(batch)
        backend.plan_for_run(attention, batch)
        context = context_of(batch, attention)

        def run_shape() -> Any:
            with torch.no_grad(), use_forward_context(context):
                return backend.run(key)

        return run_shape

    def _run_one(self, backend: GraphBackend, key: GraphKey, batch: ForwardBatch) -> Any:
        attention = self.parts.attention_for(batch)
        backend.plan_for_run(attention, batch)
        with use_forward_context(context_of(batch, attention)):
            return backend.run(key)


def context_of(batch: ForwardBatch, attention: AttentionBackend) -> ForwardContext:
    """Returns the context in which a model runs a batch."""
    real_tokens = RealTokens(num_real_tokens=batch.padding.num_real_tokens)
    return ForwardContext(attention=attention, real_tokens=real_tokens)


def run_eager(parts: RunnerParts, batch: ForwardBatch) -> ForwardLogits:
    """Runs a batch, padded or not, as it is."""
    attention = parts.attention_for(batch)
    attention.plan(batch)
    with use_forward_context(context_of(batch, attention)):
        hidden_TE = parts.model.hidden_states(batch.input_ids, batch.positions)
        return forward_logits(parts, batch, hidden_TE)


def forward_logits(parts: RunnerParts, batch: ForwardBatch, hidden_TE: torch.Tensor) -> ForwardLogits:
    """Returns logits of a batch whose hidden states are there."""
    if batch.extend is not None and batch.num_tokens_per_req is None:
        return logits_of_ragged(batch, hidden_TE, parts.model)
    return logits_of_rows(batch, hidden_TE, parts.model.compute_logits(hidden_TE))
