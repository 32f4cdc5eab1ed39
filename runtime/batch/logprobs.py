"""Which rows need logits, and whose log-probabilities are asked for.

All of it concerns real rows: indices are computed from the batch without padding, so a padded
forward gives the same ones. The logits of token `t` are about its successor `t + 1`.

Shapes: `T` tokens, `B` requests, `N` rows with logits, `M` asked-for prompt positions.

Source: SGLang 0.5.23's `logits_processor`. Differs: a prompt's last token, whose successor is sampled,
has no input log-probability; there it has a made-up one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ..errors import BatchError
from ..kv.staging import copy_to_device
from .forward_batch import ForwardBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitRows:
    """Rows of one forward that need logits.

    Attributes:
        hidden_rows: Rows of the hidden states to compute logits for (int64[N]).
        sample_rows: Which of the `N` rows are sampled from: each request's last (int64[B]).
        input_rows: Which of the `N` rows give a prompt log-probability (int64[M]).
        input_token_ids: The token whose log-probability it is (int64[M]).
        num_input_rows: How many of the `M` belong to each request.
    """

    hidden_rows: torch.Tensor
    sample_rows: torch.Tensor
    input_rows: torch.Tensor
    input_token_ids: torch.Tensor
    num_input_rows: tuple[int, ...]


def logit_rows(batch: ForwardBatch) -> LogitRows:
    """Returns the rows of an extend that need logits; of its real requests, whatever the padding.

    Args:
        batch: An extend batch whose requests may have asked for prompt log-probabilities.

    Raises:
        BatchError: The mode computes logits for every row, so there is nothing to pick.
    """
    batch = batch.real
    if batch.extend is None or batch.num_tokens_per_req is not None:
        raise BatchError(f"forward_mode: {batch.forward_mode.name} computes logits for all of its rows.")
    extend_lens = batch.extend.extend_seq_lens_cpu
    starts: tuple[int, ...] = extend_lens
    asked: tuple[tuple[int, ...], ...] = ((),) * batch.batch_size
    if batch.logprobs is not None and batch.logprobs.extend_logprob_start_lens is not None:
        starts, asked = batch.logprobs.extend_logprob_start_lens, batch.logprobs.input_token_ids
    hidden: list[int] = []
    samples: list[int] = []
    inputs: list[int] = []
    first_row = 0
    for extend_len, start, token_ids in zip(extend_lens, starts, asked, strict=True):
        inputs += range(len(hidden), len(hidden) + len(token_ids))
        # The last token is always sampled from; before it only what was asked for.
        hidden += range(first_row + min(start, extend_len - 1), first_row + extend_len)
        samples.append(len(hidden) - 1)
        first_row += extend_len
    fields = {
        "hidden_rows": hidden,
        "sample_rows": samples,
        "input_rows": inputs,
        "input_token_ids": list(itertools.chain.from_iterable(asked)),
    }
    host = {name: torch.tensor(values, dtype=torch.int64) for name, values in fields.items()}
    return LogitRows(
        **copy_to_device(host, batch.input_ids.device),
        num_input_rows=tuple(len(token_ids) for token_ids in asked),
    )
