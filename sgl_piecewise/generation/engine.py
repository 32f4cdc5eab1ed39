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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        # What a step gave and nobody was handed yet; left over only where a stream is closed between two of them.
        self._events: collections.deque[TokenEvent] = collections.deque()
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
        """Whether a request waits or runs, or an event waits to be handed out."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._events)

    @property
    def num_prefilling(self) -> int:
        """Requests whose first token has not been read yet, waiting ones included."""
        members = (*self.scheduler.waiting, *self.scheduler.running)
        return sum(one.num_new_tokens == 0 for one in members)

    def drop_all(self) -> None:
        """Forgets every request and gives back what it held."""
        # What still computes writes to slots that are free now; who gets them writes after it, on the same stream.
        self._in_flight.clear()
        for one in self.scheduler.drop_all():
            one.has_ended = True
        self._names.clear()
        self._events.clear()

    def step(self) -> list[TokenEvent]:
        """Reads the tokens of one forward; launches it first where none is in flight, and the next one behind it.

        Returns:
            What came of it, request by request; nothing for prompts that are not through.

        Raises:
            ConfigError: Called inside a generate or stream, whose tokens it would take.
            KeyboardInterrupt: Ctrl-C came during the step, which was finished first.
        """
        if self._is_at_work:
            raise ConfigError(
                "The engine is at work for a stream or generate, which makes its own steps; one more would take its "
                "tokens. Let that end first, or drive all requests with add and step."
            )
        self._step()
        events = list(self._events)
        self._events.clear()
        return events

    def _step(self) -> None:
        """Makes a step, unless there are events that nobody was handed."""
        if self._events:
            return
        # Whole or not at all: an interrupt between taking slots and noting whose they are would lose them.
        with HeldInterrupts(is_everywhere=True):
            if not self._in_flight:
                self._launch()
            if self._has_overlap and len(self._in_flight) == 1:
                self._launch(behind=self._in_flight[0])
            if self._in_flight:
                self._read(self._in_flight[0])

    def stream(self, requests: Iterable[GenerationRequest]) -> Iterator[TokenEvent]:
        """Generates for requests; yields events as they come, those of requests that `add` took too.

        Ended early, by its consumer, an error or Ctrl-C, it gives back what its own requests held.

        Raises:
            BatchError: As in `add`; no request was taken then.
            ConfigError: Likewise; or another stream or generate is at work.
        """
        with self._work(requests):
            while self.has_work:
                self._step()
                while self._events:
                    yield self._events.popleft()

    def generate(
        self,
        requests: Iterable[GenerationRequest],
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[GenerationOutput]:
        """Generates for requests; returns when all have ended.

        Args:
            requests: What to do.
            on_event: Called with every event, those of requests that `add` took too. It may add requests, and
                call `drop_all` to stop.

        Returns:
            Outputs in the order of the requests.

        Raises:
            BatchError: As in `add`; no request was taken then.
            ConfigError: Likewise; another stream or generate is at work; or requests that `add` took have not
                ended, and nobody would get their tokens.
        """
        if self.has_work and on_event is None and not self._is_at_work:
            raise ConfigError(
                "Requests that add took have not ended, and generate without on_event would run them and throw their "
                "tokens away. Step until has_work is false, pass on_event, or give all requests to one call."
            )
        ends: dict[str, TokenEvent] = {}
        with self._work(requests) as names:
            members = {one.req.request_id: one for one in self.scheduler.waiting}
            while self.has_work:
                self._step()
                ends |= {event.request_id: event for event in self._events if event.finish_reason is not None}
                while self._events:
                    event = self._events.popleft()
                    if on_event is not None:
                        on_event(event)
        return [output_of(members[name], ends.get(name)) for name in names]

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

    def _read(self, step: StepInFlight) -> None:
        """Reads the oldest step in flight, row by row: one that fails is not read again, and loses no other's event."""
        with self.clock.phase("wait"):
            found = step.copy.wait()
        with self.clock.phase("hand out"):
            token_ids = found.next_token_ids.tolist()
            logprobs = None if found.logprobs is None else StepLogprobs(found.logprobs)
            while step.unread:
                row = step.unread.popleft()
                event = self._read_row(row, token_ids[row.index], logprobs)
                if event is not None:
                    self._events.append(event)
            self._in_flight.popleft()
            while self._in_flight and not self._in_flight[0].is_wanted:
                self.num_dropped_rows += len(self._in_flight.popleft().unread)

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
        """Holds the engine for one caller and takes its requests; in the end none of them holds anything.

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
        num_names = len(names)
        own = list(self.scheduler.waiting)[len(self.scheduler.waiting) - num_names :]
        self._is_at_work = True
        try:
            yield names
        finally:
            self._drop(own)
            self._is_at_work = False

    def _drop(self, members: Sequence[RunningRequest]) -> None:
        """Forgets requests that have not ended and gives back what they held; others go on."""
        for one in members:
            if one.has_ended:
                continue
            one.has_ended = True
            self.scheduler.drop(one)
            self._names.discard(one.req.request_id)
        names = {one.req.request_id for one in members}
        self._events = collections.deque(event for event in self._events if event.request_id not in names)
        # As in `drop_all`: nobody reads what still computes for them.
        self._in_flight = collections.deque(step for step in self._in_flight if step.is_wanted)

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
        smallest = min(self.runner.pool.sub_pools.values(), key=lambda sub_pool: sub_pool.num_slots)
        for limit, what in (
            (self.runner.options.max_context, "max_context, the tokens of one request"),
            (smallest.num_slots, f"the KV pool, sub-pool {smallest.spec.name!r}"),
        ):
            if asked > limit:
                raise ConfigError(
                    f"Request {name!r} has a prompt of {len(request.prompt_ids)} tokens and asks for "
                    f"{request.max_new_tokens} more; together {asked}, over {what} ({limit}). Shorten the prompt, ask "
                    "for fewer tokens, or raise the limit."
                )


def output_of(one: RunningRequest, end: TokenEvent | None) -> GenerationOutput:
    """Returns the output of a request that ended with an event, or was dropped before one."""
    reason = FinishReason.INTERRUPTED if end is None else end.finish_reason
    assert reason is not None
    return GenerationOutput(
        request_id=one.req.request_id,
        prompt_ids=tuple(one.req.token_ids[: one.req.num_prompt_tokens]),
        token_ids=tuple(one.req.token_ids[one.req.num_prompt_tokens :]),
        text=one.text.text,
        finish_reason=reason,
        error=None if end is None else end.error,
        logprobs=None if one.request.logprobs is None else tuple(one.logprobs),
        prompt_logprobs=None if one.request.logprobs is None else tuple(one.prompt_logprobs),
    )
