"""The eager runner: any batch, no graph. It stands in where a graph runner is off or says no."""

from __future__ import annotations

from ..batch.forward_batch import ForwardBatch
from ..batch.padding import pad_batch, padded_batch_size, padded_num_tokens
from .base import ModelRunnerOutput, Runner, run_eager
from .execution import Refusal


class EagerRunner(Runner):
    """Runs every mode; PREBUILT computes nothing."""

    name = "eager"

    def can_run(self, batch: ForwardBatch) -> Refusal | None:
        return None

    def run(self, batch: ForwardBatch) -> ModelRunnerOutput:
        if batch.forward_mode.is_prebuilt():
            return ModelRunnerOutput(execution=self._execution(batch, "eager"), logits=None)
        padded = self._to_multiple(batch)
        return ModelRunnerOutput(
            execution=self._execution(padded, "eager"), logits=run_eager(self.parts, padded)
        )

    def _to_multiple(self, batch: ForwardBatch) -> ForwardBatch:
        multiple = self.parts.token_multiple
        if batch.num_tokens % multiple == 0:
            return batch
        if batch.num_tokens_per_req is None:
            return pad_batch(batch, num_tokens=padded_num_tokens(batch.num_tokens, multiple))
        return pad_batch(
            batch, batch_size=padded_batch_size(batch.batch_size, batch.num_tokens_per_req, multiple)
        )
