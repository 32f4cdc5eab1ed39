"""The offline engine: requests in, token events out, the tokens of one forward per step.

It owns the scheduler and the worker and keeps one promise: between two steps every slot of the
pools belongs to exactly one running request or is free, whatever was interrupted or failed.

With overlap the host works while the device computes: a step launches the next forward before it
reads the tokens of the one in flight. Only then does it show which requests had ended. Their rows of the
newer forward are dropped; a request's slots, those of that row included, are given back once, at its end.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sgl_piecewise.models.tokenizer import Tokenizer
from sgl_piecewise.runtime.batch.request import Req
from sgl_piecewise.runtime.batch.scheduling import release_out_of_window
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.interrupts import HeldInterrupts
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.records import LapClock
from sgl_piecewise.runtime.sampler.sampler import INVALID_TOKEN, invalid_logits
from sgl_piecewise.runtime.worker.worker import TpModelWorker, WorkerOptions

from .in_flight import StepInFlight, UnreadRow
from .logprobs import StepLogprobs, TokenLogprob
from .requests import FinishReason, GenerationOutput, GenerationRequest, RunningRequest, TokenEvent
from .scheduler import Scheduler, SchedulerOptions
from .text import TextStream


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the engine batches.

    Attributes:
        chunk_tokens: New tokens of one prompt in one forward; None for all that a forward takes.
        mixes: Whether prompts and decoding requests share a forward.
        has_overlap: Whether the next forward is launched before the tokens of this one are read. Tokens are
            the same; a request that ends by its tokens has one more row computed, which is dropped.
    """

    chunk_tokens: int | None = None
    mixes: bool = True
    has_overlap: bool = True


class OfflineEngine:
    """Generates for many requests at once.

    Args:
        runner: Built.
        tokenizer: None where there is no vocabulary: tokens without text.
        options: How it batches.

    Attributes:
        runner: The model runner, with its log.
        scheduler: Waiting and running requests.
        clock: Host seconds of steps: ``schedule``, ``launch``, ``wait`` (for tokens) and ``hand out``. While
            steps wait at all, a forward was launched behind the one that they wait for.
        num_dropped_rows: Rows of forwards that were computed for requests that had ended.
    """

    def __init__(
        self, runner: ModelRunner, *, tokenizer: Tokenizer | None = None, options: EngineOptions | None = None
    ) -> None:
        options = options or EngineOptions()
        limits = runner.options
        chunk = limits.max_extend_tokens if options.chunk_tokens is None else options.chunk_tokens
        self.runner = runner
        self.scheduler = Scheduler(
            SchedulerOptions(
                max_requests=limits.max_requests,
                max_tokens=limits.max_extend_tokens,
                chunk_tokens=chunk,
                mixes=options.mixes,
            ),
            runner.allocator,
            runner.req_to_token,
        )
        self._tokenizer = tokenizer
        self.clock = LapClock()
        self.num_dropped_rows = 0
        self._has_overlap = options.has_overlap
        self._worker = TpModelWorker(runner, WorkerOptions(has_overlap=options.has_overlap))
        # Oldest first; two only inside a step, and after one that failed.
        self._in_flight: collections.deque[StepInFlight] = collections.deque()
        self._num_requests = 0
        self._names: set[str] = set()
        self._is_at_work = False

    def add(self, request: GenerationRequest) -> str:
        """Takes a request; it waits until there is room.

        Returns:
            Its name.

        Raises:
            BatchError: The prompt is empty, or holds a token id that is out of range.
            ConfigError: It is longer than the model, a request or the pool may be; stop texts
                without a tokenizer; more likely tokens than there are; or its name is taken.
        """
        name = self._next_name() if request.request_id is None else request.request_id
        if name in self._names:
            raise ConfigError(f"A request is named {name!r} already; name each once.")
        req = Req.of_prompt(name, request.prompt_ids, sampling=request.sampling, logprobs=request.logprobs)
        req.check(vocab_size=self.runner.model.vocab_size)
        self._check_length(name, request)
        self._check_logprobs(name, request)
        if request.stop_texts and self._tokenizer is None:
            raise ConfigError(f"Request {name!r} has stop_texts, and without a tokenizer there is no text.")
        self._num_requests += 1
        self._names.add(name)
        self.scheduler.waiting.append(
            RunningRequest(req=req, request=request, text=TextStream(self._tokenizer, request.stop_texts))
        )
        return name

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def num_prefilling(self) -> int:
        """Requests whose first token has not been read yet, waiting ones included."""
        members = (*self.scheduler.waiting, *self.scheduler.running)
        return sum(one.num_new_tokens == 0 for one in members)

    def drop_all(self) -> None:
        """Forgets every request and gives back what it held."""
        # What still computes writes to slots that are free now; who gets them writes after it, on the same stream.
        self._in_flight.clear()
        self.scheduler.drop_all()
        self._names.clear()

    def step(self) -> list[TokenEvent]:
        """Reads the tokens of one forward; launches it first where none is in flight, and the next one behind it.

        Returns:
            What came of it, request by request; nothing for prompts that are not through.

        Raises:
            KeyboardInterrupt: Ctrl-C came during the step, which was finished first.
        """
        # Whole or not at all: an interrupt between taking slots and noting whose they are would lose them.
        with HeldInterrupts(is_everywhere=True):
            if not self._in_flight:
                self._launch()
            if self._has_overlap and len(self._in_flight) == 1:
                self._launch(behind=self._in_flight[0])
            return self._read(self._in_flight[0]) if self._in_flight else []

    def stream(self, requests: Iterable[GenerationRequest]) -> Iterator[TokenEvent]:
        """Generates for requests; yields events as they come.

        Ended early, by its consumer, an error or Ctrl-C, it gives back what the requests held.

        Raises:
            BatchError: As in `add`; no request was taken then.
            ConfigError: Likewise; or another stream or generate is at work.
        """
        with self._work(requests):
            while self.has_work:
                yield from self.step()

    def generate(
        self,
        requests: Iterable[GenerationRequest],
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[GenerationOutput]:
        """Generates for requests; returns when all have ended.

        Args:
            requests: What to do.
            on_event: Called with every event.

        Returns:
            Outputs in the order of the requests.

        Raises:
            BatchError: As in `add`; no request was taken then.
            ConfigError: Likewise; or another stream or generate is at work.
        """
        ends: dict[str, TokenEvent] = {}
        with self._work(requests) as names:
            members = {one.req.request_id: one for one in self.scheduler.waiting}
            while self.has_work:
                for event in self.step():
                    if event.finish_reason is not None:
                        ends[event.request_id] = event
                    if on_event is not None:
                        on_event(event)
        return [output_of(members[name], ends[name]) for name in names]

    def _launch(self, behind: StepInFlight | None = None) -> None:
        """Launches the next forward, if one can be decided.

        One that fails has taken slots at most, which are its requests' own: it can be tried again.
        """
        with self.clock.phase("schedule"):
            decided = self.scheduler.next_batch(behind)
        if decided is None:
            return
        batch, members = decided
        with self.clock.phase("launch"):
            sampled = self._worker.forward_batch_generation(batch).tokens()
            assert sampled is not None, "a generating forward samples"
            self._in_flight.append(StepInFlight(batch, members, sampled))
        with self.clock.phase("schedule"):
            runner = self.runner
            for one in members:
                # The forward just launched may still read them; a later one that gets them writes after it.
                release_out_of_window(one.req, runner.pool, runner.allocator, runner.req_to_token)

    def _read(self, step: StepInFlight) -> list[TokenEvent]:
        """Reads the oldest step in flight, row by row: one that fails is not read again."""
        with self.clock.phase("wait"):
            found = step.copy.wait()
        with self.clock.phase("hand out"):
            token_ids = found.next_token_ids.tolist()
            logprobs = None if found.logprobs is None else StepLogprobs(found.logprobs)
            events = []
            while step.unread:
                row = step.unread.popleft()
                event = self._read_row(row, token_ids[row.index], logprobs)
                if event is not None:
                    events.append(event)
            self._in_flight.popleft()
            while self._in_flight and not self._in_flight[0].is_wanted:
                self.num_dropped_rows += len(self._in_flight.popleft().unread)
            return events

    def _read_row(self, row: UnreadRow, token_id: int, logprobs: StepLogprobs | None) -> TokenEvent | None:
        """Gives a request what a step computed for it; nothing to one that has ended."""
        one = row.one
        if one.has_ended:
            self.num_dropped_rows += 1
            return None
        one.num_tokens_in_flight -= row.has_token
        if logprobs is not None:
            one.take_prompt_logprobs(logprobs, row.index)
        if not row.has_token:
            return None
        logprob = None
        if logprobs is not None and one.request.logprobs is not None:
            logprob = logprobs.of_next_token(row.index, token_id)
        return self._advance(one, token_id, logprob)

    @contextlib.contextmanager
    def _work(self, requests: Iterable[GenerationRequest]) -> Iterator[list[str]]:
        """Holds the engine for one caller and takes its requests; in the end no request holds anything.

        Yields:
            The requests' names.

        Raises:
            BatchError: A request is refused; none was taken.
            ConfigError: Likewise; or another caller has the engine, and would get this one's tokens, or lose its own.
        """
        if self._is_at_work:
            raise ConfigError(
                "The engine is at work for another stream or generate. Let that end (or close it) first, give all "
                "requests to one call, or use add and step, which hand out the tokens of all requests."
            )
        names = self._add_all(requests)
        self._is_at_work = True
        try:
            yield names
        finally:
            self.drop_all()
            self._is_at_work = False

    def _next_name(self) -> str:
        """Returns a name that no request has."""
        while (name := f"request {self._num_requests}") in self._names:
            self._num_requests += 1
        return name

    def _add_all(self, requests: Iterable[GenerationRequest]) -> list[str]:
        """Adds all or none."""
        before = len(self.scheduler.waiting)
        names: list[str] = []
        try:
            for request in requests:
                names.append(self.add(request))
        except BaseException:
            while len(self.scheduler.waiting) > before:
                self._names.discard(self.scheduler.waiting.pop().req.request_id)
            raise
        return names

    def _advance(self, one: RunningRequest, token_id: int, logprob: TokenLogprob | None) -> TokenEvent:
        """Gives a request its token, or ends it."""
        name = one.req.request_id
        prompt_logprobs = tuple(one.prompt_logprobs) if one.num_new_tokens == 0 else ()
        if token_id == INVALID_TOKEN:
            self._end(one)
            return TokenEvent(
                request_id=name,
                token_id=None,
                text=one.text.flush(),
                finish_reason=FinishReason.ERROR,
                error=str(invalid_logits(one.req)),
                prompt_logprobs=prompt_logprobs,
            )
        reason: FinishReason | None = None
        text = ""
        if token_id in one.request.stop_token_ids:
            reason = FinishReason.STOP_TOKEN
        else:
            one.req.token_ids.append(token_id)
            if logprob is not None:
                one.logprobs.append(logprob)
            text = one.text.push(token_id)
            if one.text.has_stopped:
                reason = FinishReason.STOP_TEXT
            elif one.num_new_tokens >= one.request.max_new_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            text += one.text.flush()
            self._end(one)
        return TokenEvent(
            request_id=name,
            token_id=None if reason is FinishReason.STOP_TOKEN else token_id,
            text=text,
            finish_reason=reason,
            logprob=None if reason is FinishReason.STOP_TOKEN else logprob,
            prompt_logprobs=prompt_logprobs,
        )

    def _check_logprobs(self, name: str, request: GenerationRequest) -> None:
        vocab_size = self.runner.model.vocab_size
        if request.logprobs is not None and request.logprobs.top_num > vocab_size:
            raise ConfigError(
                f"Request {name!r} asks for the {request.logprobs.top_num} most likely tokens, and the model knows "
                f"{vocab_size}. Ask for fewer."
            )

    def _end(self, one: RunningRequest) -> None:
        one.has_ended = True
        self.scheduler.end(one)
        self._names.discard(one.req.request_id)

    def _check_length(self, name: str, request: GenerationRequest) -> None:
        asked = len(request.prompt_ids) + request.max_new_tokens
        slots = min(sub_pool.num_slots for sub_pool in self.runner.pool.sub_pools.values())
        for limit, what in (
            (self.runner.options.max_context, "max_context, the tokens of one request"),
            (slots, "the KV pool"),
        ):
            if asked > limit:
                raise ConfigError(
                    f"Request {name!r} has a prompt of {len(request.prompt_ids)} tokens and asks for "
                    f"{request.max_new_tokens} more; together {asked}, over {what} ({limit}). Shorten the prompt, ask "
                    "for fewer tokens, or raise the limit."
                )


def output_of(one: RunningRequest, end: TokenEvent) -> GenerationOutput:
    """Returns the output of a request that ended with an event."""
    assert end.finish_reason is not None
    return GenerationOutput(
        request_id=one.req.request_id,
        prompt_ids=tuple(one.request.prompt_ids),
        token_ids=tuple(one.req.token_ids[one.req.num_prompt_tokens :]),
        text=one.text.text,
        finish_reason=end.finish_reason,
        error=end.error,
        logprobs=None if one.request.logprobs is None else tuple(one.logprobs),
        prompt_logprobs=None if one.request.logprobs is None else tuple(one.prompt_logprobs),
    )
