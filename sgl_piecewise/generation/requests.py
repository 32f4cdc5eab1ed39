"""What a caller asks of the engine, and what comes back."""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sgl_piecewise.runtime.batch.request import LogprobRequest, Req
from sgl_piecewise.runtime.batch.sampling import SamplingParams
from sgl_piecewise.runtime.errors import ConfigError

from .logprobs import StepLogprobs, TokenLogprob
from .text import TextStream


class FinishReason(enum.Enum):
    """Why a request ended."""

    LENGTH = "length"
    """It has as many new tokens as it may."""
    STOP_TOKEN = "stop_token"
    """A token that ends a text came."""
    STOP_TEXT = "stop_text"
    """A text that was to end it came."""
    ERROR = "error"
    """No token could be chosen."""
    INTERRUPTED = "interrupted"
    """The engine was stopped."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and what to do with it.

    Attributes:
        prompt_ids: Its tokens, at least one.
        max_new_tokens: Tokens to generate at most, at least one.
        sampling: How to choose them.
        stop_token_ids: Any of these ends it; it is not part of the output.
        stop_texts: Any of these in the new text ends it; needs a tokenizer.
        logprobs: Which log-probabilities are wanted; None for none.
        request_id: Its name; numbered by default.

    Raises:
        ConfigError: A value is out of its range.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int = 64
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    logprobs: LogprobRequest | None = None
    request_id: str | None = None

    def __post_init__(self) -> None:
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens!r}.")
        if isinstance(self.stop_texts, str):
            raise ConfigError(f"stop_texts must be a tuple of texts, got the text {self.stop_texts!r}.")
        if not all(isinstance(text, str) for text in self.stop_texts):
            raise ConfigError(f"stop_texts must be texts, got {self.stop_texts!r}.")
        try:
            for token_id in self.stop_token_ids:
                operator.index(token_id)
        except TypeError as err:
            raise ConfigError(
                f"stop_token_ids must be a set of token ids, got {self.stop_token_ids!r}."
            ) from err
        if self.logprobs is not None and not isinstance(self.logprobs, LogprobRequest):
            raise ConfigError(f"logprobs must be a LogprobRequest or None, got {self.logprobs!r}.")
        if "" in self.stop_texts:
            raise ConfigError("stop_texts holds an empty text, which would end everything at once.")


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One step of one request, for who streams.

    Attributes:
        request_id: Whose.
        token_id: The new token; None where it ended without one.
        text: What became readable with it; empty without a tokenizer, or inside a character.
        finish_reason: Set with the last event.
        error: What went wrong, with `FinishReason.ERROR`.
        logprob: Of the new token, where it was asked for.
        prompt_logprobs: Of the prompt's tokens after the asked-for start, with the first event; empty elsewhere.
    """

    request_id: str
    token_id: int | None
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """A request that ended.

    Attributes:
        request_id: Its name.
        prompt_ids: Its prompt.
        token_ids: What was generated, without the token that ended it.
        text: The same as text; empty without a tokenizer.
        finish_reason: Why it ended.
        error: What went wrong, with `FinishReason.ERROR`.
        logprobs: Of ``token_ids``, one each; None where they were not asked for.
        prompt_logprobs: Of the prompt's tokens after the asked-for start; None likewise.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(kw_only=True, eq=False)
class RunningRequest:
    """A request inside the engine.

    Attributes:
        req: What the execution layer sees.
        request: What was asked.
        text: Makes text of new tokens, and finds what ends it.
        logprobs: Of new tokens so far, where they are wanted.
        prompt_logprobs: Of prompt tokens so far, likewise.
        num_tokens_in_flight: New tokens that are sampled on the device and were not read yet.
        has_ended: Whether it ended; tokens that are still in flight are nobody's.
    """

    req: Req
    request: GenerationRequest
    text: TextStream
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_tokens_in_flight: int = 0
    has_ended: bool = False

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated so far, without those in flight."""
        return len(self.req.token_ids) - self.req.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that are known or in flight, and not computed; 1 while it decodes, more while it is prefilled."""
        return len(self.req.token_ids) + self.num_tokens_in_flight - self.req.num_computed_tokens

    @property
    def has_last_token(self) -> bool:
        """Whether it has, once those in flight are read, as many new tokens as it may."""
        return self.num_new_tokens + self.num_tokens_in_flight >= self.request.max_new_tokens

    def take_prompt_logprobs(self, found: StepLogprobs, index: int) -> None:
        """Takes those of a forward that computed some of the prompt.

        Args:
            found: Of the forward.
            index: Of this request in its batch.
        """
        asked = self.request.logprobs
        if asked is None:
            return
        first = asked.start_len + len(self.prompt_logprobs) + 1
        token_ids = self.req.token_ids[first : first + found.num_prompt_tokens(index)]
        self.prompt_logprobs += found.of_prompt_tokens(index, token_ids)
        # A request that must give its slots back is computed again, and these are not asked for twice.
        self.req.logprobs = replace(asked, start_len=asked.start_len + len(self.prompt_logprobs))
