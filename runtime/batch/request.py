"""One request: its tokens, how to sample, and how much of it is in the KV cache."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import BatchError
from .sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class LogprobRequest:
    """Which log-probabilities one request wants.

    Attributes:
        start_len: First token of the prompt whose successor's probability is wanted; the prompt's
            length or more for those of generated tokens alone.
        top_num: How many most likely tokens to report at each position.
    """

    start_len: int
    top_num: int = 0

    def __post_init__(self) -> None:
        for name in ("start_len", "top_num"):
            if getattr(self, name) < 0:
                raise BatchError(f"{name} must not be negative, got {getattr(self, name)}.")


@dataclass(kw_only=True, eq=False)
class Req:
    """A running or waiting request. The scheduler changes it between forwards.

    Attributes:
        request_id: Its name.
        token_ids: Prompt, then what was generated.
        num_prompt_tokens: How many of them are the prompt.
        sampling: How to choose tokens.
        logprobs: Which log-probabilities it wants; None for none.
        num_computed_tokens: Tokens whose keys and values are in the cache and final, for every forward that is
            launched from now on.
        req_pool_index: Its row of the request table; None while it waits.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobRequest | None = None
    num_computed_tokens: int = 0
    req_pool_index: int | None = None

    @classmethod
    def of_prompt(
        cls,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        logprobs: LogprobRequest | None = None,
    ) -> Req:
        """Returns a waiting request.

        Raises:
            BatchError: The prompt is empty, or holds something else than whole numbers of at least 0.
        """
        try:
            token_ids = [operator.index(token_id) for token_id in prompt_ids]
        except TypeError as err:
            raise BatchError(
                f"Request {request_id!r}: token_ids must be whole numbers, got {reprlib.repr(prompt_ids)} ({err})."
            ) from err
        req = cls(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling or SamplingParams(),
            logprobs=logprobs,
        )
        req.check()
        return req

    def check(self, *, vocab_size: int | None = None) -> None:
        """Checks the request against itself.

        Args:
            vocab_size: Bound of token ids; None if it is not known here.

        Raises:
            BatchError: A field is out of range; names request and field.
        """
        where = f"Request {self.request_id!r}"
        if self.num_prompt_tokens < 1:
            raise BatchError(f"{where}: token_ids is empty; a prompt has at least one token.")
        if len(self.token_ids) < self.num_prompt_tokens:
            raise BatchError(
                f"{where}: num_prompt_tokens is {self.num_prompt_tokens}, and token_ids has only "
                f"{len(self.token_ids)}."
            )
        lowest, highest = min(self.token_ids), max(self.token_ids)
        if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
            bound = "at least 0" if vocab_size is None else f"0 to {vocab_size - 1}"
            worst = lowest if lowest < 0 else highest
            raise BatchError(f"{where}: token_ids holds {worst}; ids are {bound}.")
        if not 0 <= self.num_computed_tokens <= len(self.token_ids):
            raise BatchError(
                f"{where}: num_computed_tokens is {self.num_computed_tokens} of {len(self.token_ids)} tokens."
            )
