"""Log-probabilities that requests asked for: of prompt tokens, of the chosen one, of the most likely.

Shapes: `B` requests, `N` rows with logits, `M` asked-for prompt positions, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..batch.logprobs import LogitRows


@dataclass(frozen=True, kw_only=True, eq=False)
class TopLogprobs:
    """The most likely tokens of some rows, as many as the row that wants most.

    Attributes:
        values: Float32[rows, K], descending.
        token_ids: Int64[rows, K].
    """

    values: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchLogprobs:
    """Log-probabilities of one forward, on the device.

    Attributes:
        next_token: Of the tokens that were chosen (float32[B]).
        next_top: Most likely tokens in their place; None where nobody asked.
        input: Of prompt tokens (float32[M]), request by request; None in decode.
        input_top: Most likely tokens in their place; None where nobody asked.
        num_input: How many of the `M` belong to each request.
        num_top: How many of the most likely tokens each request wants.
    """

    next_token: torch.Tensor
    next_top: TopLogprobs | None
    input: torch.Tensor | None
    input_top: TopLogprobs | None
    num_input: tuple[int, ...]
    num_top: tuple[int, ...]


def batch_logprobs(
    logits_NV: torch.Tensor,
    next_logits_BV: torch.Tensor,
    token_ids_B: torch.Tensor,
    rows: LogitRows | None,
    num_top: tuple[int, ...],
) -> BatchLogprobs:
    """Computes the log-probabilities of a forward.

    Args:
        logits_NV: All rows with logits.
        next_logits_BV: The rows that were sampled from.
        token_ids_B: The tokens that were chosen.
        rows: Which rows of a ragged batch have logits; None elsewhere.
        num_top: How many most likely tokens each request wants.
    """
    most = max(num_top, default=0)
    next_BV = next_logits_BV.float().log_softmax(-1)
    chosen_B = next_BV.gather(1, token_ids_B.clamp(min=0).unsqueeze(1)).squeeze(1)
    inputs = input_top = None
    if rows is not None:
        input_MV = logits_NV.index_select(0, rows.input_rows).float().log_softmax(-1)
        inputs = input_MV.gather(1, rows.input_token_ids.unsqueeze(1)).squeeze(1)
        input_top = _top(input_MV, most)
    return BatchLogprobs(
        next_token=chosen_B,
        next_top=_top(next_BV, most),
        input=inputs,
        input_top=input_top,
        num_input=(0,) * len(num_top) if rows is None else rows.num_input_rows,
        num_top=num_top,
    )


def _top(logprobs_NV: torch.Tensor, most: int) -> TopLogprobs | None:
    if most == 0:
        return None
    values, token_ids = logprobs_NV.topk(min(most, logprobs_NV.shape[-1]), dim=-1)
    return TopLogprobs(values=values, token_ids=token_ids)
