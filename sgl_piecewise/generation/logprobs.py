"""Log-probabilities as callers get them: on the host, a record a token.

They are those of the model's logits as they are: temperature, top-k and top-p do not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_piecewise.runtime.sampler.logprobs import BatchLogprobs, TopLogprobs


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """How likely one token was in its place.

    Attributes:
        token_id: The token that stands there.
        logprob: Natural logarithm of its probability.
        top: The most likely tokens there with theirs, as many as were asked for, descending.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StepLogprobs:
    """The log-probabilities of one forward, brought to the host once.

    Args:
        found: Of the sampler.
    """

    def __init__(self, found: BatchLogprobs) -> None:
        self._next = found.next_token.tolist()
        self._next_top = _pairs(found.next_top)
        self._input = [] if found.input is None else found.input.tolist()
        self._input_top = _pairs(found.input_top)
        self._num_input = found.num_input
        self._num_top = found.num_top

    def of_next_token(self, index: int, token_id: int) -> TokenLogprob:
        """Returns that of the token that was sampled for a request.

        Args:
            index: Of the request in the batch.
            token_id: What was sampled.
        """
        return TokenLogprob(
            token_id=token_id, logprob=self._next[index], top=self._top(self._next_top, index, index)
        )

    def num_prompt_tokens(self, index: int) -> int:
        """Returns how many prompt tokens of a request have one."""
        return self._num_input[index]

    def of_prompt_tokens(self, index: int, token_ids: Sequence[int]) -> list[TokenLogprob]:
        """Returns those of prompt tokens of a request.

        Args:
            index: Of the request in the batch.
            token_ids: The tokens, as many as `num_prompt_tokens` says.
        """
        first = sum(self._num_input[:index])
        return [
            TokenLogprob(
                token_id=token_id, logprob=self._input[row], top=self._top(self._input_top, index, row)
            )
            for row, token_id in enumerate(token_ids, start=first)
        ]

    def _top(
        self, rows: list[list[tuple[int, float]]] | None, index: int, row: int
    ) -> tuple[tuple[int, float], ...]:
        # Rows have as many as the request that wants most.
        return () if rows is None else tuple(rows[row][: self._num_top[index]])


def _pairs(top: TopLogprobs | None) -> list[list[tuple[int, float]]] | None:
    if top is None:
        return None
    rows = zip(top.token_ids.tolist(), top.values.tolist(), strict=True)
    return [list(zip(token_ids, values, strict=True)) for token_ids, values in rows]
