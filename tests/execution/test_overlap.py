"""Overlap: the next forward is launched before tokens are read, and nothing of what comes out changes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import signal
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_piecewise.generation.engine import EngineOptions, OfflineEngine
from sgl_piecewise.generation.in_flight import StepInFlight
from sgl_piecewise.generation.printing import closing_line
from sgl_piecewise.generation.requests import FinishReason, GenerationRequest, TokenEvent
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.models.tokenizer import Tokenizer
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.request import LogprobRequest
from sgl_piecewise.runtime.batch.sampling import SamplingParams
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.records import PhaseClock
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy
from sgl_piecewise.runtime.worker.host_copy import HostCopy

from .support import OPTIONS, ctrl_c_raises, make_runner, plan, tiny_model
from .test_engine import Letters, assert_nothing_is_held

EQUAL_SIZES = ExecutionPlan(
    modes={
        ForwardMode.DECODE: ModeStrategy(strategy="none", capture_sizes=(4,)),
        ForwardMode.EXTEND: ModeStrategy(strategy="none", capture_sizes=(16,)),
    }
)
"""Every forward of a mode has one padded size, so its bits do not depend on who shares it."""

GRAPHS = plan("full", "breakable", has_verify=False)


@functools.cache
def runner_of(name: str) -> ModelRunner:
    """Runners are reused: every test gives back all that it took."""
    if name == "graphs":
        return make_runner(GRAPHS)
    if name == "windows":
        model = random_decoder(named_shape("tiny-gemma3"), device="cpu", dtype=torch.float32, seed=1)
        options = dataclasses.replace(OPTIONS, max_total_tokens=64, window_fraction=1.0)
        return ModelRunner.ready(model, plan=EQUAL_SIZES, options=options)
    return make_runner(EQUAL_SIZES, **({"max_total_tokens": 40} if name == "few slots" else {}))


def engine(name: str = "equal sizes", *, has_overlap: bool = True, **options: Any) -> OfflineEngine:
    return OfflineEngine(
        runner_of(name),
        tokenizer=Tokenizer(backend=Letters()),
        options=EngineOptions(**{"chunk_tokens": 7, "has_overlap": has_overlap} | options),
    )


def ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 63, (length,), generator=generator).tolist()


def drive(
    one: OfflineEngine,
    arrivals: Iterable[tuple[int, GenerationRequest]],
    tolerates: type[BaseException] = StopIteration,
) -> dict[str, list[TokenEvent]]:
    """Steps an engine until nothing is left; requests come in before the step of their number."""
    pending = collections.deque(sorted(arrivals, key=lambda arrival: arrival[0]))
    events: dict[str, list[TokenEvent]] = collections.defaultdict(list)
    num_steps = 0
    while pending or one.has_work:
        while pending and pending[0][0] <= num_steps:
            one.add(pending.popleft()[1])
        num_steps += 1
        assert num_steps < 1000, "the engine stands still"
        try:
            for event in one.step():
                events[event.request_id].append(event)
        except tolerates:
            continue
    return dict(events)


def without_values(events: dict[str, list[TokenEvent]]) -> dict[str, list[TokenEvent]]:
    """The same without log-probabilities, which differ in their last bits between padded sizes."""
    return {
        name: [dataclasses.replace(event, logprob=None, prompt_logprobs=()) for event in of_one]
        for name, of_one in events.items()
    }


def values(events: dict[str, list[TokenEvent]]) -> list[float]:
    return [
        value
        for name in sorted(events)
        for event in events[name]
        for entry in (*event.prompt_logprobs, *([] if event.logprob is None else [event.logprob]))
        for value in (float(entry.token_id), entry.logprob, *(logprob for _, logprob in entry.top))
    ]


@st.composite
def arrivals_of(draw: st.DrawFn) -> list[tuple[int, GenerationRequest]]:
    """A few requests with all that may end, cut or delay them, and the steps that they come at."""
    found = []
    for index in range(draw(st.integers(1, 6))):
        length, max_new = draw(st.integers(1, 24)), draw(st.integers(1, 9))
        asks = draw(st.booleans())
        request = GenerationRequest(
            prompt_ids=ids(length, draw(st.integers(0, 99))),
            max_new_tokens=max_new,
            sampling=SamplingParams(
                temperature=draw(st.sampled_from((0.0, 3.0))), seed=draw(st.integers(0, 9))
            ),
            stop_token_ids=draw(st.frozensets(st.integers(0, 63), max_size=12)),
            stop_texts=tuple(draw(st.lists(st.sampled_from(("a", "k", "bc", "x")), max_size=2, unique=True))),
            logprobs=LogprobRequest(start_len=draw(st.integers(0, length)), top_num=2) if asks else None,
            request_id=f"{index}",
        )
        found.append((draw(st.integers(0, 12)), request))
    return found


@pytest.mark.parametrize("name", ["equal sizes", "few slots", "windows", "graphs"])
@given(arrivals=arrivals_of(), mixes=st.booleans())
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_tokens_texts_ends_and_logprobs_are_those_without_overlap(
    name: str, arrivals: list[tuple[int, GenerationRequest]], mixes: bool
) -> None:
    expected, found = (
        drive(one, arrivals)
        for one in (engine(name, has_overlap=False, mixes=mixes), engine(name, has_overlap=True, mixes=mixes))
    )
    assert without_values(found) == without_values(expected)
    assert values(found) == pytest.approx(values(expected), abs=1e-4)
    assert_nothing_is_held(engine(name))


def test_requests_that_come_together_get_the_same_bits() -> None:
    """Then both engines run the same batches, up to rows that are dropped."""
    arrivals = [
        (
            0,
            GenerationRequest(
                prompt_ids=ids(3 + index, index),
                max_new_tokens=8,
                sampling=SamplingParams(temperature=2.0, seed=index),
                stop_token_ids=frozenset(range(index, 63, 6)),
                logprobs=LogprobRequest(start_len=0, top_num=3),
                request_id=f"{index}",
            ),
        )
        for index in range(4)
    ]
    expected, found = (
        drive(engine(has_overlap=has_overlap, chunk_tokens=16), arrivals) for has_overlap in (False, True)
    )
    assert found == expected
    ends = [events[-1].finish_reason for events in found.values()]
    assert FinishReason.STOP_TOKEN in ends


def test_slots_run_out_and_requests_are_retracted_with_overlap_too() -> None:
    """What the property test relies on: its small pool is small enough."""
    one = engine("few slots")
    arrivals = [(0, GenerationRequest(prompt_ids=ids(9, seed), max_new_tokens=12)) for seed in range(4)]
    drive(one, arrivals)
    assert one.scheduler.num_retractions > 0
    assert_nothing_is_held(one)


@pytest.mark.parametrize("length", range(9, 17))
def test_nobody_gives_slots_back_to_make_room_that_an_end_in_flight_makes(length: int) -> None:
    """The first request's end is known, or comes by a token, just when the second one needs another slot."""
    first = GenerationRequest(prompt_ids=ids(16, 1), max_new_tokens=8, request_id="first")
    second = GenerationRequest(prompt_ids=ids(length, 2), max_new_tokens=24, request_id="second")
    stop = drive(engine(), [(0, first)])["first"][-1].token_id
    for ends_by in (first, dataclasses.replace(first, stop_token_ids=frozenset({stop}))):
        nums = []
        for has_overlap in (False, True):
            one = engine("few slots", has_overlap=has_overlap, chunk_tokens=16)
            drive(one, [(0, ends_by), (0, second)])
            nums.append(one.scheduler.num_retractions)
        assert nums[0] == nums[1]


class Calls:
    """Notes forwards and reads of one engine in their order, and lets some of them fail."""

    def __init__(self, one: OfflineEngine, patch: pytest.MonkeyPatch) -> None:
        self.order = ""
        self.before: dict[int, Callable[[], None]] = {}
        self.after: dict[int, Callable[[], None]] = {}
        patch.setattr(one.runner, "forward", self._noted("F", one.runner.forward))
        wait = HostCopy.wait
        patch.setattr(HostCopy, "wait", lambda copy: self._noted("R", functools.partial(wait, copy))())

    def _noted(self, letter: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            index = len(self.order)
            self.order += letter
            self.before.get(index, lambda: None)()
            result = call(*args, **kwargs)
            self.after.get(index, lambda: None)()
            return result

        return noted


def raise_lost() -> None:
    raise RuntimeError("device lost")


@pytest.mark.parametrize(("has_overlap", "order"), [(True, "FFRFRFRR"), (False, "FRFRFRFR")])
def test_tokens_are_read_after_the_next_launch_and_no_forward_is_wasted(
    monkeypatch: pytest.MonkeyPatch, has_overlap: bool, order: str
) -> None:
    """Each of four requests that end by their length takes part in as many forwards as it gets tokens."""
    one = engine(has_overlap=has_overlap, chunk_tokens=16)
    calls = Calls(one, monkeypatch)
    drive(one, [(0, GenerationRequest(prompt_ids=ids(4, seed), max_new_tokens=4)) for seed in range(4)])
    assert calls.order == order
    assert one.num_dropped_rows == 0
    assert_nothing_is_held(one)


def test_a_request_that_ends_by_its_tokens_costs_one_row_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = drive(engine(), [(0, GenerationRequest(prompt_ids=ids(4, 1), max_new_tokens=9, request_id="a"))])
    token_ids = [event.token_id for event in stop["a"]]
    end = next(
        index for index, token_id in enumerate(token_ids) if index and token_id not in token_ids[:index]
    )
    one = engine()
    calls = Calls(one, monkeypatch)
    request = GenerationRequest(
        prompt_ids=ids(4, 1), max_new_tokens=9, stop_token_ids=frozenset({token_ids[end]})
    )
    outputs = one.generate([request])
    assert outputs[0].finish_reason is FinishReason.STOP_TOKEN
    assert calls.order.count("R") == end + 1
    assert calls.order.count("F") == end + 2
    assert one.num_dropped_rows == 1
    assert "1 row computed for requests that had ended" in closing_line(one, end, PhaseClock())
    assert_nothing_is_held(one)


def six() -> list[tuple[int, GenerationRequest]]:
    """More than run at once, with prompts of several chunks, two of them coming late."""
    return [
        (
            4 * (index > 3),
            GenerationRequest(
                prompt_ids=ids(3 + 5 * (index % 3), index),
                max_new_tokens=5,
                sampling=SamplingParams(temperature=2.0, seed=index),
                stop_token_ids=frozenset(range(index, 63, 7)),
                logprobs=LogprobRequest(start_len=0) if index % 2 else None,
                request_id=f"{index}",
            ),
        )
        for index in range(6)
    ]


@functools.cache
def six_without_overlap() -> dict[str, list[TokenEvent]]:
    return drive(engine(has_overlap=False), six())


NUM_CALLS = 20


@pytest.mark.parametrize("index", range(NUM_CALLS))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_or_a_read_that_fails_once_loses_no_token(
    monkeypatch: pytest.MonkeyPatch, index: int, when: str
) -> None:
    """Before it ran or after, with a step in flight or without: the next step tries again."""
    expected = six_without_overlap()
    one = engine()
    calls = Calls(one, monkeypatch)
    getattr(calls, when)[index] = raise_lost
    found = drive(one, six(), tolerates=RuntimeError)
    assert len(calls.order) > NUM_CALLS
    assert without_values(found) == without_values(expected)
    assert values(found) == pytest.approx(values(expected), abs=1e-4)
    assert_nothing_is_held(one)


@pytest.mark.parametrize("index", range(NUM_CALLS))
def test_ctrl_c_in_either_half_lets_the_step_end_and_everything_goes_back(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    one = engine()
    calls = Calls(one, monkeypatch)
    calls.before[index] = lambda: signal.raise_signal(signal.SIGINT)
    with ctrl_c_raises(), pytest.raises(KeyboardInterrupt):
        one.generate([request for _, request in six()])
    monkeypatch.undo()
    assert_nothing_is_held(one)
    assert drive(one, six()).keys() == {f"{index}" for index in range(6)}
    assert_nothing_is_held(one)


@pytest.mark.parametrize("index", range(NUM_CALLS))
def test_an_error_ends_generate_and_everything_goes_back(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    one = engine()
    Calls(one, monkeypatch).after[index] = raise_lost
    with pytest.raises(RuntimeError, match="device lost"):
        one.generate([request for _, request in six()])
    monkeypatch.undo()
    assert_nothing_is_held(one)
    expected = six_without_overlap()
    assert without_values(drive(one, six())) == without_values(expected)


def test_input_ids_that_cannot_be_made_leave_no_prompt_without_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that was let in for that forward waits again, and comes in with the next one."""
    one = engine()
    made = StepInFlight.input_ids
    failed: list[str] = []

    def fails_for_each_new_request(step: StepInFlight, chosen: Any) -> torch.Tensor | None:
        new = [other.req.request_id for other, _ in chosen if other.req.req_pool_index is None]
        if set(new) - set(failed):
            failed.extend(new)
            raise_lost()
        return made(step, chosen)

    monkeypatch.setattr(StepInFlight, "input_ids", fails_for_each_new_request)
    arrivals = [
        (index, GenerationRequest(prompt_ids=ids(3, index), max_new_tokens=6, request_id=f"{index}"))
        for index in range(3)
    ]
    found = drive(one, arrivals, tolerates=RuntimeError)
    assert set(failed) == {"1", "2"}
    assert without_values(found) == without_values(drive(engine(has_overlap=False), arrivals))
    assert_nothing_is_held(one)


def test_a_tokenizer_that_fails_takes_the_event_of_one_request_and_the_others_go_on() -> None:
    class Failing(Letters):
        num_left = 3

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            self.num_left -= 1
            if self.num_left == 0:
                raise ValueError("no such token")
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    requests = [
        (0, GenerationRequest(prompt_ids=ids(4, seed), max_new_tokens=5, request_id=f"{seed}"))
        for seed in range(3)
    ]
    expected = drive(engine(), requests)
    one = OfflineEngine(runner_of("equal sizes"), tokenizer=Tokenizer(backend=Failing()))
    found = drive(one, requests, tolerates=ValueError)
    assert_nothing_is_held(one)
    # One event is lost, and no token is.
    (failed,) = (name for name, events in expected.items() if found[name] != events)
    assert [event.token_id for event in found[failed]] == [event.token_id for event in expected[failed]][1:]


def test_dropping_requests_between_steps_drops_what_is_in_flight() -> None:
    one = engine()
    for _, request in six():
        one.add(request)
    for _ in range(4):
        one.step()
    one.drop_all()
    assert_nothing_is_held(one)
    assert one.step() == []
    expected = six_without_overlap()
    assert without_values(drive(one, six())) == without_values(expected)


def test_a_name_is_free_again_while_a_row_of_its_request_is_in_flight() -> None:
    one = engine()
    request = GenerationRequest(
        prompt_ids=ids(4, 1), max_new_tokens=5, stop_token_ids=frozenset(range(64)), request_id="again"
    )
    other = GenerationRequest(prompt_ids=ids(4, 2), max_new_tokens=6, request_id="other")
    one.add(request)
    one.add(other)
    assert [event.finish_reason for event in one.step()] == [FinishReason.STOP_TOKEN, None]
    one.add(dataclasses.replace(request, stop_token_ids=frozenset()))
    expected = drive(
        engine(has_overlap=False), [(0, dataclasses.replace(request, stop_token_ids=frozenset()))]
    )
    events = drive(one, [])
    assert events["again"] == expected["again"]
    assert len(events["other"]) == 5
    assert one.num_dropped_rows == 1


def test_a_row_without_a_token_is_dropped_behind_its_error() -> None:
    """Its place in the forward behind holds -1, which is no token id."""
    model = tiny_model()
    model.embed_tokens.weight[63] = torch.nan
    one = OfflineEngine(ModelRunner.ready(model, plan=EQUAL_SIZES, options=OPTIONS))
    prompts = ([5, 63, 7], [5, 6, 7])
    outputs = one.generate([GenerationRequest(prompt_ids=prompt, max_new_tokens=4) for prompt in prompts])
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert "after 3 tokens" in str(outputs[0].error)
    assert one.num_dropped_rows == 1
    assert_nothing_is_held(one)


def test_the_clock_tells_what_the_host_did() -> None:
    one = engine()
    one.generate([GenerationRequest(prompt_ids=[1, 2], max_new_tokens=3)])
    assert one.clock.phases_s.keys() == {"schedule", "launch", "wait", "hand out"}
    assert all(seconds > 0 for seconds in one.clock.phases_s.values())


@pytest.mark.gpu
@pytest.mark.parametrize("strategies", [("full", "breakable"), ("eager", "eager")])
def test_on_a_gpu_tokens_are_those_without_overlap(strategies: tuple[str, str]) -> None:
    runner = make_runner(plan(*strategies, has_verify=False), device="cuda")
    found = []
    for has_overlap in (False, True):
        one = OfflineEngine(
            runner,
            tokenizer=Tokenizer(backend=Letters()),
            options=EngineOptions(chunk_tokens=7, has_overlap=has_overlap),
        )
        found.append(drive(one, six()))
        assert_nothing_is_held(one)
    assert without_values(found[1]) == without_values(found[0])
    assert values(found[1]) == pytest.approx(values(found[0]), abs=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_reading_does_not_wait_for_what_was_launched_after() -> None:
    from sgl_piecewise.runtime.worker.result import SampledTokens

    tokens = torch.arange(4, device="cuda")
    work = torch.zeros(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    copy = HostCopy(SampledTokens(next_token_ids=tokens))
    for _ in range(100):
        work = work @ work  # Milliseconds each.
    behind = torch.cuda.Event()
    behind.record()
    assert copy.wait().next_token_ids.tolist() == [0, 1, 2, 3]
    assert not behind.query()
    behind.synchronize()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_on_a_gpu_nothing_but_reading_waits_for_the_device() -> None:
    """A hidden wait between two launches, such as a copy from pageable memory, would undo the overlap."""
    one = OfflineEngine(make_runner(GRAPHS, device="cuda"), options=EngineOptions(chunk_tokens=16))
    for seed, max_new in enumerate((12, 12, 6)):
        sampling = SamplingParams(temperature=float(seed), top_k=10, top_p=0.9, seed=seed)
        one.add(GenerationRequest(prompt_ids=ids(4, seed), max_new_tokens=max_new, sampling=sampling))
    for _ in range(3):  # What is done once, such as loading kernels, may wait.
        one.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        while one.has_work:
            one.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert one.num_dropped_rows == 0
    assert_nothing_is_held(one)
