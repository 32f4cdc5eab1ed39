"""Split prefill: some of the layers at a time, so that other forwards can run in between.

The state between two calls is the caller's; attention is planned anew each time, because the
forwards in between planned theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..batch.forward_batch import ForwardBatch
from ..context import use_forward_context
from ..errors import BatchError
from .base import ModelRunnerOutput, Runner, context_of, forward_logits
from .execution import Reason, Refusal


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitProgress:
    """A prefill between two of its layers.

    Attributes:
        batch: The batch.
        next_layer: The first layer that has not run.
        state: What it takes.
    """

    batch: ForwardBatch
    next_layer: int
    state: Any


class SplitPrefillRunner(Runner):
    """Runs SPLIT_PREFILL, without graphs."""

    name = "split_prefill"

    def can_run(self, batch: ForwardBatch) -> Refusal | None:
        if not batch.forward_mode.is_split_prefill():
            return self._refuse(Reason.MODE, f"{batch.forward_mode.value} is no split prefill")
        return None

    def run(
        self, batch: ForwardBatch, *, num_layers: int | None = None, progress: SplitProgress | None = None
    ) -> ModelRunnerOutput:
        """Runs the next layers.

        Args:
            batch: The batch.
            num_layers: How many layers; all that are left by default.
            progress: From the call before; None for the first.

        Returns:
            Logits after the last layer; before, a `SplitProgress` in ``unfinished``.

        Raises:
            BatchError: The progress is another batch's, or there is no layer to run.
        """
        model = self.parts.model
        if progress is not None and progress.batch is not batch:
            raise BatchError("progress: it belongs to another batch; give each split prefill its own.")
        first = 0 if progress is None else progress.next_layer
        end = model.num_layers if num_layers is None else min(first + num_layers, model.num_layers)
        if end <= first:
            raise BatchError(
                f"num_layers: {num_layers} layers from layer {first} of {model.num_layers} are none."
            )
        attention = self.parts.attention_for(batch)
        attention.plan(batch)
        execution = self._execution(batch, "eager")
        with use_forward_context(context_of(batch, attention)):
            state = (
                model.begin_layers(batch.input_ids, batch.positions) if progress is None else progress.state
            )
            state = model.run_layers(state, range(first, end))
            if end < model.num_layers:
                unfinished = SplitProgress(batch=batch, next_layer=end, state=state)
                return ModelRunnerOutput(execution=execution, logits=None, unfinished=unfinished)
            return ModelRunnerOutput(
                execution=execution, logits=forward_logits(self.parts, batch, model.end_layers(state))
            )
