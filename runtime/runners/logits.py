"""From hidden states to logits: which rows, how many, and the cut back to the real ones.

Shapes: `T` tokens, `B` requests, `N` rows with logits, `E` hidden, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch.forward_batch import ForwardBatch
from ..batch.forward_mode import CaptureHiddenMode
from ..batch.logprobs import LogitRows, logit_rows
from ..batch.padding import cut_logits, cut_tokens
from .served_model import ServedModel

LOGIT_ROW_MULTIPLE = 32
"""Rows picked from a ragged batch are filled up to a multiple of this, so that the output layer's
arithmetic does not depend on how many requests share the batch; it reads its weights anyway."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardLogits:
    """Logits of one forward; of real rows only.

    Attributes:
        logits: All rows that were computed (dtype[N, V]).
        rows: Which they are, in a ragged batch; None where they are all rows in order.
        hidden: Hidden states that the batch asks for (dtype[B or T, E]); None for none.
    """

    logits: torch.Tensor
    rows: LogitRows | None
    hidden: torch.Tensor | None

    @property
    def next_token_logits(self) -> torch.Tensor:
        """The rows that are sampled from: one per request, or per row in modes of several each."""
        return self.logits if self.rows is None else self.logits.index_select(0, self.rows.sample_rows)


def logits_of_rows(batch: ForwardBatch, hidden_TE: torch.Tensor, logits_NV: torch.Tensor) -> ForwardLogits:
    """Cuts logits that were computed for every row.

    Args:
        batch: The batch that ran, padded or not; its requests have equally many rows.
        hidden_TE: Hidden states as run.
        logits_NV: Logits as run.

    Returns:
        Views of what was given.
    """
    return ForwardLogits(
        logits=_cut_rows(batch, logits_NV), rows=None, hidden=_asked_hidden(batch, hidden_TE)
    )


def logits_of_ragged(batch: ForwardBatch, hidden_TE: torch.Tensor, model: ServedModel) -> ForwardLogits:
    """Computes logits of the rows of a ragged batch that need them.

    Args:
        batch: The batch that ran, padded or not.
        hidden_TE: Hidden states as run.
        model: Its output layer.

    Returns:
        Fresh logits.
    """
    real = batch.real
    rows = logit_rows(real)
    num_rows = rows.hidden_rows.numel()
    filled = -(-num_rows // LOGIT_ROW_MULTIPLE) * LOGIT_ROW_MULTIPLE
    picked = torch.nn.functional.pad(rows.hidden_rows, (0, filled - num_rows))
    logits_NV = model.compute_logits(hidden_TE.index_select(0, picked))[:num_rows]
    return ForwardLogits(logits=logits_NV, rows=rows, hidden=_asked_hidden(batch, hidden_TE, rows))


def _cut_rows(batch: ForwardBatch, logits_NV: torch.Tensor) -> torch.Tensor:
    if batch.real.forward_mode.is_idle():
        return logits_NV[:0]
    return cut_logits(batch, logits_NV)


def _asked_hidden(
    batch: ForwardBatch, padded_TE: torch.Tensor, rows: LogitRows | None = None
) -> torch.Tensor | None:
    """Returns hidden states of real rows as ``capture_hidden_mode`` says."""
    real = batch.real
    if real.capture_hidden_mode is CaptureHiddenMode.NULL:
        return None
    hidden_TE = cut_tokens(batch, padded_TE)
    if real.capture_hidden_mode is CaptureHiddenMode.FULL or real.num_tokens == 0:
        return hidden_TE
    if rows is not None:
        return hidden_TE.index_select(0, rows.hidden_rows.index_select(0, rows.sample_rows))
    each = real.num_tokens // real.batch_size
    return hidden_TE[each - 1 :: each]
