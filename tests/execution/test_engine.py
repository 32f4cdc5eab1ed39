"""The offline engine: the same tokens under every plan, and nothing lost whatever goes wrong."""

from __future__ import annotations

import dataclasses
import functools
import signal
from typing import Any

import pytest
import torch

from sgl_piecewise.generation.engine import EngineOptions, OfflineEngine
from sgl_piecewise.generation.requests import FinishReason, GenerationRequest, TokenEvent
from sgl_piecewise.generation.text import TextStream
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.models.tokenizer import Tokenizer
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.batch.sampling import SamplingParams
from sgl_piecewise.runtime.errors import BatchError, ConfigError
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy

from .support import OPTIONS, ctrl_c_raises, make_runner, plan, tiny_model

LENGTHS = (5, 33, 17, 1, 20)

ONE_BY_ONE = ExecutionPlan(
    modes={mode: ModeStrategy(strategy="none") for mode in (ForwardMode.DECODE, ForwardMode.EXTEND)}
)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 63, (length,), generator=generator).tolist() for length in LENGTHS]


def requests(**fields: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_ids=ids,
            max_new_tokens=6,
            # Every other one is drawn at random, with its own seed.
            sampling=SamplingParams(temperature=float(index % 2), top_k=10, seed=index),
            **fields,
        )
        for index, ids in enumerate(prompts())
    ]


def engine(asked: object = None, *, chunk: int = 7, mixes: bool = True, **options: Any) -> OfflineEngine:
    runner = make_runner(asked or plan("none", "none", has_verify=False), **options)  # type: ignore[arg-type]
    return OfflineEngine(runner, options=EngineOptions(chunk_tokens=chunk, mixes=mixes))


def assert_nothing_is_held(one: OfflineEngine) -> None:
    runner = one.runner
    assert not one.has_work
    assert runner.req_to_token.num_free == runner.options.max_requests
    for pool in runner.allocator.pools:
        assert runner.allocator.num_free(pool) == runner.pool.sub_pools[pool].num_slots


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Each prompt by itself, eager and in one piece."""
    alone = engine(plan("eager", "eager", has_verify=False), chunk=16, max_extend_tokens=48)
    return [alone.generate([request])[0].token_ids for request in requests()]


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (plan("none", "none", has_verify=False), {"mixes": False}),
        (plan("full", "breakable", has_verify=False), {}),
        (plan("breakable", "eager", has_verify=False), {}),
        (plan("none", "none", has_verify=False), {"max_total_tokens": 48}),
        (plan("none", "none", has_verify=False), {"max_total_tokens": 48, "mixes": False}),
        (ONE_BY_ONE, {"max_requests": 1}),
    ],
)
def test_tokens_are_those_of_each_prompt_alone(
    asked: object, options: dict[str, Any], expected: list[tuple[int, ...]]
) -> None:
    """Batched, chunked, mixed with decoding, retracted for want of slots, captured or not."""
    one = engine(asked, **options)
    outputs = one.generate(requests())
    assert [output.token_ids for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}
    assert_nothing_is_held(one)
    modes = {key.mode for key in one.runner.log.counts}
    mixed = options.get("mixes", True) and options.get("max_requests") != 1
    assert (ForwardMode.MIXED in modes) == mixed
    if "max_total_tokens" in options:
        assert one.scheduler.num_retractions > 0


def test_events_come_token_by_token_and_end_once() -> None:
    one = engine()
    events: dict[str, list[TokenEvent]] = {}
    for event in one.stream(requests()):
        events.setdefault(event.request_id, []).append(event)
    assert set(events) == {f"request {index}" for index in range(len(LENGTHS))}
    for of_one in events.values():
        assert [event.finish_reason for event in of_one] == [None] * 5 + [FinishReason.LENGTH]
    assert_nothing_is_held(one)


def test_a_consumer_that_stops_early_leaves_nothing_behind() -> None:
    one = engine()
    stream = one.stream(requests())
    next(stream)
    stream.close()
    assert_nothing_is_held(one)
    assert len(one.generate(requests())) == len(LENGTHS)


def test_a_stop_token_ends_a_request_and_is_not_in_its_output(expected: list[tuple[int, ...]]) -> None:
    one = engine()
    stop = expected[0][2]
    output = one.generate(
        [GenerationRequest(prompt_ids=prompts()[0], stop_token_ids=frozenset({stop}), max_new_tokens=6)]
    )[0]
    assert output.finish_reason is FinishReason.STOP_TOKEN
    assert output.token_ids == expected[0][: expected[0].index(stop)]


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (GenerationRequest(prompt_ids=[]), BatchError, "empty"),
        (GenerationRequest(prompt_ids=[1, 64]), BatchError, "token_ids holds 64; ids are 0 to 63"),
        (GenerationRequest(prompt_ids=[-1]), BatchError, "-1"),
        (GenerationRequest(prompt_ids=[1.5, 2]), BatchError, r"whole numbers, got \[1.5, 2\]"),  # type: ignore[list-item]
        (GenerationRequest(prompt_ids="text"), BatchError, "whole numbers, got 'text'"),  # type: ignore[arg-type]
        (GenerationRequest(prompt_ids=[1] * 48, max_new_tokens=1), ConfigError, "over max_context"),
        (GenerationRequest(prompt_ids=[1] * 30, max_new_tokens=11), ConfigError, "over the KV pool"),
        (GenerationRequest(prompt_ids=[1], max_new_tokens=4, stop_texts=("x",)), ConfigError, "tokenizer"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_and_takes_nothing_with_it(
    request_: GenerationRequest, error: type[Exception], words: str
) -> None:
    one = engine(max_total_tokens=40)
    good = GenerationRequest(prompt_ids=[1, 2], max_new_tokens=2)
    with pytest.raises(error, match=words):
        one.generate([good, request_])
    assert_nothing_is_held(one)
    assert len(one.generate([good])[0].token_ids) == 2


def test_a_refused_request_takes_none_with_it_that_was_there_before() -> None:
    one = engine()
    one.add(GenerationRequest(prompt_ids=[1, 2], max_new_tokens=2, request_id="before"))
    with pytest.raises(BatchError, match="empty"):
        one.generate(
            [GenerationRequest(prompt_ids=[1], max_new_tokens=2), GenerationRequest(prompt_ids=[])],
            on_event=lambda _: None,
        )
    events = []
    while one.has_work:
        events += one.step()
    assert [event.request_id for event in events] == ["before", "before"]
    # A name is free again when its request has ended.
    assert one.add(GenerationRequest(prompt_ids=[1], max_new_tokens=2, request_id="before")) == "before"


def test_a_second_stream_cannot_take_the_tokens_of_the_first() -> None:
    one = engine()
    stream = one.stream(requests())
    first = next(stream)
    good = GenerationRequest(prompt_ids=[1, 2], max_new_tokens=2)
    with pytest.raises(ConfigError, match="at work for another"):
        one.generate([good])
    with pytest.raises(ConfigError, match="at work for another"):
        next(one.stream([good]))
    events = [first, *stream]
    assert len(events) == 6 * len(LENGTHS)
    assert len(one.generate([good])[0].token_ids) == 2


def test_a_step_inside_generate_is_refused_and_not_a_lost_end() -> None:
    one = engine()
    with pytest.raises(ConfigError, match="makes its own steps"):
        one.generate(requests(), on_event=lambda _: one.step() and None)
    assert_nothing_is_held(one)
    assert len(one.generate(requests())) == len(LENGTHS)


def test_dropping_all_from_an_event_ends_generate_with_what_there_was(
    expected: list[tuple[int, ...]],
) -> None:
    one = engine()
    seen: list[TokenEvent] = []

    def stop(event: TokenEvent) -> None:
        seen.append(event)
        if len(seen) == 3:
            one.drop_all()

    outputs = one.generate(requests(), on_event=stop)
    assert {output.finish_reason for output in outputs} == {FinishReason.INTERRUPTED}
    for output, whole in zip(outputs, expected, strict=True):
        assert output.token_ids == whole[: len(output.token_ids)]
    assert sum(len(output.token_ids) for output in outputs) >= 3
    assert_nothing_is_held(one)


@pytest.mark.parametrize("num_more", [0, 1, 2])
def test_requests_that_add_took_outlive_a_stream_that_ends_early(
    num_more: int, expected: list[tuple[int, ...]]
) -> None:
    """Also where it ends between two events of one step, and a forward with rows of both is in flight."""
    one = engine()
    asked = requests()
    name = one.add(asked[0])
    with pytest.raises(ConfigError, match="add took"):
        one.generate(asked[1:])
    events: list[TokenEvent] = []
    stream = one.stream(asked[1:])
    while not {event.request_id for event in events} - {name}:
        events.append(next(stream))
    events += [next(stream) for _ in range(num_more)]
    stream.close()
    assert [event.request_id for event in events].count(name) < 6, "it is still at work"
    while one.has_work:
        events += one.step()
    found = [event.token_id for event in events if event.request_id == name]
    assert tuple(found) == expected[0]
    assert_nothing_is_held(one)


def test_a_prompt_may_be_a_tensor_and_its_output_holds_numbers() -> None:
    one = engine()
    prompt = torch.tensor([1, 2, 3])
    output = one.generate([GenerationRequest(prompt_ids=prompt, max_new_tokens=2)])[0]  # type: ignore[arg-type]
    assert output.prompt_ids == (1, 2, 3)
    assert all(type(token_id) is int for token_id in output.prompt_ids)


def test_numbered_names_step_over_names_that_are_taken() -> None:
    one = engine()
    named = GenerationRequest(prompt_ids=[1], max_new_tokens=1, request_id="request 0")
    outputs = one.generate([named, GenerationRequest(prompt_ids=[1], max_new_tokens=1)])
    assert [output.request_id for output in outputs] == ["request 0", "request 1"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_texts": "abc"}, "tuple of texts"),
        ({"stop_texts": ("abc", 5)}, "must be texts"),
        ({"max_new_tokens": 1.0}, "max_new_tokens"),
        ({"stop_token_ids": 5}, "set of token ids"),
        ({"stop_token_ids": {"</s>"}}, "set of token ids"),
        ({"logprobs": True}, "LogprobRequest"),
        ({"sampling": {"top_k": 1.5}}, "top_k"),
        ({"sampling": {"top_k": 2**31}}, "top_k"),
        ({"sampling": {"temperature": float("nan")}}, "temperature"),
        ({"sampling": {"temperature": 1e39}}, "temperature"),
        ({"sampling": {"top_p": float("nan")}}, "top_p"),
    ],
)
def test_a_request_that_means_nothing_cannot_be_made(fields: dict[str, Any], words: str) -> None:
    make = SamplingParams if "sampling" in fields else functools.partial(GenerationRequest, prompt_ids=[1])
    with pytest.raises(ConfigError, match=words):
        make(**fields.get("sampling", fields))


def test_nan_logits_end_one_request_by_name_and_no_other(expected: list[tuple[int, ...]]) -> None:
    model = tiny_model()
    model.embed_tokens.weight[63] = torch.nan
    runner = ModelRunner.ready(model, plan=plan("full", "breakable", has_verify=False), options=OPTIONS)
    one = OfflineEngine(runner, options=EngineOptions(chunk_tokens=7))
    bad = GenerationRequest(prompt_ids=[5, 63, 7], max_new_tokens=6, request_id="bad")
    outputs = one.generate([*requests()[:2], bad, *requests()[2:]])
    assert outputs[2].finish_reason is FinishReason.ERROR
    assert "'bad'" in str(outputs[2].error)
    assert outputs[2].token_ids == ()
    assert [output.token_ids for index, output in enumerate(outputs) if index != 2] == expected
    assert_nothing_is_held(one)


@pytest.mark.parametrize("at_event", [1, 5, 12])
def test_ctrl_c_leaves_pools_consistent(at_event: int) -> None:
    one = engine()
    seen: list[TokenEvent] = []

    def interrupt(event: TokenEvent) -> None:
        seen.append(event)
        if len(seen) == at_event:
            signal.raise_signal(signal.SIGINT)

    with ctrl_c_raises(), pytest.raises(KeyboardInterrupt):
        one.generate(requests(), on_event=interrupt)
    assert_nothing_is_held(one)
    assert len(one.generate(requests())) == len(LENGTHS)


def test_ctrl_c_inside_a_step_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between taking slots and noting whose they are, an interrupt would lose them."""
    one = engine()
    one.add(GenerationRequest(prompt_ids=[1, 2, 3], max_new_tokens=3))
    forward = one.runner.forward

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return forward(*args, **kwargs)

    monkeypatch.setattr(one.runner, "forward", interrupted)
    with ctrl_c_raises(), pytest.raises(KeyboardInterrupt):
        one.step()
    monkeypatch.undo()
    running = one.scheduler.running[0]
    # The forward of the prompt was read, and the one behind it was launched.
    assert running.req.num_computed_tokens == 4
    assert running.num_new_tokens == running.num_tokens_in_flight == 1
    while one.has_work:
        one.step()
    assert_nothing_is_held(one)


def test_a_forward_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    one.add(GenerationRequest(prompt_ids=[1, 2, 3], max_new_tokens=3))

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(one.runner, "forward", failing)
    with pytest.raises(RuntimeError, match="device lost"):
        one.step()
    monkeypatch.undo()
    while one.has_work:
        one.step()
    assert_nothing_is_held(one)


class Letters:
    """A tokenizer of one letter for each token; token 60 is half of a two-token character."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        text = "".join(chr(ord("a") + one) if one < 26 else "\ufffd" for one in ids)
        return text.replace("\ufffd\ufffd", "é")


def text_stream(*stops: str) -> TextStream:
    return TextStream(Tokenizer(backend=Letters()), stops)


def test_text_is_held_back_inside_a_character() -> None:
    stream = text_stream()
    assert [stream.push(one) for one in (0, 60, 60, 1)] == ["a", "", "é", "b"]
    assert stream.text == "aéb"
    assert stream.push(60) == ""
    assert stream.flush() == "\ufffd"


def test_a_tokenizer_that_takes_a_space_back_costs_no_text() -> None:
    """drumih/turbo-fieldfare#118: a decoder joins a full stop to the word before, and the stop was never streamed."""

    class Joining(Letters):
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join({50: " ", 51: "."}.get(one, chr(97 + one % 26)) for one in ids).replace(" .", ".")

    for ids in ([0, 50, 51, 1], [50, 51], [0, 50, 50, 51]):
        stream = TextStream(Tokenizer(backend=Joining()))
        text = "".join(map(stream.push, ids)) + stream.flush()
        expected = Joining().decode(ids, skip_special_tokens=True)
        assert text.replace(" ", "") == expected.replace(" ", "")


def test_a_stop_text_over_several_tokens_is_never_handed_out() -> None:
    stream = text_stream("cd", "xyz")
    assert [stream.push(one) for one in (0, 23, 24, 0)] == ["a", "", "", "xya"]
    assert [stream.push(2), stream.push(3)] == ["", ""]
    assert stream.has_stopped
    assert stream.flush() == ""
    assert stream.text == "axya"


def test_what_looked_like_the_beginning_of_a_stop_text_comes_at_the_end() -> None:
    stream = text_stream("cd")
    assert stream.push(2) == ""
    assert stream.flush() == "c"


@pytest.mark.parametrize("shape", ["tiny-gemma3", "tiny-moe"])
def test_hybrid_and_expert_models_give_the_same_tokens_and_their_window_slots_come_back(shape: str) -> None:
    """With a window smaller than the prompts, slots of the window pool are used several times over.

    The longest request that ``max_context`` allows fits the window pool of the smallest pool that holds it.
    """
    model = random_decoder(named_shape(shape), device="cpu", dtype=torch.float32, seed=1)
    longest = max(LENGTHS) + 6
    options = dataclasses.replace(OPTIONS, max_context=longest, max_total_tokens=longest)
    found = []
    for asked in (plan("eager", "eager", has_verify=False), plan("none", "none", has_verify=False)):
        one = OfflineEngine(
            ModelRunner.ready(model, plan=asked, options=options), options=EngineOptions(chunk_tokens=7)
        )
        found.append([output.token_ids for output in one.generate(requests())])
        assert_nothing_is_held(one)
    assert found[0] == found[1]
